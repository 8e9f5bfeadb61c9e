"""Attention and fused operators: C++ (CPU) and Triton (CUDA)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from backfill.kernels.base import Kernels


def create_kernels(device: torch.device) -> Kernels:
    """The fastest kernel set for ``device``; its module is imported only when chosen."""
    if device.type == "cpu":
        from backfill.kernels.cpu import CpuKernels

        return CpuKernels()
    if device.type == "cuda":
        from backfill.kernels.triton_ops import TritonKernels

        return TritonKernels(device)
    raise ValueError(f"no kernels for device {device}; cpu and cuda have them")
