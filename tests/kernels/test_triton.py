"""Triton kernels against the reference: in Triton's interpreter on CPU, compiled on CUDA (marker ``gpu``)."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import triton
from torch import Tensor

from backfill.kernels.inputs import AttentionMetadata, SharedKeys
from backfill.kernels.triton_ops import TritonKernels
from tests.kernels.batches import make_batch
from tests.kernels.reference import ReferenceKernels

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# With a GPU, Triton compiles, and the interpreter's cases do not exist.
DEVICES = [*(["cpu"] if INTERPRETED else []), pytest.param("cuda", marks=pytest.mark.gpu)]
REFERENCE = ReferenceKernels()
LAYERS, LAYER = 3, 2
TOLERANCES = {torch.bfloat16: (2e-2, 2e-2), torch.float16: (5e-3, 5e-3), torch.float32: (1e-5, 1e-5)}

DECODE = [(1, 1), (1, 33), (1, 70)]
CHUNKS = [(5, 5), (40, 101), (0, 9), (17, 90)]
MIXED = [(1, 65), (23, 23), (1, 7), (9, 80), (1, 130)]
LONG_DECODE = [(1, 600), (1, 20)]  # of the longest two splits


class AttentionCase(NamedTuple):
    """``lens`` has (query length, context length) by sequence."""

    dtype: torch.dtype
    head_dim: int
    num_heads: int
    num_kv_heads: int
    block_size: int
    lens: Sequence[tuple[int, int]]


ATTENTION_CASES = [
    pytest.param(AttentionCase(torch.bfloat16, 64, 8, 2, 16, MIXED), id="bf16-d64-gqa4-b16-mixed"),
    pytest.param(
        AttentionCase(torch.float32, 128, 3, 1, 32, MIXED),
        id="fp32-d128-gqa3-b32-mixed",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        AttentionCase(torch.bfloat16, 128, 4, 1, 8, CHUNKS),
        id="bf16-d128-gqa4-b8-chunks",
        marks=pytest.mark.slow,
    ),
    pytest.param(AttentionCase(torch.float32, 40, 6, 2, 16, CHUNKS), id="fp32-d40-gqa3-b16-chunks"),
    pytest.param(AttentionCase(torch.bfloat16, 80, 3, 1, 32, DECODE), id="bf16-d80-gqa3-b32-decode"),
    pytest.param(AttentionCase(torch.float32, 8, 2, 2, 8, DECODE), id="fp32-d8-gqa1-b8-decode"),
    pytest.param(
        AttentionCase(torch.bfloat16, 8, 8, 2, 32, CHUNKS),
        id="bf16-d8-gqa4-b32-chunks",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        AttentionCase(torch.float32, 80, 2, 2, 8, MIXED),
        id="fp32-d80-gqa1-b8-mixed",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        AttentionCase(torch.bfloat16, 40, 2, 2, 16, DECODE),
        id="bf16-d40-gqa1-b16-decode",
        marks=pytest.mark.slow,
    ),
    pytest.param(AttentionCase(torch.float16, 64, 3, 1, 16, MIXED), id="fp16-d64-gqa3-b16-mixed"),
    pytest.param(
        AttentionCase(torch.float32, 64, 4, 1, 16, [(7, 7)] * 2),
        id="fp32-d64-gqa4-b16-equal-chunks",
        marks=pytest.mark.slow,
    ),
    pytest.param(AttentionCase(torch.float32, 16, 20, 1, 16, MIXED), id="fp32-d16-gqa20-b16-mixed"),
]


def on(device: str, batch: AttentionMetadata) -> AttentionMetadata:
    shared = batch.shared
    if shared is not None:
        shared = dataclasses.replace(shared, **tensors_on(device, shared))
    return dataclasses.replace(batch, **tensors_on(device, batch), shared=shared)


def tensors_on(device: str, of: AttentionMetadata | SharedKeys) -> dict[str, Any]:
    values = {field.name: getattr(of, field.name) for field in dataclasses.fields(of)}
    return {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}


def random(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def poisoned_pool(
    batch: AttentionMetadata,
    shape: tuple[int, int, int, int, int, int],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Tensor:
    """Random K and V in ``LAYER`` of every slot that a sequence of the batch uses, NaN everywhere else."""
    pool = torch.full(shape, float("nan"), dtype=dtype)
    block_size = shape[4]
    for seq in range(batch.num_seqs):
        offsets = torch.arange(int(batch.seq_lens[seq]))
        refs = batch.block_table[int(batch.block_table_offsets[seq]) :].long()[offsets // block_size]
        places = torch.where(refs & 1 == 1, block_size - 1 - offsets % block_size, offsets % block_size)
        rows = random(generator, len(offsets), 2, shape[3], shape[5], dtype=dtype)
        pool[refs >> 1, LAYER, :, :, places] = rows
    return pool


def assert_close(actual: Tensor, expected: Tensor) -> None:
    rtol, atol = TOLERANCES[expected.dtype]
    torch.testing.assert_close(actual.cpu(), expected, rtol=rtol, atol=atol, equal_nan=True)


def assert_rotated_close(actual: Tensor, expected: Tensor) -> None:
    """Of heads ``[..., D]``: relative to the length of each rotated pair, which a rotation keeps.

    Normalised values round before it, and may cancel in it: one element alone bounds no error.
    """
    rtol, _ = TOLERANCES[expected.dtype]
    wide = expected.float()
    lengths = torch.hypot(wide, wide.roll(wide.shape[-1] // 2, dims=-1))
    errors = (actual.cpu().float() - wide).abs()
    assert (errors <= rtol * lengths + 1e-6).all(), (errors - rtol * lengths).max()


def check_attention(
    device: str,
    case: AttentionCase,
    generator: torch.Generator,
    decode_programs: int = 1,
    batch: AttentionMetadata | None = None,
) -> None:
    """``batch``: of the case; one of random blocks where it is not given."""
    dtype, head_dim, num_heads, num_kv_heads, block_size, lens = case
    num_blocks = sum(-(-context // block_size) for _, context in lens) + 3
    if batch is None:
        batch = make_batch(lens, block_size=block_size, num_blocks=num_blocks, generator=generator)
    pool = poisoned_pool(batch, (num_blocks, LAYERS, 2, num_kv_heads, block_size, head_dim), dtype, generator)
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = random(generator, sum(query for query, _ in lens), width, dtype=dtype)
    scale = head_dim**-0.5
    expected = REFERENCE.attention(qkv, pool, LAYER, batch, num_heads, scale)
    kernels = TritonKernels(torch.device(device), decode_programs)
    there = on(device, batch)
    actual = kernels.attention(qkv.to(device), pool.to(device), LAYER, there, num_heads, scale)
    assert not expected.isnan().any()
    assert_close(actual, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", ATTENTION_CASES)
def test_attention(device: str, case: AttentionCase, generator: torch.Generator) -> None:
    check_attention(device, case, generator)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.bfloat16, marks=pytest.mark.slow), torch.float32], ids=["bf16", "fp32"]
)
def test_attention_with_split_contexts(device: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    """Some splits hold whole tiles, some a part of one, and those past the short context nothing."""
    case = AttentionCase(dtype, 40, 6, 2, 16, [*LONG_DECODE, (4, 70)])
    check_attention(device, case, generator, decode_programs=1000)


@pytest.mark.gpu
def test_attention_of_long_contexts(generator: torch.Generator) -> None:
    """As in a model with heads of 128: against float32, whose rounding is far below bfloat16's."""
    lens = [(1, 4096), (1, 32768), (64, 32768), (300, 4100)]
    case = AttentionCase(torch.bfloat16, 128, 8, 2, 16, lens)
    num_blocks, width = sum(-(-context // 16) for _, context in lens) + 3, 12 * 128
    batch = make_batch(lens, block_size=16, num_blocks=num_blocks, generator=generator)
    pool = poisoned_pool(batch, (num_blocks, LAYERS, 2, 2, 16, 128), case.dtype, generator)
    qkv = random(generator, sum(query for query, _ in lens), width, dtype=case.dtype)
    there = on("cuda", batch)
    actual = TritonKernels(torch.device("cuda")).attention(
        qkv.cuda(), pool.cuda(), LAYER, there, 8, 128**-0.5
    )
    on_device = ReferenceKernels(torch.device("cuda", torch.cuda.current_device()))
    expected = on_device.attention(qkv.float().cuda(), pool.float().cuda(), LAYER, there, 8, 128**-0.5)
    error = (actual.float() - expected).norm() / expected.norm()
    assert error < 1e-2


@pytest.mark.gpu
def test_attention_in_a_cuda_graph(generator: torch.Generator) -> None:
    """Captured with the longest contexts, replayed with other contexts, blocks and values."""
    heads, groups, head_dim, block_size, num_blocks = 4, 2, 64, 16, 90
    shape = (num_blocks, LAYERS, 2, groups, block_size, head_dim)
    kernels = TritonKernels(torch.device("cuda"))
    qkv = torch.zeros(2, (heads + 2 * groups) * head_dim, dtype=torch.bfloat16, device="cuda")
    pool = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    longest = make_batch([(1, 700)] * 2, block_size=block_size, num_blocks=num_blocks, generator=generator)
    captured = on("cuda", longest)
    kernels.attention(qkv, pool, LAYER, captured, heads, 0.125)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.attention(qkv, pool, LAYER, captured, heads, 0.125)

    batch = make_batch([(1, 40), (1, 513)], block_size=block_size, num_blocks=num_blocks, generator=generator)
    new_qkv = random(generator, *qkv.shape, dtype=torch.bfloat16)
    new_pool = poisoned_pool(batch, shape, torch.bfloat16, generator)
    qkv.copy_(new_qkv)
    pool.copy_(new_pool)
    captured.seq_lens.copy_(batch.seq_lens)
    captured.block_table_offsets.copy_(batch.block_table_offsets)
    captured.block_table[: len(batch.block_table)].copy_(batch.block_table)
    graph.replay()
    assert_close(out, REFERENCE.attention(new_qkv, new_pool, LAYER, batch, heads, 0.125))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "head_dim", "block_size", "rotary", "norm"),
    [
        pytest.param(torch.bfloat16, 64, 16, True, True, id="bf16-rotary-norm"),
        pytest.param(torch.float32, 40, 8, True, True, id="fp32-rotary-norm", marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, 128, 32, True, False, id="bf16-rotary", marks=pytest.mark.slow),
        pytest.param(torch.float32, 80, 16, False, True, id="fp32-norm", marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, 8, 8, False, False, id="bf16-write-only"),
    ],
)
def test_rotate_and_write_kv(
    device: str,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    rotary: bool,
    norm: bool,
    generator: torch.Generator,
) -> None:
    num_heads, num_kv_heads, num_blocks = 6, 2, 12
    batch = make_batch(
        [(1, 20), (9, 30), (1, 1)], block_size=block_size, num_blocks=num_blocks, generator=generator
    )
    shape = (num_blocks, LAYERS, 2, num_kv_heads, block_size, head_dim)
    expected_pool = random(generator, *shape, dtype=dtype)
    qkv = random(generator, 11, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    angles = torch.rand((64, head_dim // 2), generator=generator) * 6.28
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1) if rotary else None
    norms = [random(generator, head_dim, dtype=dtype) if norm else None for _ in range(2)]
    pool, on_device = expected_pool.to(device, copy=True), qkv.to(device, copy=True)

    REFERENCE.rotate_and_write_kv(qkv, expected_pool, LAYER, batch, num_heads, cos_sin, *norms, eps=1e-5)
    TritonKernels(torch.device(device)).rotate_and_write_kv(
        on_device,
        pool,
        LAYER,
        on(device, batch),
        num_heads,
        None if cos_sin is None else cos_sin.to(device),
        *(None if weight is None else weight.to(device) for weight in norms),
        eps=1e-5,
    )
    queries = [
        rows[:, : num_heads * head_dim].unflatten(1, (num_heads, head_dim)) for rows in (on_device, qkv)
    ]
    assert_rotated_close(*queries)
    assert_rotated_close(pool, expected_pool)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_no_sequence(device: str, generator: torch.Generator) -> None:
    """They write no KV, and change no other row."""
    shape, kernels = (9, LAYERS, 2, 2, 8, 16), TritonKernels(torch.device(device), decode_programs=50)
    batch = make_batch([(1, 20), (1, 30)], block_size=8, num_blocks=9, generator=generator)
    padded = dataclasses.replace(
        batch,
        positions=torch.tensor([*batch.positions, 0]),
        slot_mapping=torch.tensor([*batch.slot_mapping, -1]),
        cu_seqlens_q=torch.tensor([0, 1, 2, 2], dtype=torch.int32),
        seq_lens=torch.tensor([20, 30, 0], dtype=torch.int32),
        block_table_offsets=torch.tensor([*batch.block_table_offsets, len(batch.block_table)]).int(),
        max_seq_len=1000,
    )
    qkv, pool = random(generator, 3, 8 * 16, dtype=torch.float32), torch.zeros(shape)
    qkv_there, pool_there = qkv.to(device, copy=True), pool.to(device, copy=True)
    cos_sin = torch.rand((64, 16), generator=generator)
    two = qkv[:2].clone()
    REFERENCE.rotate_and_write_kv(two, pool, LAYER, batch, 4, cos_sin)
    kernels.rotate_and_write_kv(qkv_there, pool_there, LAYER, on(device, padded), 4, cos_sin.to(device))
    assert_close(pool_there, pool)
    actual = kernels.attention(qkv_there, pool_there, LAYER, on(device, padded), 4, 0.25)
    assert_close(actual[:2], REFERENCE.attention(two, pool, LAYER, batch, 4, 0.25))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("width", [40, 1100])
def test_row_operators(device: str, dtype: torch.dtype, width: int, generator: torch.Generator) -> None:
    kernels = TritonKernels(torch.device(device))
    x = random(generator, 5, 2 * width, dtype=dtype)
    residual = random(generator, 5, width, dtype=dtype)
    weight = random(generator, width, dtype=dtype)
    x_there, residual_there, weight_there = (t.to(device, copy=True) for t in (x, residual, weight))

    assert_close(kernels.silu_and_mul(x_there), REFERENCE.silu_and_mul(x))
    left, left_there = x[:, :width], x_there[:, :width]
    assert_close(kernels.rms_norm(left_there, weight_there, 1e-5), REFERENCE.rms_norm(left, weight, 1e-5))
    actual = kernels.add_rms_norm(left_there, residual_there, weight_there, 1e-5)
    assert_close(actual, REFERENCE.add_rms_norm(left, residual, weight, 1e-5))
    assert_close(residual_there, residual)


@pytest.mark.parametrize("device", DEVICES)
def test_linear(device: str, generator: torch.Generator) -> None:
    x, weight, bias = (random(generator, *shape, dtype=torch.float32) for shape in ((3, 16), (24, 16), (24,)))
    linear = TritonKernels(torch.device(device)).linear(weight.to(device), bias.to(device))
    assert (linear.in_features, linear.out_features) == (16, 24)
    assert_close(linear(x.to(device)), REFERENCE.linear(weight, bias)(x))


@pytest.mark.parametrize("device", DEVICES)
def test_no_rows(device: str) -> None:
    kernels = TritonKernels(torch.device(device))
    empty = torch.empty(0, 64, device=device)
    assert kernels.silu_and_mul(empty).shape == (0, 32)
    assert kernels.rms_norm(empty, torch.ones(64, device=device), 1e-5).shape == (0, 64)


def test_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.runtime, "JITFunction", object)
    with pytest.raises(ValueError, match=r"^device: "):
        TritonKernels(torch.device("cpu"))
