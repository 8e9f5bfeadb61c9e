"""The kernel set: checks every argument and calls the launchers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from backfill.kernels.base import AttentionMetadata, Linear, describe
from backfill.kernels.reference import ReferenceLinear
from backfill.kernels.triton_ops import rotary, rowwise
from backfill.kernels.triton_ops.attention import AttentionArguments, attend
from backfill.kernels.triton_ops.decode import decode
from backfill.kernels.triton_ops.prefill import prefill

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class TritonKernels:
    """See ``backfill.kernels.base.Kernels`` for shapes; dtypes are bfloat16, float16 and float32.

    Every method raises ValueError, naming the argument, for a tensor of a shape, stride, dtype or device that
    the kernel cannot take; then nothing was launched. Kernels go to the current stream of the current device,
    which must be ``device``.

    Args:
        device: where all tensors are.
        decode_programs: programs a decode step should have at least; contexts are split to reach it.
            Default: two for each multiprocessor, so that one computes while the other loads
            (no split in the interpreter).
    Raises: ValueError if ``device`` is not CUDA and Triton was not imported with ``TRITON_INTERPRET=1``.
    """

    description = "Triton"

    def __init__(self, device: torch.device, decode_programs: int | None = None) -> None:
        interpreted = not isinstance(attend, triton.runtime.JITFunction)
        if device.type != "cuda" and not interpreted:
            raise ValueError(f"device: {device} needs Triton's interpreter (TRITON_INTERPRET=1), else CUDA")
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if decode_programs is None:
            decode_programs = 1
            if device.type == "cuda":
                decode_programs = 2 * torch.cuda.get_device_properties(device).multi_processor_count
        self._device = device
        self._decode_programs = decode_programs
        # The interpreter multiplies the bit patterns of bfloat16 operands as integers.
        self._dot_dtypes = {
            torch.bfloat16: tl.float32 if interpreted else tl.bfloat16,
            torch.float16: tl.float16,
            torch.float32: tl.float32,
        }

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """cuBLAS on the weight as it is; a weight that is already on the device is shared, not copied."""
        if weight.dim() != 2:
            raise ValueError(f"weight: shape {tuple(weight.shape)}, need [out, in]")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"bias: shape {tuple(bias.shape)}, need {tuple(weight.shape[:1])}")
        packed_bias = None if bias is None else bias.to(self._device).contiguous()
        return ReferenceLinear(weight.to(self._device).contiguous(), packed_bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        _check_matrix("x", x, self._device)
        _check_vector("weight", weight, x.shape[1], self._device)
        return rowwise.rms_norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        _check_matrix("x", x, self._device)
        _check_matrix("residual", residual, self._device)
        if residual.shape != x.shape or residual.dtype != x.dtype:
            raise ValueError(f"residual: {describe(residual)}, x: {describe(x)}; they must match")
        _check_vector("weight", weight, x.shape[1], self._device)
        return rowwise.rms_norm(x, residual, weight, eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        _check_matrix("gate_up", gate_up, self._device)
        if gate_up.shape[1] % 2:
            raise ValueError(f"gate_up: width {gate_up.shape[1]}, need an even one")
        return rowwise.silu_and_mul(gate_up)

    def rotate_and_write_kv(
        self,
        qkv: Tensor,
        kv_pool: Tensor,
        layer: int,
        batch: AttentionMetadata,
        num_heads: int,
        cos_sin: Tensor | None,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        _check_heads(qkv, kv_pool, layer, num_heads, self._device)
        num_tokens, head_dim = qkv.shape[0], kv_pool.shape[5]
        _check_vector("positions", batch.positions, num_tokens, self._device, torch.int64)
        _check_vector("slot_mapping", batch.slot_mapping, num_tokens, self._device, torch.int64)
        if cos_sin is not None:
            _check_matrix("cos_sin", cos_sin, self._device)
            if cos_sin.dtype != torch.float32 or cos_sin.shape[1] != head_dim or not cos_sin.is_contiguous():
                need = f"contiguous float32 [positions, {head_dim}]"
                raise ValueError(f"cos_sin: {describe(cos_sin)}, need {need}")
        if (q_norm is None) != (k_norm is None):
            raise ValueError("k_norm: expected q_norm and k_norm, or neither")
        for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
            if norm is not None:
                _check_vector(name, norm, head_dim, self._device)
        if num_tokens:
            rotary.rotate_and_write_kv(qkv, kv_pool, layer, batch, num_heads, cos_sin, q_norm, k_norm, eps)

    def attention(
        self, qkv: Tensor, kv_pool: Tensor, layer: int, batch: AttentionMetadata, num_heads: int, scale: float
    ) -> Tensor:
        _check_heads(qkv, kv_pool, layer, num_heads, self._device)
        num_tokens, num_seqs = qkv.shape[0], batch.num_seqs
        for name, tensor, length in (
            ("cu_seqlens_q", batch.cu_seqlens_q, num_seqs + 1),
            ("seq_lens", batch.seq_lens, num_seqs),
            ("block_table", batch.block_table, None),
            ("block_table_offsets", batch.block_table_offsets, num_seqs + 1),
        ):
            _check_vector(name, tensor, length, self._device, torch.int32)
        out = torch.empty((num_tokens, num_heads * kv_pool.shape[5]), dtype=qkv.dtype, device=qkv.device)
        if num_tokens == 0:
            return out
        dot_dtype = self._dot_dtypes[kv_pool.dtype]
        arguments = AttentionArguments(out, qkv, kv_pool, layer, batch, num_heads, scale, dot_dtype)
        if batch.max_query_len > 1:
            prefill(arguments)
        # With as many rows as sequences of the longest query length have, no sequence has a single row.
        if batch.max_query_len == 1 or num_tokens < num_seqs * batch.max_query_len:
            decode(arguments, self._decode_programs)
        return out


def _check_matrix(name: str, x: Tensor, device: torch.device) -> None:
    if x.dim() != 2 or x.dtype not in _DTYPES or x.stride(1) != 1 or x.device != device:
        need = f"bfloat16, float16 or float32 [rows, columns], columns contiguous, on {device}"
        raise ValueError(f"{name}: {describe(x)}, need {need}")


def _check_vector(
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


def _check_heads(qkv: Tensor, kv_pool: Tensor, layer: int, num_heads: int, device: torch.device) -> None:
    _check_matrix("qkv", qkv, device)
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
