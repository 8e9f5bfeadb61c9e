"""The kernel set: calls the launchers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from backfill.kernels.base import Kernels
from backfill.kernels.inputs import LayerInputs
from backfill.kernels.linears import PlainLinear, Table
from backfill.kernels.triton_ops import rotary, rowwise
from backfill.kernels.triton_ops.attention import AttentionArguments, DeviceSizes, attend
from backfill.kernels.triton_ops.decode import decode
from backfill.kernels.triton_ops.prefill import prefill


class TritonKernels(Kernels):
    """Triton's kernels, and cuBLAS on weights as they are; dtypes are bfloat16, float16 and float32.

    Kernels go to the current stream of the current device, which must be ``device``.

    Args:
        device: where all tensors are.
        decode_programs: programs a decode step should have at least; contexts are split to reach it.
            Default: three for each multiprocessor. On an H200 that is within 1 % of the best of 1 to 32, for
            six batches of 1 to 128 sequences with 512 to 16,000 tokens. In the interpreter no split.
    Raises: ValueError if ``device`` is not CUDA and Triton was not imported with ``TRITON_INTERPRET=1``.
    """

    description = "Triton"

    def __init__(self, device: torch.device, decode_programs: int | None = None) -> None:
        interpreted = not isinstance(attend, triton.runtime.JITFunction)
        if device.type != "cuda" and not interpreted:
            raise ValueError(f"device: {device} needs Triton's interpreter (TRITON_INTERPRET=1), else CUDA")
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._sizes = DeviceSizes()
        if device.type == "cuda":
            found = torch.cuda.get_device_properties(device)
            shared_bytes = found.shared_memory_per_block_optin  # type: ignore[attr-defined]
            self._sizes = DeviceSizes(found.multi_processor_count, shared_bytes)
        self._decode_programs = decode_programs or max(1, 3 * self._sizes.num_multiprocessors)
        # The interpreter multiplies the bit patterns of bfloat16 operands as integers.
        self._dot_dtypes = {
            torch.bfloat16: tl.float32 if interpreted else tl.bfloat16,
            torch.float16: tl.float16,
            torch.float32: tl.float32,
        }
        super().__init__(device, tuple(self._dot_dtypes))

    def _linear(self, weight: Tensor, bias: Tensor | None) -> Table:
        return PlainLinear(weight.contiguous(), bias)

    def _rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        return rowwise.rms_norm(x, residual, weight, eps)

    def _silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return rowwise.silu_and_mul(gate_up)

    def _rotate_and_write_kv(
        self,
        inputs: LayerInputs,
        cos_sin: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> None:
        if inputs.qkv.shape[0]:
            rotary.rotate_and_write_kv(inputs, cos_sin, q_norm, k_norm, eps)

    def _attention(self, inputs: LayerInputs, scale: float) -> Tensor:
        qkv, kv_pool, _, batch, num_heads = inputs
        num_tokens = qkv.shape[0]
        out = qkv.new_empty((num_tokens, num_heads * kv_pool.shape[5]))
        if num_tokens == 0:
            return out
        arguments = AttentionArguments(inputs, out, scale, self._dot_dtypes[kv_pool.dtype])
        if batch.max_query_len > 1:
            prefill(arguments, self._sizes)
        # With as many rows as sequences of the longest query length have, no sequence has a single row.
        if batch.max_query_len == 1 or num_tokens < batch.num_seqs * batch.max_query_len:
            decode(arguments, self._decode_programs)
        return out
