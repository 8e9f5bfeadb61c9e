"""Weights of 4 and 8 bits.

A linear layer of codes rounds its rows to 8 bits and sums integers, or is, to the bit, that of the
dequantized weight, which is rounded to bfloat16 only where products are of bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from backfill.kernels.cpu import CpuKernels
from backfill.kernels.linears import ConcatenatedLinear
from backfill.kernels.quantized import UNIT_INPUTS, QuantizedFormat, QuantizedWeight, quantize
from tests.kernels.cpu import REFERENCE, random_rows, seeded

FORMATS = [
    QuantizedFormat(bits, group, scale_type, has_offsets)
    for bits, group, scale_type, has_offsets in product(
        (4, 8), (16, 32, 96), (torch.float16, torch.float32), (False, True)
    )
] + [
    QuantizedFormat(bits, group, torch.int8, has_offsets)
    for bits, group, has_offsets in product((4, 8), (16, 32), (False, True))
]
# Outputs and inputs: one step of unpacking or several, panels that are not full, several blocks of rows.
SIZES = [(70, 96), (33, 576), (64, 1536)]
SIZES_IN_UNITS = [(70, 256), (33, 768), (64, 1536)]


def random_weight(
    form: QuantizedFormat, shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator
) -> QuantizedWeight:
    """As files have them: a product of code and scale is exact in float32."""
    num_groups = shape[1] // form.group
    low, high = (0, 16) if form.bits == 4 else (-32, 32) if form.has_units else (-128, 128)
    codes = torch.randint(low, high, shape, generator=generator)
    units = None
    if form.has_units:
        scales, offsets = (
            torch.randint(-64, 64, (shape[0], num_groups), generator=generator).to(torch.int8)
            for _ in range(2)
        )
        num_units = shape[0], shape[1] // UNIT_INPUTS, 2 if form.has_offsets else 1
        units = torch.randn(num_units, generator=generator).mul(1e-3).half()
    else:
        scales, offsets = (
            torch.randn((shape[0], num_groups), generator=generator).mul(0.01).half().to(form.scale_type)
            for _ in range(2)
        )
    return QuantizedWeight(
        form,
        dtype,
        codes.to(torch.uint8 if form.bits == 4 else torch.int8),
        scales,
        offsets if form.has_offsets else None,
        units,
    )


def rounded_rows(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """By csrc/row_codes.h: codes of ``x [T, in]``, and the scale of each group."""
    words = x.float().unflatten(1, (-1, group // 4, 4))
    of_words = words.abs().amax(-1)
    most = 8.0 * x.float().square().mean(1)[:, None, None].sqrt()
    magnitude = of_words.amax(-1)
    rest = torch.where(of_words > most, 0.0, of_words).amax(-1)
    has_high = magnitude > most[..., 0]
    scales = torch.where(has_high, torch.maximum(rest, magnitude / 128), magnitude) / 127
    inverse = torch.where(magnitude < 1e-30, 0.0, 1 / scales)
    codes = (words.flatten(2).double() * inverse.double()[..., None]).round()
    return codes, scales.double()


def integer_linear(weight: QuantizedWeight, x: Tensor) -> tuple[Tensor, Tensor]:
    """By docs/kernels.md, in float64, and the sum of the terms' magnitudes: both ``[T, out]``."""
    group = min(weight.format.group, 32)
    row_codes, row_scales = rounded_rows(x, group)
    floats = replace(weight, dtype=torch.float32).dequantized().double().unflatten(1, (-1, group))
    terms = torch.einsum("tgi,ogi->tog", row_codes, floats) * row_scales[:, None]
    bounds = torch.einsum("tgi,ogi->tog", row_codes.abs(), floats.abs()) * row_scales[:, None]
    return terms.sum(-1), bounds.sum(-1)


def assert_rounded_product(
    weight: QuantizedWeight, x: Tensor, bias: Tensor, results: dict[str, Tensor]
) -> None:
    """Of each variant of the kernels, by its name."""
    sums, bounds = integer_linear(weight, x)
    expected = sums + bias.double()
    # Offsets and zeros may be many times what is left of them.
    tolerance = 1e-6 * bounds * min(weight.format.group, 96)
    if x.dtype == torch.bfloat16:
        tolerance += expected.abs() * 2**-8
    for isa, found in results.items():
        assert found.dtype == x.dtype
        assert ((found.double() - expected).abs() <= tolerance).all(), (isa, x.shape)


@pytest.mark.parametrize(
    "form",
    [  # with scales of float32 also in the tests below
        pytest.param(each, marks=pytest.mark.slow) if each.scale_type == torch.float32 else each
        for each in FORMATS
    ],
    ids=str,
)
@pytest.mark.parametrize("size", range(3))
def test_a_linear_layer_of_codes(
    all_kernels: Sequence[CpuKernels], dtype: torch.dtype, form: QuantizedFormat, size: int
) -> None:
    """Sums of integers are equal on all instruction sets."""
    shape = (SIZES_IN_UNITS if form.has_units else SIZES)[size]
    generator = seeded("codes", form, shape)
    weight = random_weight(form, shape, dtype, generator)
    bias = random_rows(generator, shape[0], dtype=dtype)
    rows = [random_rows(generator, num, shape[1], dtype=dtype) for num in (0, 1, 13, 70)]
    for x in rows:
        x[:, 32:64] = 0.0
    index = torch.tensor([shape[0] - 1, 0, 31, 32, 0])
    dequantized = weight.dequantized()
    sums: list[dict[str, Tensor]] = [{} for _ in rows]
    for kernels in all_kernels:
        linear = kernels.linear(weight, bias)
        assert torch.equal(linear.rows(index), dequantized[index]), kernels.isa
        if kernels.sums_integers:
            for x, results in zip(rows, sums, strict=True):
                results[kernels.isa] = linear(x)
            continue
        product_dtype = dtype if kernels.isa == "amx" else torch.float32
        plain = kernels.linear(replace(weight, dtype=product_dtype).dequantized(), bias.to(product_dtype))
        for x in rows:
            assert torch.equal(linear(x), plain(x.to(product_dtype)).to(dtype)), (kernels.isa, x.shape)
    for x, results in zip(rows, sums, strict=True):
        if results:
            assert_rounded_product(weight, x, bias, results)
            first = next(iter(results.values()))
            assert all(torch.equal(each, first) for each in results.values()), x.shape


def test_extremes_of_rows_and_codes(kernels: CpuKernels) -> None:
    """The greatest sums of a group, and rows that are no numbers, or too small to round."""
    for bits, codes in ((4, [0, 15]), (8, [-128, 127])):
        form = QuantizedFormat(bits, 32, torch.float32, has_offsets=False)
        kind = torch.uint8 if bits == 4 else torch.int8
        for code in codes:
            weight = QuantizedWeight(
                form, torch.float32, torch.full((33, 64), code, dtype=kind), torch.ones(33, 2), None
            )
            linear = kernels.linear(weight)
            value = code - (8 if bits == 4 else 0)
            x = torch.tensor([[1.0], [-1.0], [1e-38], [0.0]]).expand(4, 64)
            found = linear(x.contiguous())
            expected = torch.tensor([64.0 * value, -64.0 * value, 0.0, 0.0])
            torch.testing.assert_close(found, expected[:, None].expand(4, 33), rtol=1e-6, atol=1e-34)
            large = kernels.linear(replace(weight, scales=torch.full((33, 2), 1e-3)))
            assert large(torch.full((1, 64), 1e36)).isfinite().all()
            for wrong in (float("nan"), float("-nan"), float("inf")):
                x = torch.ones(2, 64)
                x[0, 40] = wrong
                found = linear(x)
                assert not found[0].isfinite().any()
                assert found[1].isfinite().all()


@pytest.mark.parametrize("bits", [4, 8])
def test_the_greatest_codes_of_rows(kernels: CpuKernels, bits: int) -> None:
    """A group beside which the rest of the row is nothing has all its codes at 127 * 128."""
    form = QuantizedFormat(bits, 32, torch.float32, has_offsets=False)
    kind = torch.uint8 if bits == 4 else torch.int8
    for code in [0, 15] if bits == 4 else [-128, 127]:
        codes = torch.full((33, 3072), code, dtype=kind)
        linear = kernels.linear(QuantizedWeight(form, torch.float32, codes, torch.ones(33, 96), None))
        x = torch.zeros(7, 3072)
        x[:, 64:96] = torch.tensor([1.0, -1.0, 1e-20, 1e6, 0.0, 1.0, 1.0])[:, None]
        x[5, 64:96:2] = -1.0
        expected = 32.0 * (code - (8 if bits == 4 else 0)) * x[:, 64:65]
        expected[5] = 0.0
        torch.testing.assert_close(linear(x), expected.expand(7, 33), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_few_great_inputs_do_not_make_the_others_coarse(kernels: CpuKernels, bits: int) -> None:
    generator = seeded("great inputs")
    weight = quantize(random_rows(generator, 64, 768, dtype=torch.float32), bits)
    x = random_rows(generator, 40, 768, dtype=torch.float32)
    x[:, ::192] = 50.0  # in every row
    x[torch.arange(40), torch.arange(40) * 17] = 100.0  # each row has another
    exact = x.double() @ weight.dequantized().double().T
    error = (kernels.linear(weight)(x).double() - exact).square().mean() / exact.square().mean()
    others = x.masked_fill(x.abs() > 10.0, 0.0)
    assert error <= 5e-5 * others.square().mean() / x.square().mean()


def test_rows_of_a_weight_whose_inputs_are_padded_are_dense(kernels: CpuKernels, dtype: torch.dtype) -> None:
    weight = random_rows(seeded("dense"), 5, 24, dtype=dtype)
    rows = kernels.linear(weight).rows(torch.tensor([4, 1]))
    assert rows.is_contiguous()
    assert torch.equal(rows, weight[[4, 1]])


@pytest.mark.parametrize(
    ("form", "shape", "num_rows"),
    [
        (QuantizedFormat(4, 32, torch.float16, True), (100, 1536), 600),
        # The depth is divided, and parts of it begin within a block.
        (QuantizedFormat(8, 16, torch.float32, False), (40, 4832), 200),
        (QuantizedFormat(4, 4832, torch.float16, True), (40, 4832), 200),
        (QuantizedFormat(4, 32, torch.int8, True), (40, 19 * 256), 200),
    ],
    ids=str,
)
def test_many_rows_and_a_row_of_them_alone(
    kernels: CpuKernels,
    dtype: torch.dtype,
    form: QuantizedFormat,
    shape: tuple[int, int],
    num_rows: int,
    thread_counts: Iterator[int],
) -> None:
    generator = seeded("many rows", form)
    weight = random_weight(form, shape, dtype, generator)
    linear = kernels.linear(weight)
    x = random_rows(generator, num_rows, shape[1], dtype=dtype)
    whole = linear(x)
    for threads in thread_counts:
        for first, last in [
            (0, num_rows),
            (0, 1),
            (5, 22),
            (60, 100),
            (7, num_rows // 2),
            (num_rows - 1, num_rows),
        ]:
            assert torch.equal(linear(x[first:last]), whole[first:last]), (threads, first)
    if kernels.sums_integers:
        assert_rounded_product(weight, x[:5], torch.zeros(shape[0]), {kernels.isa: whole[:5]})


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("depth", [96, 576, 1536])
def test_great_inputs_of_a_row_change_no_other_row(
    kernels: CpuKernels, dtype: torch.dtype, group: int, depth: int
) -> None:
    """Rows are rounded together, and any with great inputs has words of high codes for all of them."""
    generator = seeded("great", group, depth)
    weight = random_weight(QuantizedFormat(4, group, torch.float16, True), (40, depth), dtype, generator)
    linear = kernels.linear(weight)
    x = random_rows(generator, 13, depth, dtype=dtype)
    for row, at in [(1, 0), (1, depth - 1), (4, depth - 2), (4, 40), (9, depth - 17)]:
        x[row, at] = 30.0
    x[2, 5], x[10, depth - 1] = torch.nan, torch.inf
    finite = x.isfinite().all(1)
    for first, last in [(0, 13), (0, 6), (4, 9), (9, 11), (1, 5)]:
        together, kept = linear(x[first:last]), finite[first:last]
        alone = torch.cat([linear(x[row : row + 1]) for row in range(first, last)])
        assert torch.equal(together[kept], alone[kept]), (first, last)
        assert not together[~kept].isfinite().any()
    if kernels.sums_integers:
        rows = x[finite]
        assert_rounded_product(weight, rows, torch.zeros(40), {kernels.isa: linear(rows)})


def test_it_can_be_placed_elsewhere(kernels: CpuKernels, dtype: torch.dtype) -> None:
    generator = seeded("placed")
    linear = kernels.linear(quantize(random_rows(generator, 70, 96, dtype=dtype), 4))
    placed = linear.placed([part.clone() for part in linear.memory])
    x = random_rows(generator, 3, 96, dtype=dtype)
    assert placed.layout == linear.layout
    assert torch.equal(placed(x), linear(x))
    assert linear.layout != kernels.linear(quantize(random_rows(generator, 70, 96, dtype=dtype), 8)).layout


def test_codes_in_pairs_are_another_layout() -> None:
    """amx reads bf16 rows so."""

    class Pairing(CpuKernels):
        def __init__(self, pairs_codes: bool) -> None:
            super().__init__("generic")
            self._cpp = SimpleNamespace(pairs_codes=pairs_codes)

    weight = quantize(random_rows(seeded("pairs"), 64, 64, dtype=torch.bfloat16), 4)
    paired, plain = (Pairing(pairs_codes).linear(weight) for pairs_codes in (True, False))
    assert not torch.equal(paired.memory[0], plain.memory[0])
    assert paired.layout != plain.layout
    floats = replace(weight, dtype=torch.float32)  # whose rows meet codes one by one
    assert Pairing(True).linear(floats).layout == Pairing(False).linear(floats).layout


@pytest.mark.parametrize("form", FORMATS[::3], ids=str)
def test_parts_of_a_weight(form: QuantizedFormat) -> None:
    weight = random_weight(form, (6, 768), torch.float32, seeded("parts", form))
    whole = weight.dequantized()
    for start, stop in ((0, 768), (256, 512), (96, 288)):
        if start % form.group or stop % form.group:
            continue
        part = weight.columns(start, stop)
        part.check()
        assert torch.equal(part.dequantized(), whole[:, start:stop])
    padded = QuantizedWeight.concatenated([weight, weight.padded(2)]).dequantized()
    assert torch.equal(padded, torch.cat((whole, whole, torch.zeros(2, 768))))


def test_linears_of_two_formats_side_by_side(kernels: CpuKernels, dtype: torch.dtype) -> None:
    generator = seeded("side by side")
    weights = [random_rows(generator, 40, 64, dtype=dtype) for _ in range(3)]
    codes = [quantize(each, bits) for each, bits in zip(weights[1:], (4, 8), strict=True)]
    parts = [kernels.linear(each) for each in (weights[0], *codes)]
    together = ConcatenatedLinear(parts)
    x = random_rows(generator, 5, 64, dtype=dtype)
    values = torch.cat([weights[0], *(each.dequantized() for each in codes)])
    expected = x.double() @ values.double().T
    assert (together(x).double() - expected).norm() < 0.02 * expected.norm()
    placed = together.placed([part.clone() for part in together.memory])
    assert torch.equal(placed(x), together(x))
    assert placed.layout == together.layout != ConcatenatedLinear(parts[:2]).layout


def test_what_cannot_be_read_is_refused(kernels: CpuKernels) -> None:
    weight = quantize(torch.randn(4, 96), 4)
    for wrong in (
        replace(weight, format=replace(weight.format, bits=5)),
        replace(weight, format=replace(weight.format, group=48)),
        replace(weight, format=replace(weight.format, has_offsets=False)),
        replace(weight, scales=weight.scales.float()),
        replace(weight, offsets=None),
        replace(weight, codes=weight.codes[:, :64]),
        replace(weight, dtype=torch.float16),
        weight.columns(0, 0),
    ):
        with pytest.raises(ValueError, match=r"^weight: expected"):
            kernels.linear(wrong)


@pytest.mark.parametrize("bits", [4, 8])
def test_what_half_precision_does_not_hold_is_not_rounded(bits: int) -> None:
    weight = torch.randn(4, 64)
    weight[2, 5] = -1e8
    with pytest.raises(ValueError, match="half precision"):
        quantize(weight, bits)
    with pytest.raises(ValueError, match="half precision"):
        quantize(torch.full((4, 64), 1e8), bits)  # no step is too wide, but the offset


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_keeps_within_half_a_step(bits: int) -> None:
    weight = torch.randn(50, 128, generator=seeded("rounding"))
    weight[3] = 0.0
    weight[4] = 1.0
    rounded = quantize(weight, bits)
    found = rounded.dequantized()
    steps = rounded.scales.float().repeat_interleave(32, dim=1)
    if bits == 8:
        assert ((found - weight).abs() <= steps * 0.51).all()
    # Four bits may cut the ends of a range off, where that makes the sum of squares less.
    error = (found - weight).square().mean() / weight.square().mean()
    assert error < (5e-5 if bits == 8 else 7e-3)
    torch.testing.assert_close(found[3:5], weight[3:5], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("std", [2e-5, 5e-6, 2e-6])
def test_scales_that_are_subnormal_clamp_no_code(std: float) -> None:
    weight = torch.randn(64, 512, generator=seeded("subnormal")) * std
    found = quantize(weight, 8).dequantized()
    assert ((found - weight).abs() <= 0.51 * (std * 6 / 127 + 2**-24)).all()
    assert (found - weight).norm() < 0.02 * weight.norm()


def test_other_kernels_multiply_the_dequantized_weight() -> None:
    weight = quantize(torch.randn(8, 32, generator=seeded("plain")), 4)
    x = torch.randn(3, 32)
    assert torch.equal(REFERENCE.linear(weight)(x), x @ weight.dequantized().T)
