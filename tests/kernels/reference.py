"""Plain torch kernels: the meaning of every operator, on any device, without regard for speed.

The C++ and Triton kernels are tested against these.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from backfill.core.block import KV_SCALE_BYTES
from backfill.kernels.base import Kernels
from backfill.kernels.inputs import LayerInputs
from backfill.kernels.linears import PlainLinear, Table
from backfill.kernels.slots import SlotRange, check_packed

_LEAST_MAGNITUDE = 1e-30  # of a row that is not zero: 127 / magnitude stays finite


class ReferenceKernels(Kernels):
    """The operators in plain torch, on any device."""

    description = "plain torch"

    def __init__(self, device: torch.device | None = None) -> None:
        dtypes = torch.bfloat16, torch.float16, torch.float32
        super().__init__(device or torch.device("cpu"), dtypes, takes_int8_kv=True)

    def _linear(self, weight: Tensor, bias: Tensor | None) -> Table:
        return PlainLinear(weight, bias)

    def _rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        if residual is not None:
            residual += x
            x = residual
        return _normed(x, weight, eps)

    def _silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (F.silu(gate) * up).to(gate_up.dtype)

    def _rotate_and_write_kv(
        self,
        inputs: LayerInputs,
        cos_sin: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> None:
        _, kv_pool, layer, batch, _ = inputs
        q, k, v = _split_heads(inputs)
        q_rotated = q
        if q_norm is not None and k_norm is not None:
            q_rotated, k = _normed(q, q_norm, eps), _normed(k, k_norm, eps)
        if cos_sin is not None:
            q_rotated = _rotate(q_rotated, cos_sin[batch.positions])
            k = _rotate(k, cos_sin[batch.positions])
        q.copy_(q_rotated)
        block_size = kv_pool.shape[4]
        blocks, slots = batch.slot_mapping // block_size, batch.slot_mapping % block_size
        for index, rows in enumerate((k, v)):
            kept = quantized_rows(rows) if kv_pool.dtype == torch.int8 else rows
            kv_pool[blocks, layer, index, :, slots] = kept

    def _attention(self, inputs: LayerInputs, scale: float) -> Tensor:
        _, kv_pool, layer, batch, num_heads = inputs
        num_kv_heads = kv_pool.shape[3]
        q, _, _ = _split_heads(inputs)
        out = torch.empty_like(q)
        for seq in range(batch.num_seqs):
            start, end = int(batch.cu_seqlens_q[seq]), int(batch.cu_seqlens_q[seq + 1])
            context = int(batch.seq_lens[seq])
            refs = batch.block_table[
                int(batch.block_table_offsets[seq]) : int(batch.block_table_offsets[seq + 1])
            ]
            k, v = (
                _dequantized_rows(rows).repeat_interleave(num_heads // num_kv_heads, dim=0)
                for rows in (gather_tokens(kv_pool[:, layer, index], refs, context) for index in (0, 1))
            )
            scores = torch.einsum("qhd,hkd->hqk", q[start:end].float(), k) * scale
            query_positions = torch.arange(context - (end - start), context, device=q.device)
            key_positions = torch.arange(context, device=q.device)
            hidden = key_positions[None, :] > query_positions[:, None]
            probabilities = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out[start:end] = torch.einsum("hqk,hkd->qhd", probabilities, v).to(q.dtype)
        return out.reshape(out.shape[0], -1)


def gather_slots(pool: Tensor, ranges: Sequence[SlotRange], packed: Tensor) -> None:
    """See ``backfill.kernels.slots.SlotKernels``."""
    check_packed(pool, ranges, packed)
    at = 0
    for block, first, num in ranges:
        slots = pool[block, :, :, :, first : first + num]
        packed[at : at + slots.numel()] = slots.flatten()
        at += slots.numel()


def scatter_slots(packed: Tensor, pool: Tensor, ranges: Sequence[SlotRange]) -> None:
    """See ``backfill.kernels.slots.SlotKernels``."""
    check_packed(pool, ranges, packed)
    at = 0
    for block, first, num in ranges:
        slots = pool[block, :, :, :, first : first + num]
        slots.copy_(packed[at : at + slots.numel()].view(slots.shape))
        at += slots.numel()


def gather_tokens(pool: Tensor, refs: Tensor, num_tokens: int) -> Tensor:
    """A sequence's first tokens, in order: ``[num_blocks, G, B, D] -> [G, num_tokens, D]``."""
    block_size = pool.shape[2]
    offsets = torch.arange(num_tokens, device=pool.device)
    ref = refs.long()[offsets // block_size]
    forward = offsets % block_size
    slots = torch.where(ref & 1 == 1, block_size - 1 - forward, forward)
    return pool[ref >> 1, :, slots].transpose(0, 1)


def quantized_rows(x: Tensor) -> Tensor:
    """K or V of tokens and heads as int8 KV has it: ``[..., D] -> int8 [..., D + 4]``.

    An element becomes the nearest of 255 multiples of the row's scale, its largest magnitude / 127: it is off
    by half a scale at most. Then come the bytes of the scale, a float32. Below 1e-30 a row is zero.
    """
    values = x.float()
    magnitudes = values.abs().amax(-1, keepdim=True)
    is_zero = magnitudes < _LEAST_MAGNITUDE
    scales = (magnitudes / 127).masked_fill(is_zero, 0)
    # Not 127 / magnitudes, which torch takes for a product with the reciprocal.
    inverses = torch.full_like(magnitudes, 127).div(magnitudes).masked_fill(is_zero, 0)
    codes = (values * inverses).round().to(torch.int8)
    return torch.cat((codes, scales.view(torch.int8)), dim=-1)


def _dequantized_rows(rows: Tensor) -> Tensor:
    """As float32, without scales."""
    if rows.dtype != torch.int8:
        return rows.float()
    scales = rows[..., -KV_SCALE_BYTES:].contiguous().view(torch.float32)
    return rows[..., :-KV_SCALE_BYTES].float() * scales


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (x32 * scale * weight.float()).to(x.dtype)


def _split_heads(inputs: LayerInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Views ``[T, H, D]``, ``[T, G, D]``, ``[T, G, D]`` of ``[T, (H + 2G) * D]``."""
    qkv, num_heads = inputs.qkv, inputs.num_heads
    num_kv_heads, head_dim = inputs.kv_pool.shape[3], inputs.head_dim
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
    end_of_k = num_heads + num_kv_heads
    return heads[:, :num_heads], heads[:, num_heads:end_of_k], heads[:, end_of_k:]


def _rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotary embedding of ``x [T, heads, D]`` by ``cos_sin [T, D]``; float32 inside."""
    cos, sin = cos_sin[:, None, :].chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
