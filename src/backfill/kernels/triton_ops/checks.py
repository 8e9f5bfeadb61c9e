"""What the kernels can take: the checks that a launch needs. Each raises ValueError naming the argument."""

from __future__ import annotations

import torch
from torch import Tensor

from backfill.kernels.base import describe

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_matrix(name: str, x: Tensor, device: torch.device) -> None:
    if x.dim() != 2 or x.dtype not in _DTYPES or x.stride(1) != 1 or x.device != device:
        need = f"bfloat16, float16 or float32 [rows, columns], columns contiguous, on {device}"
        raise ValueError(f"{name}: {describe(x)}, need {need}")


def check_vector(
    name: str, x: Tensor, length: int | None, device: torch.device, dtype: torch.dtype | None = None
) -> None:
    """``dtype`` None: any floating type the kernels take. ``length`` None: any."""
    right_dtype = x.dtype in _DTYPES if dtype is None else x.dtype == dtype
    right_shape = x.dim() == 1 and (length is None or x.shape[0] == length)
    if not (right_dtype and right_shape and x.is_contiguous() and x.device == device):
        wanted_dtype = "floating point" if dtype is None else dtype
        wanted_length = "any length" if length is None else length
        raise ValueError(
            f"{name}: {describe(x)}, need contiguous {wanted_dtype} [{wanted_length}] on {device}"
        )


def check_heads(qkv: Tensor, kv_pool: Tensor, layer: int, num_heads: int, device: torch.device) -> None:
    check_matrix("qkv", qkv, device)
    if kv_pool.dim() != 6 or kv_pool.shape[2] != 2 or not kv_pool.is_contiguous():
        raise ValueError(f"kv_pool: {describe(kv_pool)}, need contiguous [num_blocks, L, 2, G, B, D]")
    if kv_pool.dtype != qkv.dtype or kv_pool.device != device:
        raise ValueError(f"kv_pool: {describe(kv_pool)}, need {qkv.dtype} on {device}, as qkv")
    _, num_layers, _, num_kv_heads, _, head_dim = kv_pool.shape
    if head_dim % 8:
        raise ValueError(f"kv_pool: head size {head_dim}, need a multiple of 8")
    if not 0 <= layer < num_layers:
        raise ValueError(f"layer: {layer}, the pool has {num_layers}")
    if num_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"num_heads: {num_heads}, need a multiple of the pool's {num_kv_heads} KV heads")
    if qkv.shape[1] != (num_heads + 2 * num_kv_heads) * head_dim:
        raise ValueError(
            f"qkv: width {qkv.shape[1]}, need ({num_heads} + 2 * {num_kv_heads}) heads of {head_dim}"
        )
