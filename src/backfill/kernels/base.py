"""The interface of a kernel set, and the tensors that all layers of a step share.

An executor chooses its kernel set once (``create_kernels``). Everything above this package is
device-agnostic. Shapes: T tokens in the step's flat batch (prefill and decode together), S
sequences, H query heads, G key/value heads, D head size, L layers, B block size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Positions, slots and block tables of a step's flat batch; the same for all layers.

    Sequence s owns rows ``[cu_seqlens_q[s], cu_seqlens_q[s + 1])`` of the batch. Its last row is
    the token at position ``seq_lens[s] - 1``; row i of its n rows is at position
    ``seq_lens[s] - n + i`` and attends to every position up to its own.
    """

    positions: Tensor  # int64 [T]
    slot_mapping: Tensor  # int64 [T]: block index * B + slot, where the row's K and V are written
    cu_seqlens_q: Tensor  # int32 [S + 1]
    seq_lens: Tensor  # int32 [S]: tokens of KV once this step's rows are written
    block_table: Tensor  # int32 [sum of blocks]: packed BlockRef (index << 1 | reverse), sequence by sequence
    block_table_offsets: Tensor  # int32 [S + 1]: index in block_table of each sequence's first block
    max_query_len: int
    max_seq_len: int

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]


class Linear(Protocol):
    """A weight in the device's fastest layout."""

    in_features: int
    out_features: int

    def __call__(self, x: Tensor) -> Tensor:
        """``x [T, in_features] -> [T, out_features]``, bias included, in x's dtype."""

    @property
    def layout(self) -> str:
        """Linears of one layout and shape may exchange the bytes of their memory."""

    @property
    def memory(self) -> tuple[Tensor, ...]:
        """The packed weight and, if there is one, the bias: flat uint8 views, valid as long as the linear."""

    def placed(self, memory: Sequence[Tensor]) -> Linear:
        """A linear of this shape and layout that reads ``memory``, which it keeps.

        ``memory`` has flat uint8 tensors as long as this linear's, each at an address that is a multiple of
        64. Their contents are not set, and may be overwritten while no call runs.
        """


class Kernels(Protocol):
    """The operators a decoder layer is made of. ``x`` is contiguous in its last dimension."""

    @property
    def description(self) -> str:
        """Which kernels these are, and why these: for a line of the log."""

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Pack ``weight [out, in]`` once. The result owns its memory; the caller may free ``weight``."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``x * weight / sqrt(mean(x^2) + eps)`` over the last axis; float32 inside. ``[T, N] -> [T, N]``."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``residual += x`` in place, then ``rms_norm(residual)``. ``[T, N] -> [T, N]``."""

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """``silu(gate_up[:, :N]) * gate_up[:, N:]``; float32 inside. ``[T, 2N] -> [T, N]``."""

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
            kv_pool: ``[num_blocks, L, 2, G, B, D]`` in qkv's dtype; rows go to ``batch.slot_mapping``.
            cos_sin: float32 ``[max positions, D]``: cosines of the D/2 angles, then sines; rotation
                pairs element i with i + D/2 (the "neox" form). None: no rotary embedding.
            q_norm, k_norm: ``[D]`` weights, both or neither.
        """

    def attention(
        self, qkv: Tensor, kv_pool: Tensor, layer: int, batch: AttentionMetadata, num_heads: int, scale: float
    ) -> Tensor:
        """Causal attention of every row over its sequence's KV, read in place from the blocks.

        ``qkv`` is as ``rotate_and_write_kv`` left it. Returns ``[T, H * D]`` in its dtype.
        Query head h reads key/value head ``h // (H // G)``. Softmax and sums are float32.
        """


def describe(x: Tensor) -> str:
    """A tensor's dtype, shape, strides and device, for the message of an error."""
    return f"{x.dtype} {list(x.shape)} with strides {list(x.stride())} on {x.device}"
