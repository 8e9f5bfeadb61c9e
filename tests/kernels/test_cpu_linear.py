"""Linear layers of the CPU kernels: AMX tiles, oneDNN's packed weights, torch's own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from backfill.kernels.cpu import CpuKernels, TiledLinear, _panels, available_isas
from tests.kernels.cpu import REFERENCE, assert_close, random_rows, seeded

TILED_ISAS = [
    isa
    for isa in available_isas()
    if isinstance(CpuKernels(isa).linear(torch.zeros(32, 32, dtype=torch.bfloat16)), TiledLinear)
]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3, 16, 17, 70, 130])
@pytest.mark.parametrize(
    ("out_size", "in_size"), [(96, 40), (96, 64), (33, 32), (40, 96), (7, 160), (2048, 320)]
)
def test_linear(
    kernels: CpuKernels, dtype: torch.dtype, out_size: int, in_size: int, rows: int, bias: bool
) -> None:
    generator = seeded("linear", out_size, in_size, rows)
    weight = random_rows(generator, out_size, in_size, dtype=dtype) / in_size**0.5
    x = random_rows(generator, rows, in_size + 32, dtype=dtype)[:, :in_size]
    offset = random_rows(generator, out_size, dtype=dtype) if bias else None
    expected = REFERENCE.linear(weight, offset)(x)
    linear = kernels.linear(weight, offset)
    weight.zero_()
    assert (linear.in_features, linear.out_features) == (in_size, out_size)
    assert_close(linear(x), expected)


def check_tiled_linear(isa: str, out_size: int, in_size: int, rows: int, generator: torch.Generator) -> None:
    weight = random_rows(generator, out_size, in_size, dtype=torch.bfloat16) / in_size**0.5
    x = random_rows(generator, rows, in_size, dtype=torch.bfloat16)
    bias = random_rows(generator, out_size, dtype=torch.bfloat16)
    expected = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    assert_close(CpuKernels(isa).linear(weight, bias)(x), expected.bfloat16())


# Around the row count from which rows are packed, and over several blocks of packed rows.
@pytest.mark.parametrize("isa", TILED_ISAS)
@pytest.mark.parametrize("rows", [64, 65, 81, 97, 257, 515, 1023, 2048])
@pytest.mark.parametrize(("out_size", "in_size"), [(96, 576), (1000, 64)])
def test_linear_of_many_rows(isa: str, out_size: int, in_size: int, rows: int) -> None:
    check_tiled_linear(isa, out_size, in_size, rows, seeded("many rows", out_size, in_size, rows))


@pytest.mark.parametrize("isa", TILED_ISAS)
@pytest.mark.parametrize("rows", [3, 70, 215])
@pytest.mark.parametrize(
    ("out_size", "in_size"), [(96, 1568), (70, 4096), (40, 9632), (4096, 9632), (33, 14336)]
)
def test_linear_of_many_inputs(isa: str, out_size: int, in_size: int, rows: int) -> None:
    check_tiled_linear(isa, out_size, in_size, rows, seeded("deep", out_size, in_size, rows))


@pytest.mark.parametrize("isa", TILED_ISAS)
def test_linear_without_memory_raises_and_the_next_call_succeeds(
    isa: str, scratch_limit: Callable[[int], None]
) -> None:
    generator = seeded("no memory")
    weight, x = (random_rows(generator, size, 64, dtype=torch.bfloat16) for size in (96, 300))
    linear = CpuKernels(isa).linear(weight)
    scratch_limit(0)
    with pytest.raises(MemoryError):
        linear(x)
    scratch_limit(1 << 30)
    assert_close(linear(x), REFERENCE.linear(weight)(x))


@pytest.mark.parametrize("isa", TILED_ISAS)
def test_linear_called_from_two_threads_at_once(isa: str) -> None:
    generator = seeded("threads")
    linear = CpuKernels(isa).linear(random_rows(generator, 320, 1600, dtype=torch.bfloat16) / 40)
    inputs = [random_rows(generator, rows, 1600, dtype=torch.bfloat16) for rows in (7, 65, 130, 300)]
    expected = [linear(x) for x in inputs]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            for result, known in zip(pool.map(linear, inputs), expected, strict=True):
                assert torch.equal(result, known)


@pytest.mark.parametrize("isa", TILED_ISAS)
@pytest.mark.parametrize("in_size", [320, 3200])
def test_a_row_of_a_tiled_product_does_not_depend_on_the_others(isa: str, in_size: int) -> None:
    generator = seeded("invariance", in_size)
    linear = CpuKernels(isa).linear(random_rows(generator, 96, in_size, dtype=torch.bfloat16))
    x = random_rows(generator, 600, in_size, dtype=torch.bfloat16)
    whole = linear(x)
    for first, last in [(0, 1), (5, 22), (31, 33), (60, 100), (63, 128), (7, 300), (599, 600)]:
        assert torch.equal(linear(x[first:last]), whole[first:last])
    with pytest.raises(ValueError, match=r"^x:"):
        linear(x[:, 32:])


def test_linear_refuses_what_it_cannot_read(kernels: CpuKernels) -> None:
    weight = torch.zeros(4, 32, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"^weight:"):
        kernels.linear(weight.to("meta"))
    with pytest.raises(ValueError, match=r"^bias:"):
        kernels.linear(weight, torch.zeros(4, dtype=torch.bfloat16, device="meta"))
    with pytest.raises(ValueError, match=r"^weight:"):
        kernels.linear(weight[:, :0])


@pytest.mark.parametrize("has_bias", [True, False])
def test_panels_can_be_placed_elsewhere(has_bias: bool) -> None:
    """On every machine: nothing is multiplied here."""
    kernels = SimpleNamespace(linear=None)
    generator = seeded(0)
    weight = random_rows(generator, 70, 64, dtype=torch.bfloat16)
    bias = random_rows(generator, 70, dtype=torch.bfloat16) if has_bias else None
    packed = TiledLinear(kernels, _panels(weight), 70, bias)  # type: ignore[arg-type]
    buffers = [torch.zeros_like(part) for part in packed.memory]
    placed = packed.placed(buffers)
    for buffer, part in zip(buffers, packed.memory, strict=True):
        buffer.copy_(part)
    assert (placed.out_features, placed.in_features, placed.layout) == (70, 64, packed.layout)
    assert torch.equal(placed._weight, packed._weight)
    assert placed._weight_address == buffers[0].data_ptr()
    assert placed._bias_address == (buffers[1].data_ptr() if has_bias else 0)
