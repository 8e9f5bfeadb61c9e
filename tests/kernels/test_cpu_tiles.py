"""Linear layers of the CPU kernels on AMX tiles."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from backfill.kernels.cpu import CpuKernels, TiledLinear, available_isas
from tests.kernels.cpu import REFERENCE, assert_close, random_rows, seeded

TILED_ISAS = [
    isa
    for isa in available_isas()
    if isinstance(CpuKernels(isa).linear(torch.zeros(32, 32, dtype=torch.bfloat16)), TiledLinear)
]
# A processor without tiles has no case here.
__test__ = bool(TILED_ISAS)
pytestmark = pytest.mark.parametrize("isa", TILED_ISAS)


def check_tiled_linear(isa: str, out_size: int, in_size: int, rows: int, generator: torch.Generator) -> None:
    weight = random_rows(generator, out_size, in_size, dtype=torch.bfloat16) / in_size**0.5
    x = random_rows(generator, rows, in_size, dtype=torch.bfloat16)
    bias = random_rows(generator, out_size, dtype=torch.bfloat16)
    expected = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    assert_close(CpuKernels(isa).linear(weight, bias)(x), expected.bfloat16())


# Around the row count from which rows are packed, and over several blocks of packed rows.
@pytest.mark.parametrize("rows", [64, 65, 81, 97, 257, 515, 1023, 2048])
@pytest.mark.parametrize(("out_size", "in_size"), [(96, 576), (1000, 64)])
def test_linear_of_many_rows(isa: str, out_size: int, in_size: int, rows: int) -> None:
    check_tiled_linear(isa, out_size, in_size, rows, seeded("many rows", out_size, in_size, rows))


@pytest.mark.parametrize("rows", [3, 70, 215])
@pytest.mark.parametrize(
    ("out_size", "in_size"), [(96, 1568), (70, 4096), (40, 9632), (4096, 9632), (33, 14336)]
)
def test_linear_of_many_inputs(isa: str, out_size: int, in_size: int, rows: int) -> None:
    check_tiled_linear(isa, out_size, in_size, rows, seeded("deep", out_size, in_size, rows))


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


def test_linear_called_from_two_threads_at_once(isa: str) -> None:
    generator = seeded("threads")
    linear = CpuKernels(isa).linear(random_rows(generator, 320, 1600, dtype=torch.bfloat16) / 40)
    inputs = [random_rows(generator, rows, 1600, dtype=torch.bfloat16) for rows in (7, 65, 130, 300)]
    expected = [linear(x) for x in inputs]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            for result, known in zip(pool.map(linear, inputs), expected, strict=True):
                assert torch.equal(result, known)


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
