"""Linear layers of the CPU kernels."""

from __future__ import annotations

import ctypes
import itertools
import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from backfill.kernels.cpu import CpuKernels, CpuLinear
from backfill.kernels.quantized import quantize
from tests.kernels.cpu import REFERENCE, assert_close, random_rows, seeded

NUM_ROWS = (0, 1, 3, 16, 17, 70, 130)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("out_size", "in_size"), [(96, 40), (96, 64), (33, 32), (40, 96), (7, 160), (2048, 320)]
)
def test_linear(
    all_kernels: Sequence[CpuKernels], dtype: torch.dtype, out_size: int, in_size: int, bias: bool
) -> None:
    generator = seeded("linear", out_size, in_size)
    weight = random_rows(generator, out_size, in_size, dtype=dtype) / in_size**0.5
    offset = random_rows(generator, out_size, dtype=dtype) if bias else None
    rows = [random_rows(generator, num, in_size + 32, dtype=dtype)[:, :in_size] for num in NUM_ROWS]
    expected = [REFERENCE.linear(weight, offset)(x) for x in rows]
    linears = {kernels.isa: kernels.linear(weight, offset) for kernels in all_kernels}
    weight.zero_()
    for isa, linear in linears.items():
        assert (linear.in_features, linear.out_features) == (in_size, out_size)
        for x, each in zip(rows, expected, strict=True):
            assert_close(linear(x), each, isa)


# Around the row counts of a block, and over several blocks of packed rows; and many inputs.
LARGE = [
    *itertools.product([(96, 576), (1000, 64)], [[64, 65, 81, 97, 257, 515, 1023, 2048]]),
    *itertools.product([(96, 1568), (70, 4096), (40, 9632), (33, 14336)], [[3, 70, 215]]),
]


@pytest.mark.parametrize(("sizes", "num_rows"), LARGE)
def test_large_linears(
    all_kernels: Sequence[CpuKernels], dtype: torch.dtype, sizes: tuple[int, int], num_rows: list[int]
) -> None:
    out_size, in_size = sizes
    generator = seeded(out_size, in_size)
    weight = random_rows(generator, out_size, in_size, dtype=dtype) / in_size**0.5
    bias = random_rows(generator, out_size, dtype=dtype)
    linears = {kernels.isa: kernels.linear(weight, bias) for kernels in all_kernels}
    for num in num_rows:
        x = random_rows(generator, num, in_size, dtype=dtype)
        expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double()).to(dtype)
        for isa, linear in linears.items():
            assert_close(linear(x), expected, f"{isa}, {num} rows:")


# Of one group of rows, several, and more than stay in a cache; with deep layers in chunks of their depth.
@pytest.mark.parametrize("bits", [0, 4, 8])
@pytest.mark.parametrize(("width", "in_size"), [(32, 64), (96, 576), (480, 3104), (32, 9632), (40, 64)])
def test_gated_linear(
    all_kernels: Sequence[CpuKernels], dtype: torch.dtype, width: int, in_size: int, bits: int
) -> None:
    generator = seeded("gated", width, in_size, bits)
    floats = random_rows(generator, 2 * width, in_size, dtype=dtype) / in_size**0.5
    weight = quantize(floats, bits) if bits else floats
    bias = random_rows(generator, 2 * width, dtype=dtype)
    rows = [random_rows(generator, num, in_size + 32, dtype=dtype)[:, :in_size] for num in (0, 1, 2, 33, 130)]
    for kernels in all_kernels:
        plain, gated = kernels.linear(weight, bias), kernels.gated(kernels.linear(weight, bias))
        assert isinstance(gated, CpuLinear) == (width % 32 == 0)
        assert (gated.in_features, gated.out_features) == (in_size, width)
        assert gated.layout != plain.layout or width % 32
        for x in rows:
            assert torch.equal(gated(x), kernels.silu_and_mul(plain(x))), kernels.isa
        placed = gated.placed([each.clone() for each in gated.memory])
        assert torch.equal(placed(rows[3]), gated(rows[3])), kernels.isa


def test_linear_without_memory_raises_and_the_next_call_succeeds(
    kernels: CpuKernels, dtype: torch.dtype, scratch_limit: Callable[[int], None]
) -> None:
    generator = seeded("no memory")
    weight, x = (random_rows(generator, size, 64, dtype=dtype) for size in (96, 300))
    linear = kernels.linear(weight)
    scratch_limit(0)
    with pytest.raises(MemoryError):
        linear(x)
    scratch_limit(1 << 30)
    assert_close(linear(x), REFERENCE.linear(weight)(x))


def test_linear_called_from_two_threads_at_once(kernels: CpuKernels, dtype: torch.dtype) -> None:
    generator = seeded("threads")
    linear = kernels.linear(random_rows(generator, 320, 1600, dtype=dtype) / 40)
    inputs = [random_rows(generator, rows, 1600, dtype=dtype) for rows in (7, 65, 130, 300)]
    expected = [linear(x) for x in inputs]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            for result, known in zip(pool.map(linear, inputs), expected, strict=True):
                assert torch.equal(result, known)


def test_linear_reads_nothing_behind_the_last_row(kernels: CpuKernels, dtype: torch.dtype) -> None:
    """Rows at the end of memory, before a page whose reading would end this process."""
    size = 64 * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    end = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + size
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(end), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    whole = torch.frombuffer(memory, dtype=dtype, count=size // dtype.itemsize)
    whole.copy_(torch.randn(len(whole)))
    linear = kernels.linear(torch.eye(64, dtype=dtype))
    for rows in (1, 2, 15, 16, 17, 31, 32, 33, 95):
        for stride in (64, 67, 160):
            first = len(whole) - 64 - (rows - 1) * stride
            x = whole.as_strided((rows, 64), (stride, 1), first)
            assert_close(linear(x), x)


def test_linear_refuses_what_it_cannot_read(kernels: CpuKernels) -> None:
    weight = torch.zeros(4, 32, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"^weight:"):
        kernels.linear(weight.to("meta"))
    with pytest.raises(ValueError, match=r"^bias:"):
        kernels.linear(weight, torch.zeros(4, dtype=torch.bfloat16, device="meta"))
    with pytest.raises(ValueError, match=r"^weight:"):
        kernels.linear(weight[:, :0])
    with pytest.raises(ValueError, match=r"^weight:"):
        kernels.linear(weight.half())
    with pytest.raises(ValueError, match=r"^x:"):
        kernels.linear(weight)(torch.zeros(2, 40, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"^x:"):
        kernels.linear(weight)(torch.zeros(2, 32))


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_linear_layer_can_be_placed_elsewhere(
    kernels: CpuKernels, dtype: torch.dtype, has_bias: bool
) -> None:
    generator = seeded(0)
    weight = random_rows(generator, 70, 72, dtype=dtype)
    bias = random_rows(generator, 70, dtype=dtype) if has_bias else None
    packed = kernels.linear(weight, bias)
    buffers = [torch.zeros_like(part) for part in packed.memory]
    placed = packed.placed(buffers)
    x = random_rows(generator, 5, 72, dtype=dtype)
    assert not placed(x).any()
    for buffer, part in zip(buffers, packed.memory, strict=True):
        buffer.copy_(part)
    assert (placed.out_features, placed.in_features, placed.layout) == (70, 72, packed.layout)
    assert torch.equal(placed(x), packed(x))
