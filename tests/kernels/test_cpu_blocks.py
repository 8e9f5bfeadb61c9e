"""Decoder layers, and their halves, in one call of the CPU kernels: to the bit what their operators give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from backfill.core.block import KVLayout
from backfill.kernels.base import Kernels
from backfill.kernels.cpu import CpuKernels
from backfill.kernels.cpu_linear import CpuLinear
from backfill.kernels.inputs import AttentionMetadata, DecoderInputs
from backfill.kernels.linears import ConcatenatedLinear, Linear
from backfill.kernels.quantized import quantize
from backfill.kernels.stop_signal import StopSignal
from tests.kernels.batches import make_batch, make_pool
from tests.kernels.cpu import EPS, random_rows, seeded

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 6, 2, 32, 16, 24
HIDDEN, INNER = 192, 320
LENS = [(1, 70), (33, 33), (5, 64), (1, 1)]
NUM_ROWS = sum(rows for rows, _ in LENS)
SCALE = HEAD_DIM**-0.5


@dataclass
class Layer:
    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    post_attention_norm: Tensor
    gate_up: Linear
    down: Linear


def make_layer(kernels: CpuKernels, dtype: torch.dtype, bits: int, *, has_norms: bool) -> Layer:
    generator = seeded("layer", bits, has_norms)

    def linear(out_size: int, in_size: int) -> Linear:
        weight = random_rows(generator, out_size, in_size, dtype=dtype) / in_size**0.5
        return kernels.linear(quantize(weight, bits) if bits else weight)

    def norm(size: int) -> Tensor:
        return 1 + random_rows(generator, size, dtype=dtype) / 8

    queries = NUM_HEADS * HEAD_DIM
    return Layer(
        input_norm=norm(HIDDEN),
        qkv=linear(queries + 2 * NUM_KV_HEADS * HEAD_DIM, HIDDEN),
        q_norm=norm(HEAD_DIM) if has_norms else None,
        k_norm=norm(HEAD_DIM) if has_norms else None,
        output=linear(HIDDEN, queries),
        post_attention_norm=norm(HIDDEN),
        gate_up=kernels.gated(linear(2 * INNER, HIDDEN)),
        down=linear(HIDDEN, INNER),
    )


def make_kv(kv_dtype: torch.dtype) -> tuple[Tensor, AttentionMetadata]:
    generator = seeded("kv")
    layout = KVLayout(2, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, kv_dtype.itemsize)
    pool = make_pool(layout, NUM_BLOCKS, kv_dtype, generator)
    return pool, make_batch(LENS, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, generator=generator)


def make_rows(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows, not one after another in memory, and a residual."""
    generator = seeded("rows")
    x = random_rows(generator, NUM_ROWS, HIDDEN + 8, dtype=dtype)[:, :HIDDEN]
    return x, random_rows(generator, NUM_ROWS, HIDDEN, dtype=dtype)


def make_plain() -> tuple[CpuKernels, Layer, Tensor, Tensor, DecoderInputs]:
    """A layer of floats without norms of heads, and what it runs on."""
    kernels, dtype = CpuKernels(), torch.float32
    layer = make_layer(kernels, dtype, 0, has_norms=False)
    return kernels, layer, *make_rows(dtype), DecoderInputs(*make_kv(dtype), NUM_HEADS, None, SCALE, EPS)


@pytest.mark.parametrize(
    ("bits", "has_residual", "has_norms"),
    [(0, True, False), (0, False, True), (4, True, False), (8, False, True)],
)
def test_attention_block(
    kernels: CpuKernels,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    bits: int,
    has_residual: bool,
    has_norms: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = make_layer(kernels, dtype, bits, has_norms=has_norms)
    x, first_residual = make_rows(dtype)
    first_pool, batch = make_kv(kv_dtype)
    cos_sin = random_rows(seeded("angles"), 128, HEAD_DIM, dtype=torch.float32)

    def run(block: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        pool, residual = first_pool.clone(), first_residual.clone() if has_residual else None
        out = block(layer, x, residual, 1, DecoderInputs(pool, batch, NUM_HEADS, cos_sin, SCALE, EPS))
        return (out, pool) if residual is None else (out, pool, residual)

    expected = run(lambda *args: Kernels.attention_block(kernels, *args))
    monkeypatch.delattr(CpuLinear, "__call__")  # it is one call, and not the operators again
    for actual, each in zip(run(kernels.attention_block), expected, strict=True):
        assert torch.equal(actual.view(-1).view(torch.uint8), each.view(-1).view(torch.uint8))


@pytest.mark.parametrize(("bits", "has_delta"), [(0, True), (0, False), (4, True), (8, False)])
def test_decoder_layers(
    kernels: CpuKernels,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    bits: int,
    has_delta: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also after a layer's weights have moved."""
    layers = [make_layer(kernels, dtype, bits, has_norms=has_norms) for has_norms in (True, False)]
    x, first_residual = make_rows(dtype)
    first_pool, batch = make_kv(kv_dtype)
    cos_sin = random_rows(seeded("angles"), 128, HEAD_DIM, dtype=torch.float32)
    pool = first_pool.clone()

    def run(decoder_layers: Callable[..., tuple[Tensor, int]]) -> tuple[Tensor, ...]:
        pool.copy_(first_pool)
        residual, delta = first_residual.clone(), x if has_delta else None
        out, done = decoder_layers(
            layers, residual, delta, 0, DecoderInputs(pool, batch, NUM_HEADS, cos_sin, SCALE, EPS)
        )
        assert done == len(layers)
        return out, pool.clone(), residual

    for _ in range(2):
        expected = run(lambda *args: Kernels.decoder_layers(kernels, *args))
        with monkeypatch.context() as context:
            context.delattr(CpuLinear, "__call__")
            context.delattr(CpuKernels, "attention_block")
            context.delattr(CpuKernels, "mlp_block")
            for actual, each in zip(run(kernels.decoder_layers), expected, strict=True):
                assert torch.equal(actual.view(-1).view(torch.uint8), each.view(-1).view(torch.uint8))
        layers[1].down = layers[1].down.placed([memory.clone() for memory in layers[1].down.memory])
        layers[1].input_norm = layers[1].input_norm * 2


@pytest.mark.parametrize("way", [Kernels.decoder_layers, CpuKernels.decoder_layers])
@pytest.mark.parametrize("layers_apart", [1, 2, 3, 4, 5])
def test_layers_stop_where_a_word_says_so(way: Callable[..., tuple[Tensor, int]], layers_apart: int) -> None:
    """A word that is written while they run: here by one of them, as part of its KV."""
    kernels, layer, first_delta, first_residual, first_inputs = make_plain()
    first_pool = torch.cat([first_inputs.kv_pool] * 2, dim=1)
    layers = [layer, replace(layer, input_norm=layer.input_norm * 2)] * 2
    block, slot = divmod(int(first_inputs.batch.slot_mapping[0]), BLOCK_SIZE)

    def begin() -> tuple[Tensor, DecoderInputs]:
        return first_residual.clone(), first_inputs._replace(kv_pool=first_pool.clone())

    expected_residual, whole = begin()
    expected, done = way(kernels, layers, expected_residual, first_delta, 0, whole)
    assert done == len(layers)
    for writer in range(len(layers)):
        residual, inputs = begin()
        words = inputs.kv_pool[block, writer, 0, 0, slot].numpy().view(np.int64)[:1]
        value = int(whole.kv_pool[block, writer, 0, 0, slot].numpy().view(np.int64)[0])
        delta, done, calls = first_delta, 0, []
        while done < len(layers):
            stop = StopSignal(words, value, layers_apart)
            delta, ran = way(kernels, layers[done:], residual, delta, done, inputs, stop)
            calls.append(ran)
            done += ran
        seen = min(len(layers), -(-(writer + 1) // layers_apart) * layers_apart)
        later = range(seen, len(layers), layers_apart)
        assert calls == [seen, *(min(layers_apart, len(layers) - each) for each in later)]
        assert torch.equal(delta, expected)
        assert torch.equal(residual, expected_residual)
        assert torch.equal(inputs.kv_pool, whole.kv_pool)


@pytest.mark.parametrize("bits", [0, 4, 8])
def test_mlp_block(
    kernels: CpuKernels, dtype: torch.dtype, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make_layer(kernels, dtype, bits, has_norms=False)
    x, residual = make_rows(dtype)
    expected_residual = residual.clone()
    expected = Kernels.mlp_block(kernels, layer, x, expected_residual, EPS)
    monkeypatch.delattr(CpuLinear, "__call__")
    assert torch.equal(kernels.mlp_block(layer, x, residual, EPS), expected)
    assert torch.equal(residual, expected_residual)


def test_parts_of_several_formats_are_computed_by_operators() -> None:
    kernels, layer, x, residual, _ = make_plain()
    generator = seeded("parts")
    parts = [random_rows(generator, size, HIDDEN, dtype=torch.float32) / 14 for size in (INNER, INNER)]
    both = ConcatenatedLinear([kernels.linear(parts[0].clone()), kernels.linear(quantize(parts[1], 8))])
    assert not isinstance(gated := kernels.gated(both), CpuLinear)
    normed = kernels.add_rms_norm(x, residual.clone(), layer.post_attention_norm, EPS)
    expected = layer.down(kernels.silu_and_mul(both(normed)))
    assert torch.equal(kernels.mlp_block(replace(layer, gate_up=gated), x, residual, EPS), expected)


def test_without_scratch_memory_a_block_raises_and_changes_nothing(
    kernels: CpuKernels, dtype: torch.dtype, scratch_limit: Callable[[int], None]
) -> None:
    layer = make_layer(kernels, dtype, 0, has_norms=False)
    x, residual = make_rows(dtype)
    pool, batch = make_kv(dtype)
    before = residual.clone(), pool.clone()
    scratch_limit(0)
    with pytest.raises(MemoryError):
        kernels.attention_block(
            layer, x, residual, 0, DecoderInputs(pool, batch, NUM_HEADS, None, SCALE, EPS)
        )
    with pytest.raises(MemoryError):
        kernels.mlp_block(layer, x, residual, EPS)
    assert torch.equal(residual, before[0])
    assert torch.equal(pool.view(torch.uint8), before[1].view(torch.uint8))


@pytest.mark.parametrize(
    ("named", "change"),
    [
        ("x", lambda layer: replace(layer, qkv=layer.down)),
        ("x", lambda layer: replace(layer, output=layer.down)),
        ("weight", lambda layer: replace(layer, input_norm=layer.input_norm[:-1])),
        ("k_norm", lambda layer: replace(layer, q_norm=layer.input_norm[:HEAD_DIM])),
    ],
)
def test_attention_block_refuses(named: str, change: Callable[[Layer], Layer]) -> None:
    kernels, layer, x, residual, inputs = make_plain()
    with pytest.raises(ValueError, match=f"^{named}:"):
        kernels.attention_block(change(layer), x, residual, 0, inputs)


def test_attention_block_refuses_other_rows_kv_and_scales() -> None:
    kernels, layer, x, residual, inputs = make_plain()
    for named, rows, other_residual, other_inputs in (
        ("x", x[1:], residual[1:], inputs),
        ("residual", x, residual[1:], inputs),
        ("residual", x, residual.to("meta"), inputs),
        ("kv_pool", x, residual, inputs._replace(kv_pool=inputs.kv_pool.bfloat16())),
        ("scale", x, residual, inputs._replace(scale=0.0)),
    ):
        with pytest.raises(ValueError, match=f"^{named}:"):
            kernels.attention_block(layer, rows, other_residual, 0, other_inputs)


def test_mlp_block_refuses() -> None:
    kernels, layer, x, residual, _ = make_plain()
    for changed in (replace(layer, gate_up=layer.down), replace(layer, down=layer.qkv)):
        with pytest.raises(ValueError, match=r"^x:"):
            kernels.mlp_block(changed, x, residual, EPS)
    with pytest.raises(ValueError, match=r"^residual:"):
        kernels.mlp_block(layer, x, residual[1:], EPS)


@pytest.mark.parametrize("part", ["output", "down"])
def test_decoder_layers_refuse_a_layer_whose_rows_have_another_width(part: str) -> None:
    """Of any layer: its rows would be written beyond the result."""
    kernels, layer, x, residual, inputs = make_plain()
    in_features = getattr(layer, part).in_features
    wide = kernels.linear(random_rows(seeded("wide"), HIDDEN + 32, in_features, dtype=torch.float32))
    changed = replace(layer, output=wide) if part == "output" else replace(layer, down=wide)
    layers = [layer, changed]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^x:"):
            kernels.decoder_layers(layers, residual, x, 0, inputs)
