"""The operators on the CPU: launchers of the C++ kernels in ``csrc/``.

The C++ code gets addresses and cannot check them, so ``Kernels`` and ``CpuLinear`` do.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from operator import is_
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# After torch: the number of threads is that of the OpenMP runtime that torch brings.
from backfill import _kernels  # type: ignore[attr-defined]
from backfill.core.errors import ConfigError
from backfill.core.plan import TokenLogprobs
from backfill.kernels.base import Kernels, describe
from backfill.kernels.cpu_linear import TYPE_CODES, CpuLinear, address, pairs_codes, reads_rows
from backfill.kernels.inputs import AttentionMetadata, DecoderInputs, LayerInputs, LayerWeights, head_dim_of
from backfill.kernels.isa import ISA_VARIABLE
from backfill.kernels.linears import Linear, Table
from backfill.kernels.panels import (
    PANEL,
    padded_features,
    panels_of,
    quantized_panels_of,
)
from backfill.kernels.quantized import QuantizedWeight
from backfill.kernels.sampling import RowSampling
from backfill.kernels.stop_signal import StopSignal


def available_isas() -> list[str]:
    """Instruction set variants this machine runs, the fastest last."""
    return list(_kernels.supported_isas())


def _isa_of_environment() -> str:
    """The variant that the environment names; "" for the best one. Raises: ConfigError for an unknown one."""
    isa = os.environ.get(ISA_VARIABLE, "")
    if isa and isa not in available_isas():
        raise ConfigError(f"{ISA_VARIABLE}: this machine has {', '.join(available_isas())}, got {isa!r}.")
    return isa


class _PackedLayer(NamedTuple):
    """A layer as the C++ code reads it.

    Attributes:
        parts: all that it was checked with, kept alive. Weights move, and it holds for these alone.
        width: of the rows.
    """

    parts: tuple[object, ...]
    width: int
    cpp: _kernels.LayerWeights


def _packed(weights: LayerWeights) -> _kernels.LayerWeights:
    qkv, output, gate_up, down = weights.qkv, weights.output, weights.gate_up, weights.down
    assert reads_rows(qkv) and reads_rows(output) and reads_rows(gate_up) and reads_rows(down)
    return _kernels.LayerWeights(
        weights.input_norm.data_ptr(),
        qkv.packed,
        address(weights.q_norm),
        address(weights.k_norm),
        output.packed,
        weights.post_attention_norm.data_ptr(),
        gate_up.packed,
        down.packed,
    )


class CpuKernels(Kernels):
    """C++ kernels. Tensors are bfloat16 or float32; KV may be int8.

    Accumulation is float32. With bf16 products (AVX-512 BF16, AMX), attention rounds the softmax weights to
    bf16 before the product with V; their sum, the divisor, is taken before rounding.

    The constructor also tells malloc to keep freed memory in the process. Otherwise the pages of each step's
    activations and logits are returned and cause page faults (28,800 in a step of 400 rows).

    Args:
        isa: one of ``available_isas()``; by default the environment's ``BACKFILL_CPU_ISA``, else the best.
    Raises: ValueError if the machine lacks ``isa``, ConfigError if it lacks the environment's.
    """

    def __init__(self, isa: str | None = None) -> None:
        super().__init__(torch.device("cpu"), tuple(TYPE_CODES), takes_int8_kv=True)
        self._cpp = _kernels.KernelSet(isa or _isa_of_environment())
        _kernels.keep_freed_memory()
        # Of the pool and the batch that were checked last, which keep the memory at these addresses alive.
        self._cpp_pool: _kernels.KvPool
        self._cpp_batch: _kernels.Batch
        self._packed_layers: dict[int, _PackedLayer] = {}

    @property
    def isa(self) -> str:
        return str(self._cpp.isa)

    @property
    def sums_integers(self) -> bool:
        """Whether a linear layer of codes rounds its rows to 8 bits (csrc/linear_integers.h)."""
        return bool(self._cpp.sums_integers)

    @property
    def description(self) -> str:
        if self.isa == available_isas()[-1]:
            return f"{self.isa}, the fastest of {', '.join(available_isas())} on this processor"
        return f"{self.isa}, which {ISA_VARIABLE} names; {available_isas()[-1]} is the fastest here"

    def _linear(self, weight: Tensor, bias: Tensor | None) -> Table:
        bias = None if bias is None else bias.clone()
        out_features, in_features = weight.shape
        shape = out_features, in_features, padded_features(in_features, weight.dtype)
        return CpuLinear(self._cpp, panels_of(weight), bias, weight.dtype, shape)

    def _quantized_linear(self, weight: QuantizedWeight, bias: Tensor | None) -> Table:
        bias = None if bias is None else bias.clone()
        shape = *weight.shape, weight.shape[1]
        panels = quantized_panels_of(weight, are_paired=pairs_codes(self._cpp, weight.dtype))
        return CpuLinear(self._cpp, panels, bias, weight.dtype, shape, weight.format)

    def gated(self, linear: Linear) -> Linear:
        if isinstance(linear, CpuLinear) and not linear.is_gated and not linear.out_features % (2 * PANEL):
            return linear.gated()
        return super().gated(linear)

    def attention_block(
        self,
        weights: LayerWeights,
        x: Tensor,
        residual: Tensor | None,
        layer: int,
        inputs: DecoderInputs,
    ) -> Tensor:
        qkv, output = weights.qkv, weights.output
        if not (reads_rows(qkv) and reads_rows(output)):
            return super().attention_block(weights, x, residual, layer, inputs)
        self._check_attention(weights, x, residual, layer, inputs)
        rows = x.shape[0]
        out = x.new_empty((rows, output.out_features))
        self._cpp.attention_block(
            x.data_ptr(),
            x.stride(0),
            address(residual),
            rows,
            weights.input_norm.data_ptr(),
            inputs.eps,
            qkv.packed,
            output.packed,
            self._cpp_pool,
            self._cpp_batch,
            layer,
            inputs.num_heads,
            address(inputs.cos_sin),
            address(weights.q_norm),
            address(weights.k_norm),
            inputs.scale,
            out.data_ptr(),
        )
        return out

    def mlp_block(self, weights: LayerWeights, x: Tensor, residual: Tensor, eps: float) -> Tensor:
        gate_up, down = weights.gate_up, weights.down
        if not (reads_rows(gate_up) and reads_rows(down)):
            return super().mlp_block(weights, x, residual, eps)
        self._check_mlp(weights, x, residual)
        rows = x.shape[0]
        out = x.new_empty((rows, down.out_features))
        self._cpp.mlp_block(
            x.data_ptr(),
            x.stride(0),
            residual.data_ptr(),
            rows,
            weights.post_attention_norm.data_ptr(),
            eps,
            gate_up.packed,
            down.packed,
            out.data_ptr(),
        )
        return out

    def decoder_layers(
        self,
        layers: Sequence[LayerWeights],
        residual: Tensor,
        delta: Tensor | None,
        first: int,
        inputs: DecoderInputs,
        stop: StopSignal | None = None,
    ) -> tuple[Tensor, int]:
        x, added_to = (residual, None) if delta is None else (delta, residual)
        packed = []
        for layer, weights in enumerate(layers, first):
            matrices = weights.qkv, weights.output, weights.gate_up, weights.down
            if not all(map(reads_rows, matrices)):
                return super().decoder_layers(layers, residual, delta, first, inputs, stop)
            norms = weights.input_norm, weights.q_norm, weights.k_norm, weights.post_attention_norm
            parts = *matrices, *norms, inputs.cos_sin, inputs.kv_pool, x.dtype
            known = self._packed_layers.get(layer)
            is_known = known is not None and known.width == x.shape[1] and all(map(is_, known.parts, parts))
            # The first is checked in each call, with all that the layers have in common.
            if layer == first or not is_known:
                self._check_attention(weights, x, added_to, layer, inputs)
                self._check_mlp(weights, x, residual)
            if known is None or not is_known:
                known = self._packed_layers[layer] = _PackedLayer(parts, x.shape[1], _packed(weights))
            packed.append(known.cpp)
        out = x.new_empty(x.shape)
        done = self._cpp.decoder_layers(
            packed,
            x.data_ptr(),
            x.stride(0),
            residual.data_ptr(),
            delta is not None,
            x.shape[0],
            inputs.eps,
            self._cpp_pool,
            self._cpp_batch,
            first,
            inputs.num_heads,
            address(inputs.cos_sin),
            inputs.scale,
            out.data_ptr(),
            *((0, 0, 1) if stop is None else (stop.word.ctypes.data, stop.value, stop.layers_apart)),
        )
        return out, int(done)

    def _check_attention(
        self, weights: LayerWeights, x: Tensor, residual: Tensor | None, layer: int, inputs: DecoderInputs
    ) -> None:
        kv_pool, batch, num_heads, cos_sin, scale, _ = inputs
        qkv, output = weights.qkv, weights.output
        assert reads_rows(qkv) and reads_rows(output)
        self._check_norm(x, residual, weights.input_norm)
        width, head_dim = self._check_kv(kv_pool, layer, batch, num_heads), head_dim_of(kv_pool)
        self._check_rotation(head_dim, x.dtype, cos_sin, weights.q_norm, weights.k_norm)
        self._check_scale(scale)
        if kv_pool.dtype not in (x.dtype, torch.int8):
            raise ValueError(f"kv_pool: expected {x.dtype} or int8, got {kv_pool.dtype}")
        if (
            x.shape[0] != batch.positions.shape[0]
            or not qkv.dtype == output.dtype == x.dtype
            or (qkv.in_features, qkv.out_features) != (x.shape[1], width)
            or (output.in_features, output.out_features) != (num_heads * head_dim, x.shape[1])
        ):
            raise ValueError(f"x: does not fit the weights or the batch: {describe(x)}")

    def _check_mlp(self, weights: LayerWeights, x: Tensor, residual: Tensor) -> None:
        gate_up, down = weights.gate_up, weights.down
        assert reads_rows(gate_up) and reads_rows(down)
        self._check_norm(x, residual, weights.post_attention_norm)
        if (
            not gate_up.dtype == down.dtype == x.dtype
            or not gate_up.in_features == down.out_features == x.shape[1]
            or gate_up.out_features != down.in_features
        ):
            raise ValueError(f"x: does not fit the weights: {describe(x)}")

    def _sample(self, logits: Tensor, how: RowSampling) -> list[int]:
        num_rows, vocab_size = logits.shape
        token_ids = np.empty(num_rows, np.int64)
        top_k = np.where((how.top_k > 0) & (how.top_k < vocab_size), how.top_k, vocab_size)
        self._cpp.sample(
            TYPE_CODES[logits.dtype],
            logits.data_ptr(),
            token_ids.ctypes.data,
            num_rows,
            vocab_size,
            logits.stride(0),
            how.temperature.ctypes.data,
            top_k.ctypes.data,
            how.top_p.ctypes.data,
            how.min_p.ctypes.data,
            how.uniform.ctypes.data,
        )
        return token_ids.tolist()

    def _score(self, logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
        num_rows, vocab_size = logits.shape
        most_top = min(max(num_top), vocab_size)
        tokens, counts = np.array(token_ids, np.int64), np.minimum(num_top, most_top, dtype=np.int64)
        logprobs, ranks = np.empty(num_rows), np.empty(num_rows, np.int64)
        top_tokens, top_logprobs = np.empty((num_rows, most_top), np.int64), np.empty((num_rows, most_top))
        self._cpp.score(
            TYPE_CODES[logits.dtype],
            logits.data_ptr(),
            num_rows,
            vocab_size,
            logits.stride(0),
            tokens.ctypes.data,
            most_top,
            counts.ctypes.data,
            logprobs.ctypes.data,
            ranks.ctypes.data,
            top_tokens.ctypes.data,
            top_logprobs.ctypes.data,
        )
        columns = (each.tolist() for each in (logprobs, ranks, counts, top_tokens, top_logprobs))
        return [
            TokenLogprobs(logprob, rank, tuple(zip(ids[:num], values[:num], strict=True)))
            for logprob, rank, num, ids, values in zip(*columns, strict=True)
        ]

    def _rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        rows, size = x.shape
        out = x.new_empty((rows, size))
        self._cpp.norm(
            TYPE_CODES[x.dtype],
            x.data_ptr(),
            address(residual),
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            size,
            x.stride(0),
            eps,
        )
        return out

    def _silu_and_mul(self, gate_up: Tensor) -> Tensor:
        rows, columns = gate_up.shape
        out = gate_up.new_empty((rows, columns // 2))
        self._cpp.silu_and_mul(
            TYPE_CODES[gate_up.dtype],
            gate_up.data_ptr(),
            out.data_ptr(),
            rows,
            columns // 2,
            gate_up.stride(0),
        )
        return out

    def _rotate_and_write_kv(
        self,
        inputs: LayerInputs,
        cos_sin: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> None:
        self._cpp.rotate_and_write_kv(
            TYPE_CODES[inputs.qkv.dtype],
            inputs.qkv.data_ptr(),
            self._cpp_pool,
            self._cpp_batch,
            inputs.layer,
            inputs.num_heads,
            address(cos_sin),
            address(q_norm),
            address(k_norm),
            eps,
        )

    def _attention(self, inputs: LayerInputs, scale: float) -> Tensor:
        qkv, num_heads = inputs.qkv, inputs.num_heads
        out = qkv.new_empty((qkv.shape[0], num_heads * inputs.head_dim))
        self._cpp.attention(
            TYPE_CODES[qkv.dtype],
            qkv.data_ptr(),
            out.data_ptr(),
            self._cpp_pool,
            self._cpp_batch,
            inputs.layer,
            num_heads,
            scale,
        )
        return out

    def _check_pool(self, kv_pool: Tensor) -> None:
        super()._check_pool(kv_pool)
        _, num_layers, _, num_kv_heads, block_size, row_size = kv_pool.shape
        self._cpp_pool = _kernels.KvPool(
            kv_pool.dtype == torch.int8,
            kv_pool.data_ptr(),
            num_layers,
            num_kv_heads,
            block_size,
            row_size,
            head_dim_of(kv_pool),
        )

    def _check_batch(self, batch: AttentionMetadata) -> None:
        super()._check_batch(batch)
        self._cpp_batch = _kernels.Batch(
            batch.positions.data_ptr(),
            batch.slot_mapping.data_ptr(),
            batch.cu_seqlens_q.data_ptr(),
            batch.seq_lens.data_ptr(),
            batch.block_table.data_ptr(),
            batch.block_table_offsets.data_ptr(),
            batch.positions.shape[0],
            batch.num_seqs,
        )
