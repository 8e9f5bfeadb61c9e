"""Between the qkv projection and attention: per-head norm of q and k, rotary embedding, KV write."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from backfill.kernels.inputs import LayerInputs


@triton.jit
def _norm_and_rotate(
    x, used, norm, cos, sin, eps, halves, half_used, head_dim: tl.constexpr, rotary: tl.constexpr
):
    """Optional RMS norm, then optional rotation, of some heads.

    ``x [heads, D / 2]`` points at the first halves. Returns first and second halves in float32. As in the
    reference, normalised values pass through the input's dtype.
    """
    half: tl.constexpr = head_dim // 2
    first = tl.load(x, mask=used, other=0.0)
    second = tl.load(x + half, mask=used, other=0.0)
    dtype = first.dtype
    first = first.to(tl.float32)
    second = second.to(tl.float32)
    if norm is not None:
        mean_square = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / head_dim
        inverse = tl.rsqrt(mean_square + eps)[:, None]
        first_weight = tl.load(norm + halves, mask=half_used, other=0.0).to(tl.float32)
        second_weight = tl.load(norm + half + halves, mask=half_used, other=0.0).to(tl.float32)
        first = (first * inverse * first_weight[None, :]).to(dtype).to(tl.float32)
        second = (second * inverse * second_weight[None, :]).to(dtype).to(tl.float32)
    if rotary:
        rotated = first * cos[None, :] - second * sin[None, :]
        second = second * cos[None, :] + first * sin[None, :]
        first = rotated
    return first, second


@triton.jit(do_not_specialize=["layer"])
def _rotate_and_write_kernel(
    qkv,
    kv_pool,
    positions,
    slot_mapping,
    cos_sin,
    q_norm,
    k_norm,
    eps,
    layer,
    num_queries_per_kv: tl.constexpr,
    num_layers: tl.constexpr,
    num_kv_heads: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    half_padded: tl.constexpr,
    heads_padded: tl.constexpr,
):
    """Program (t, g): row t's query heads of KV head g in place, and its K and V head g into the pool."""
    half: tl.constexpr = head_dim // 2
    rotary: tl.constexpr = cos_sin is not None
    token = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = qkv + token.to(tl.int64) * ((num_queries_per_kv + 2) * num_kv_heads * head_dim)
    halves = tl.arange(0, half_padded)
    half_used = halves < half
    cos = tl.zeros([half_padded], dtype=tl.float32)
    sin = cos
    if rotary:
        angles = cos_sin + tl.load(positions + token) * head_dim + halves
        cos = tl.load(angles, mask=half_used, other=0.0)
        sin = tl.load(angles + half, mask=half_used, other=0.0)

    if rotary or q_norm is not None:
        heads = tl.arange(0, heads_padded)
        used = (heads < num_queries_per_kv)[:, None] & half_used[None, :]
        q = row + ((kv_head * num_queries_per_kv + heads) * head_dim)[:, None] + halves[None, :]
        first, second = _norm_and_rotate(q, used, q_norm, cos, sin, eps, halves, half_used, head_dim, rotary)
        tl.store(q, first.to(qkv.dtype.element_ty), mask=used)
        tl.store(q + half, second.to(qkv.dtype.element_ty), mask=used)

    one_head = half_used[None, :]
    k = row + (num_kv_heads * num_queries_per_kv + kv_head) * head_dim + halves[None, :]
    first, second = _norm_and_rotate(k, one_head, k_norm, cos, sin, eps, halves, half_used, head_dim, rotary)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    plane = (slot // block_size * num_layers + layer) * (2 * num_kv_heads) + kv_head
    k_out = kv_pool + (plane * block_size + slot % block_size) * head_dim + halves[None, :]
    tl.store(k_out, first.to(kv_pool.dtype.element_ty), mask=one_head)
    tl.store(k_out + half, second.to(kv_pool.dtype.element_ty), mask=one_head)

    v = k + num_kv_heads * head_dim
    v_out = k_out + num_kv_heads * block_size * head_dim
    tl.store(v_out, tl.load(v, mask=one_head), mask=one_head)
    tl.store(v_out + half, tl.load(v + half, mask=one_head), mask=one_head)


def rotate_and_write_kv(
    inputs: LayerInputs, cos_sin: Tensor | None, q_norm: Tensor | None, k_norm: Tensor | None, eps: float
) -> None:
    """See ``Kernels.rotate_and_write_kv``; there is at least one row."""
    qkv, kv_pool, layer, batch, num_heads = inputs
    _, num_layers, _, num_kv_heads, block_size, head_dim = kv_pool.shape
    num_queries_per_kv = num_heads // num_kv_heads
    _rotate_and_write_kernel[(qkv.shape[0], num_kv_heads)](
        qkv,
        kv_pool,
        batch.positions,
        batch.slot_mapping,
        cos_sin,
        q_norm,
        k_norm,
        eps,
        layer,
        num_queries_per_kv=num_queries_per_kv,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        head_dim=head_dim,
        half_padded=triton.next_power_of_2(head_dim // 2),
        heads_padded=triton.next_power_of_2(num_queries_per_kv),
        num_warps=2,
    )
