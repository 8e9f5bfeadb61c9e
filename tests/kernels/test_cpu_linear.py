"""Linear layers of the CPU kernels: oneDNN's packed weights, torch's own. AMX tiles: test_cpu_tiles.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from backfill.kernels.cpu import CpuKernels, TiledLinear, _panels
from tests.kernels.cpu import REFERENCE, assert_close, random_rows, seeded


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
