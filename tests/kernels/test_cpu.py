"""Every variant of the C++ kernels that this machine runs, against the torch reference."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from backfill.core.block import KVLayout
from backfill.core.errors import ConfigError
from backfill.kernels.cpu import CpuKernels, available_isas
from backfill.kernels.inputs import AttentionMetadata
from backfill.kernels.isa import ISA_VARIABLE
from tests.kernels.batches import make_batch, make_pool, slot_of, unset_kv
from tests.kernels.cpu import EPS, REFERENCE, assert_close, random_rows, seeded

# Heads, key/value heads, head size, block size.
GEOMETRIES = [
    (1, 1, 8, 8),
    (9, 3, 64, 16),
    (6, 2, 40, 8),
    (3, 1, 256, 32),
]
MORE_GEOMETRIES = [(3, 3, 16, 16), (4, 1, 80, 32), (8, 2, 96, 16), (8, 1, 128, 16)]

# (query rows, context) of each sequence.
MIXES: dict[str, list[tuple[int, int]]] = {
    "decode": [(1, 1), (1, 2), (1, 15), (1, 16), (1, 17), (1, 64), (1, 65), (1, 130), (1, 200)],
    "prompts": [(1, 1), (2, 2), (7, 7), (16, 16), (33, 33), (129, 129)],
    "chunks": [(2, 30), (5, 64), (16, 145), (23, 151), (65, 200)],
    "mixed": [(1, 77), (40, 40), (1, 5), (3, 260), (1, 128)],
}


def unset_unused(pool: Tensor, used: Tensor) -> None:
    """Unset every (block, slot) of ``pool`` that ``used`` does not list, in all layers."""
    num_blocks, block_size = pool.shape[0], pool.shape[4]
    unused = torch.ones(num_blocks * block_size, dtype=torch.bool)
    unused[used] = False
    by_slot = pool.permute(0, 4, 1, 2, 3, 5)
    by_slot[unused.view(num_blocks, block_size)] = unset_kv(pool.dtype)


def context_slots(batch: AttentionMetadata, block_size: int) -> Tensor:
    """Every slot that holds a token of the batch's contexts."""
    slot_mapping: list[int] = []
    for seq, context in enumerate(batch.seq_lens.tolist()):
        refs = batch.block_table[batch.block_table_offsets[seq] : batch.block_table_offsets[seq + 1]].tolist()
        for position in range(context):
            slot_mapping.append(slot_of(refs[position // block_size], position, block_size))
    return torch.tensor(slot_mapping)


def assert_codes_close(
    actual: Tensor, expected: Tensor, dtype: torch.dtype, name: str, *, is_exact: bool
) -> None:
    """Where what was rounded may be off by a little, a code may be off by one."""
    if is_exact:
        assert torch.equal(actual, expected), name
    scales, expected_scales = (each[..., -4:].contiguous().view(torch.float32) for each in (actual, expected))
    assert_close(scales.to(dtype), expected_scales.to(dtype), name)
    codes, expected_codes = (each[..., :-4].int() for each in (actual, expected))
    most = 1 if dtype == torch.float32 else 2
    assert (codes - expected_codes).abs().max() <= most, name


def check_attention(
    each_kernels: Sequence[CpuKernels],
    geometry: tuple[int, int, int, int],
    lens: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    generator: torch.Generator,
) -> None:
    num_heads, num_kv_heads, head_dim, block_size = geometry
    num_blocks = sum(-(-context // block_size) for _, context in lens) + 3
    layout = KVLayout(2, num_kv_heads, head_dim, block_size, kv_dtype.itemsize)
    pool = make_pool(layout, num_blocks, kv_dtype, generator)
    batch = make_batch(lens, block_size=block_size, num_blocks=num_blocks, generator=generator)
    rows = int(batch.cu_seqlens_q[-1])
    qkv = random_rows(generator, rows, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    scale = head_dim**-0.5
    expected = REFERENCE.attention(qkv, pool, 1, batch, num_heads, scale)
    # Slots without a token must not matter, not even as a NaN times zero.
    pool[:, 0] = unset_kv(kv_dtype)
    unset_unused(pool, context_slots(batch, block_size))
    for kernels in each_kernels:
        assert_close(kernels.attention(qkv, pool, 1, batch, num_heads, scale), expected, kernels.isa)


@pytest.mark.parametrize(
    ("geometry", "lens"),
    [
        *itertools.product(GEOMETRIES, MIXES.values()),
        # Those of test_attention_of_random_batches too.
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in itertools.product(MORE_GEOMETRIES, MIXES.values())
        ),
        ((9, 3, 64, 16), [(1, 3000)]),  # the context is split
        ((9, 3, 64, 16), [(1, 1500), (1, 2), (1, 700)]),
        ((71, 1, 64, 16), [(5, 40), (1, 33)]),  # rows wider than one tile of queries
        ((4, 1, 64, 16), [(700, 750)]),  # a prompt longer than one item
    ],
    ids=str,
)
def test_attention(
    all_kernels: Sequence[CpuKernels],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    geometry: tuple[int, int, int, int],
    lens: list[tuple[int, int]],
) -> None:
    check_attention(all_kernels, geometry, lens, dtype, kv_dtype, seeded(geometry, lens))


@pytest.mark.parametrize("case", range(12))
def test_attention_of_random_batches(
    all_kernels: Sequence[CpuKernels], dtype: torch.dtype, kv_dtype: torch.dtype, case: int
) -> None:
    generator = seeded("random", case)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    num_kv_heads, group = draw(1, 4), (1, 2, 3, 4, 5, 8)[draw(0, 6)]
    geometry = (num_kv_heads * group, num_kv_heads, 8 * draw(1, 20), (8, 16, 32)[draw(0, 3)])
    lens = []
    for _ in range(draw(1, 7)):
        context = draw(1, 220)
        lens.append((1 if draw(0, 2) else draw(1, context + 1), context))
    check_attention(all_kernels, geometry, lens, dtype, kv_dtype, generator)


def test_attention_with_large_scores_stays_finite(kernels: CpuKernels, dtype: torch.dtype) -> None:
    generator = seeded("large")
    pool = make_pool(KVLayout(1, 1, 64, 16, 4), 20, dtype, generator) * 40
    batch = make_batch([(1, 100), (30, 90)], block_size=16, num_blocks=20, generator=generator)
    qkv = random_rows(generator, 31, 4 * 64, dtype=dtype) * 40
    out = kernels.attention(qkv, pool, 0, batch, 2, 0.125)
    expected = REFERENCE.attention(qkv, pool, 0, batch, 2, 0.125)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=0.5)


@pytest.mark.parametrize("mix", ["decode", "prompts"])
@pytest.mark.parametrize(
    "most_bytes", [0, 1000]
)  # too little to plan the items; enough for that, not for one
def test_attention_without_memory_raises_and_the_next_call_succeeds(
    kernels: CpuKernels,
    dtype: torch.dtype,
    mix: str,
    most_bytes: int,
    scratch_limit: Callable[[int], None],
) -> None:
    scratch_limit(most_bytes)
    with pytest.raises(MemoryError):
        check_attention([kernels], (9, 3, 64, 16), MIXES[mix], dtype, dtype, seeded("no memory", mix))
    scratch_limit(1 << 30)
    check_attention([kernels], (9, 3, 64, 16), MIXES[mix], dtype, dtype, seeded("no memory", mix))


def test_attention_of_an_empty_batch(kernels: CpuKernels, dtype: torch.dtype) -> None:
    pool = torch.zeros(2, 1, 2, 1, 16, 64, dtype=dtype)
    empty = torch.zeros(0, dtype=torch.int64)
    offsets = torch.zeros(1, dtype=torch.int32)
    batch = AttentionMetadata(empty, empty, offsets, empty.int(), empty.int(), offsets, 0, 0)
    qkv = torch.zeros(0, 3 * 64, dtype=dtype)
    kernels.rotate_and_write_kv(qkv, pool, 0, batch, 1, None)
    assert kernels.attention(qkv, pool, 0, batch, 1, 1.0).shape == (0, 64)


@pytest.mark.parametrize("norm", [False, True], ids=["", "qk-norm"])
@pytest.mark.parametrize("rotary", [False, True], ids=["", "rotary"])
@pytest.mark.parametrize(
    "geometry",
    [*GEOMETRIES, *(pytest.param(each, marks=pytest.mark.slow) for each in MORE_GEOMETRIES)],
    ids=str,
)
def test_rotate_and_write_kv(
    all_kernels: Sequence[CpuKernels],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    geometry: tuple[int, int, int, int],
    rotary: bool,
    norm: bool,
) -> None:
    num_heads, num_kv_heads, head_dim, block_size = geometry
    generator = seeded(geometry, rotary, norm)
    layout = KVLayout(3, num_kv_heads, head_dim, block_size, kv_dtype.itemsize)
    pool = make_pool(layout, 30, kv_dtype, generator)
    batch = make_batch([(1, 9), (20, 31), (3, 3)], block_size=block_size, num_blocks=30, generator=generator)
    qkv = random_rows(generator, 24, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    angles = torch.rand(40, head_dim // 2, generator=generator) * 6.28
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1) if rotary else None
    weights = [random_rows(generator, head_dim, dtype=dtype) if norm else None for _ in range(2)]
    first_qkv, before, q_size = qkv, pool, num_heads * head_dim
    expected_qkv, expected_pool = qkv.clone(), pool.clone()
    REFERENCE.rotate_and_write_kv(expected_qkv, expected_pool, 1, batch, num_heads, cos_sin, *weights, EPS)
    written = torch.zeros(30 * block_size, dtype=torch.bool)
    written[batch.slot_mapping] = True
    untouched = ~written.view(30, block_size)
    for kernels in all_kernels:
        qkv, pool = first_qkv.clone(), before.clone()
        kernels.rotate_and_write_kv(qkv, pool, 1, batch, num_heads, cos_sin, *weights, EPS)
        assert_close(qkv[:, :q_size], expected_qkv[:, :q_size], kernels.isa)
        if kv_dtype == torch.int8:
            assert_codes_close(pool, expected_pool, dtype, kernels.isa, is_exact=not (rotary or norm))
        else:
            assert_close(pool, expected_pool, kernels.isa)
        others = (each[:, 1].permute(0, 3, 1, 2, 4)[untouched] for each in (pool, before))
        assert torch.equal(*others), kernels.isa
        assert torch.equal(pool[:, ::2], before[:, ::2]), kernels.isa


@pytest.mark.parametrize("rows", [1, 5, 200])
@pytest.mark.parametrize("size", [8, 40, 576, 1537])
def test_rms_norm_alone_and_of_a_residual_that_it_updates(
    kernels: CpuKernels, dtype: torch.dtype, rows: int, size: int
) -> None:
    generator = seeded("norm", rows, size)
    x, residual = (random_rows(generator, rows, size, dtype=dtype) for _ in range(2))
    weight = random_rows(generator, size, dtype=dtype)
    assert_close(kernels.rms_norm(x, weight, EPS), REFERENCE.rms_norm(x, weight, EPS))
    apart = torch.cat((x, x), dim=1)[:, :size]
    assert_close(kernels.rms_norm(apart, weight, EPS), REFERENCE.rms_norm(x, weight, EPS))
    expected_residual = residual.clone()
    expected = REFERENCE.add_rms_norm(x, expected_residual, weight, EPS)
    assert_close(kernels.add_rms_norm(x, residual, weight, EPS), expected)
    assert torch.equal(residual, expected_residual)


@pytest.mark.parametrize("rows", [1, 5, 100])
@pytest.mark.parametrize("size", [8, 20, 1536, 1537])
def test_silu_and_mul(kernels: CpuKernels, dtype: torch.dtype, rows: int, size: int) -> None:
    gate_up = random_rows(seeded("silu", rows, size), rows, 2 * size, dtype=dtype) * 8
    gate_up[0, :4] = torch.tensor([-1000.0, 1000.0, -90.0, 0.0], dtype=dtype)
    assert_close(kernels.silu_and_mul(gate_up), REFERENCE.silu_and_mul(gate_up))


def test_the_environment_chooses_the_isa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "generic")
    assert CpuKernels().isa == "generic"
    monkeypatch.delenv(ISA_VARIABLE)
    assert CpuKernels().isa == available_isas()[-1]
    monkeypatch.setenv(ISA_VARIABLE, "z80")
    with pytest.raises(ConfigError, match=r"BACKFILL_CPU_ISA: this machine has generic.*, got 'z80'"):
        CpuKernels()
    with pytest.raises(ValueError, match="isa z80"):
        CpuKernels("z80")
