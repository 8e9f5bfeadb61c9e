"""The interface of a kernel set.

An executor chooses its kernel set once (``create_kernels``). Everything above this package is
device-agnostic. Shapes: T tokens in the step's flat batch (prefill and decode together), S
sequences, H query heads, G key/value heads, D head size, L layers, B block size.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from backfill.core.plan import TokenLogprobs
from backfill.kernels.inputs import AttentionMetadata, DecoderInputs, LayerInputs, LayerWeights, head_dim_of
from backfill.kernels.linears import GatedLinear, Linear, Table
from backfill.kernels.quantized import QuantizedWeight
from backfill.kernels.sampling import RowSampling, sample_rows
from backfill.kernels.scoring import score_rows
from backfill.kernels.stop_signal import StopSignal


class Kernels(ABC):
    """The operators a decoder layer is made of: their contract, and the checks of their arguments.

    ``x`` and ``gate_up`` are contiguous in their last dimension, all other tensors wholly. Every operator
    raises ValueError, naming the argument, for a tensor of a shape, layout, dtype or device that it cannot
    take; then nothing was computed. A set of kernels has the methods with an underscore, whose arguments are
    checked.

    C++ and Triton get addresses and can check nothing. But a step makes hundreds of calls, so checks only
    read attributes, and a pool or a batch is checked once for all layers. The caller answers for the values
    in a batch (slots, block references), and for calls that take one from one thread at a time.

    Args:
        device: where all tensors are.
        dtypes: of rows and weights, equal in each call, and of KV unless that is int8.
        takes_int8_kv: KV may be int8.
    """

    def __init__(
        self, device: torch.device, dtypes: Sequence[torch.dtype], *, takes_int8_kv: bool = False
    ) -> None:
        self._device = device
        self._dtypes = tuple(dtypes)
        self._kv_dtypes = (*self._dtypes, *([torch.int8] if takes_int8_kv else []))
        self._pool: Tensor | None = None  # the last one checked, as the batch
        self._batch: AttentionMetadata | None = None

    @property
    @abstractmethod
    def description(self) -> str:
        """Which kernels these are, and why these: for a line of the log."""

    def linear(self, weight: Tensor | QuantizedWeight, bias: Tensor | None = None) -> Table:
        """Pack ``weight [out, in]`` once. The caller may free ``weight``, and must not change it.

        A quantized weight is multiplied as if it was dequantized, to its dtype or to float32, or by rows
        rounded to 8 bits in groups (docs/kernels.md).
        """
        if isinstance(weight, QuantizedWeight):
            weight.check()
            if weight.dtype not in self._dtypes:
                raise ValueError(f"weight: expected rows of {self._kind}, got {weight.dtype}")
            if bias is not None:
                self._check_vector("bias", bias, weight.shape[0], weight.dtype)
            return self._quantized_linear(weight, bias)
        if weight.dim() != 2 or weight.shape[1] == 0 or not self._takes(weight):
            raise ValueError(f"weight: expected {self._kind} [out, in], got {describe(weight)}")
        if bias is not None:
            self._check_vector("bias", bias, weight.shape[0], weight.dtype)
        return self._linear(weight.detach(), None if bias is None else bias.detach())

    def gated(self, linear: Linear) -> Linear:
        """``silu_and_mul`` of ``linear``, whose outputs are gates, then what they multiply. Consumes it."""
        return GatedLinear(linear, self.silu_and_mul)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``x * weight / sqrt(mean(x^2) + eps)`` over the last axis; float32 inside. ``[T, N] -> [T, N]``."""
        self._check_norm(x, None, weight)
        return self._rms_norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``residual += x`` in place, then ``rms_norm(residual)``. ``[T, N] -> [T, N]``."""
        self._check_norm(x, residual, weight)
        return self._rms_norm(x, residual, weight, eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """``silu(gate_up[:, :N]) * gate_up[:, N:]``; float32 inside. ``[T, 2N] -> [T, N]``."""
        self._check_rows("gate_up", gate_up)
        if gate_up.shape[1] % 2:
            raise ValueError(f"gate_up: expected an even number of columns, got {gate_up.shape[1]}")
        return self._silu_and_mul(gate_up)

    def rotate_and_write_kv(
        self,
        qkv: Tensor,
        kv_pool: Tensor,
        layer: int,
        batch: AttentionMetadata,
        num_heads: int,
        cos_sin: Tensor | None,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        """Finish the projections of one layer: optional per-head RMS norm of q and k, rotary, KV write.

        Args:
            qkv: ``[T, (H + 2G) * D]``, heads of q, then k, then v. q is replaced in place by its
                normalised, rotated form; the k and v part may be left in any state.
            kv_pool: ``[num_blocks, L, 2, G, B, D]`` in qkv's dtype; rows go to ``batch.slot_mapping``. Or
                int8 ``[num_blocks, L, 2, G, B, D + 4]``: of D elements the nearest multiples of the row's
                scale, its largest magnitude / 127, then the bytes of the scale, a float32. Below 1e-30 a row
                is zero.
            cos_sin: float32 ``[max positions, D]``: cosines of the D/2 angles, then sines; rotation
                pairs element i with i + D/2 (the "neox" form). None: no rotary embedding.
            q_norm, k_norm: ``[D]`` weights, both or neither.
        """
        inputs = self._checked(LayerInputs(qkv, kv_pool, layer, batch, num_heads))
        self._check_rotation(inputs.head_dim, qkv.dtype, cos_sin, q_norm, k_norm)
        self._rotate_and_write_kv(inputs, cos_sin, q_norm, k_norm, eps)

    def attention(
        self, qkv: Tensor, kv_pool: Tensor, layer: int, batch: AttentionMetadata, num_heads: int, scale: float
    ) -> Tensor:
        """Causal attention of every row over its sequence's KV, read in place from the blocks.

        All KV is read from the pool, that of the step's own rows too: it is as rounded as any other.
        ``qkv`` is as ``rotate_and_write_kv`` left it. Returns ``[T, H * D]`` in its dtype.
        Query head h reads key/value head ``h // (H // G)``. Softmax and sums are float32.
        """
        self._check_scale(scale)
        return self._attention(self._checked(LayerInputs(qkv, kv_pool, layer, batch, num_heads)), scale)

    def attention_block(
        self,
        weights: LayerWeights,
        x: Tensor,
        residual: Tensor | None,
        layer: int,
        inputs: DecoderInputs,
    ) -> Tensor:
        """The first half of a layer: ``add_rms_norm``, or ``rms_norm`` without a residual, to ``output``.

        ``[T, N] -> [T, N]``. In one call, so that a set of kernels may spare the way back between operators.
        """
        kv_pool, batch, num_heads, cos_sin, scale, eps = inputs
        norm, q_norm, k_norm = weights.input_norm, weights.q_norm, weights.k_norm
        if residual is None:
            normed = self.rms_norm(x, norm, eps)
        else:
            normed = self.add_rms_norm(x, residual, norm, eps)
        qkv = weights.qkv(normed)
        self.rotate_and_write_kv(qkv, kv_pool, layer, batch, num_heads, cos_sin, q_norm, k_norm, eps)
        return weights.output(self.attention(qkv, kv_pool, layer, batch, num_heads, scale))

    def mlp_block(self, weights: LayerWeights, x: Tensor, residual: Tensor, eps: float) -> Tensor:
        """The second half: ``add_rms_norm`` to ``down``. ``[T, N] -> [T, N]``."""
        return weights.down(weights.gate_up(self.add_rms_norm(x, residual, weights.post_attention_norm, eps)))

    def decoder_layers(
        self,
        layers: Sequence[LayerWeights],
        residual: Tensor,
        delta: Tensor | None,
        first: int,
        inputs: DecoderInputs,
        stop: StopSignal | None = None,
    ) -> tuple[Tensor, int]:
        """Both halves of each of ``layers``, at least one; the first has the KV of ``first`` in the pool.

        Args:
            delta: not yet added to ``residual``, which is overwritten. Both are ``[T, N]``.
            stop: ends the call early.
        Returns: the next delta, and how many layers were computed.
        """
        done = 0
        for weights in layers:
            if stop is not None and done and done % stop.layers_apart == 0 and stop.is_set():
                break
            x, added_to = (residual, None) if delta is None else (delta, residual)
            x = self.attention_block(weights, x, added_to, first + done, inputs)
            delta = self.mlp_block(weights, x, residual, inputs.eps)
            done += 1
        assert delta is not None, "no layers"
        return delta, done

    def sample(self, logits: Tensor, how: RowSampling) -> list[int]:
        """A token for each row of ``logits [N, vocab]``, which depends on its row alone."""
        self._check_logits(logits)
        how.check(len(logits))
        return self._sample(logits, how)

    def _sample(self, logits: Tensor, how: RowSampling) -> list[int]:
        return sample_rows(logits, how)

    def score(self, logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
        """Log probabilities of a token of each row of ``logits [N, vocab]`` and of so many most likely ones.

        Impossible tokens are not among these. What is found of a row depends on the row alone, but for which
        of equals are named on a GPU. Of a row with NaN or infinity nothing is said.
        """
        self._check_logits(logits)
        for name, values, end in (("token_ids", token_ids, logits.shape[1]), ("num_top", num_top, math.inf)):
            if len(values) != len(logits) or not all(0 <= each < end for each in values):
                raise ValueError(f"{name}: expected {len(logits)} in [0, {end}), got {list(values)}")
        return self._score(logits, token_ids, num_top) if len(logits) else []

    def _score(self, logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
        return score_rows(logits, token_ids, num_top)

    def _check_logits(self, logits: Tensor) -> None:
        takes = logits.device == self._device and logits.dtype in (*self._dtypes, torch.float32)
        if logits.dim() != 2 or logits.stride(1) != 1 or not takes:
            raise ValueError(f"logits: expected {self._kind} or float32 [N, vocab], got {describe(logits)}")

    @abstractmethod
    def _linear(self, weight: Tensor, bias: Tensor | None) -> Table: ...

    def _quantized_linear(self, weight: QuantizedWeight, bias: Tensor | None) -> Table:
        """Dequantized, where a set of kernels has nothing better."""
        return self._linear(weight.dequantized().to(self._device), bias)

    @abstractmethod
    def _rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """``rms_norm``, or ``add_rms_norm`` where there is a residual."""

    @abstractmethod
    def _silu_and_mul(self, gate_up: Tensor) -> Tensor: ...

    @abstractmethod
    def _rotate_and_write_kv(
        self,
        inputs: LayerInputs,
        cos_sin: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> None: ...

    @abstractmethod
    def _attention(self, inputs: LayerInputs, scale: float) -> Tensor: ...

    @property
    def _kind(self) -> str:
        return f"{_names(self._dtypes)} on {self._device}"

    def _takes(self, x: Tensor) -> bool:
        return x.dtype in self._dtypes and x.device == self._device

    def _check_rows(self, name: str, x: Tensor) -> None:
        if x.dim() != 2 or x.stride(1) != 1 or not self._takes(x):
            raise ValueError(f"{name}: expected {self._kind} [T, N] with dense rows, got {describe(x)}")

    def _check_vector(self, name: str, x: Tensor, size: int, dtype: torch.dtype) -> None:
        if x.shape != (size,) or x.dtype != dtype or not x.is_contiguous() or x.device != self._device:
            raise ValueError(
                f"{name}: expected contiguous {dtype} [{size}] on {self._device}, got {describe(x)}"
            )

    def _check_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor) -> None:
        self._check_rows("x", x)
        self._check_vector("weight", weight, x.shape[1], x.dtype)
        if residual is not None and (
            residual.shape != x.shape
            or residual.dtype != x.dtype
            or residual.device != x.device
            or not residual.is_contiguous()
        ):
            raise ValueError(
                f"residual: expected contiguous {x.dtype} {list(x.shape)}, got {describe(residual)}"
            )

    def _check_scale(self, scale: float) -> None:
        if scale <= 0:
            raise ValueError(f"scale: expected a positive number, got {scale}")

    def _check_rotation(
        self,
        head_dim: int,
        dtype: torch.dtype,
        cos_sin: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
    ) -> None:
        if cos_sin is not None and (
            cos_sin.dtype != torch.float32
            or cos_sin.shape[-1] != head_dim
            or cos_sin.device != self._device
            or not cos_sin.is_contiguous()
        ):
            raise ValueError(f"cos_sin: expected contiguous float32 [*, {head_dim}], got {describe(cos_sin)}")
        if (q_norm is None) != (k_norm is None):
            raise ValueError("k_norm: expected q_norm and k_norm, or neither")
        if q_norm is not None and k_norm is not None:
            self._check_vector("q_norm", q_norm, head_dim, dtype)
            self._check_vector("k_norm", k_norm, head_dim, dtype)

    def _checked(self, inputs: LayerInputs) -> LayerInputs:
        qkv, kv_pool, layer, batch, num_heads = inputs
        width = self._check_kv(kv_pool, layer, batch, num_heads)
        shape = batch.positions.shape[0], width
        dtypes = self._dtypes if kv_pool.dtype == torch.int8 else (kv_pool.dtype,)
        if qkv.dtype not in dtypes or qkv.shape != shape or not qkv.is_contiguous():
            raise ValueError(f"qkv: expected contiguous {_names(dtypes)} {list(shape)}, got {describe(qkv)}")
        return inputs

    def _check_kv(self, kv_pool: Tensor, layer: int, batch: AttentionMetadata, num_heads: int) -> int:
        """Returns: columns of qkv."""
        if kv_pool is not self._pool:
            self._check_pool(kv_pool)
            self._pool = kv_pool
        if batch is not self._batch:
            self._check_batch(batch)
            self._batch = batch
        _, num_layers, _, num_kv_heads, _, _ = kv_pool.shape
        if num_heads <= 0 or num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads: expected a multiple of the {num_kv_heads} key/value heads, got {num_heads}"
            )
        if not 0 <= layer < num_layers:
            raise ValueError(f"layer: expected 0 to {num_layers - 1}, got {layer}")
        return (num_heads + 2 * num_kv_heads) * head_dim_of(kv_pool)

    def _check_pool(self, kv_pool: Tensor) -> None:
        shape = kv_pool.shape
        is_taken = kv_pool.dtype in self._kv_dtypes and kv_pool.device == self._device
        if len(shape) != 6 or shape[2] != 2 or not kv_pool.is_contiguous() or not is_taken:
            raise ValueError(
                f"kv_pool: expected contiguous {_names(self._kv_dtypes)} on {self._device} "
                f"[num_blocks, L, 2, G, B, D], got {describe(kv_pool)}"
            )
        head_dim = head_dim_of(kv_pool)
        if head_dim <= 0 or head_dim % 8:
            raise ValueError(f"kv_pool: expected a head size in eights, got {head_dim}")

    def _check_batch(self, batch: AttentionMetadata) -> None:
        num_rows, num_seqs = batch.positions.shape[0], batch.num_seqs
        for name, size, dtype in (
            ("positions", num_rows, torch.int64),
            ("slot_mapping", num_rows, torch.int64),
            ("cu_seqlens_q", num_seqs + 1, torch.int32),
            ("seq_lens", num_seqs, torch.int32),
            ("block_table", batch.block_table.shape[0], torch.int32),
            ("block_table_offsets", num_seqs + 1, torch.int32),
        ):
            self._check_vector(f"batch.{name}", getattr(batch, name), size, dtype)


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(str(each).removeprefix("torch.") for each in dtypes)


def describe(x: Tensor) -> str:
    """A tensor's dtype, shape, strides and device, for the message of an error."""
    return f"{x.dtype} {list(x.shape)} with strides {list(x.stride())} on {x.device}"
