"""What the layers of a step take.

Shapes: see ``backfill.kernels.base``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from backfill.core.block import KV_SCALE_BYTES
from backfill.kernels.linears import Linear

# Numbers of shared keys are multiples of it, and it is a multiple of the keys in a kernel's tile.
SHARED_UNIT = 64


@dataclass(frozen=True, slots=True)
class SharedKeys:
    """Groups of decodes that begin with the same blocks.

    A sharer has one query row, and at least one key that it does not share. Groups of no sequence may follow,
    and more sharers than there are.
    """

    sharers: Tensor  # int32 [N]: sequences, group by group
    offsets: Tensor  # int32 [G + 1]: index in sharers of each group's first
    lens: Tensor  # int32 [S]: keys that a sequence shares with its group, a multiple of SHARED_UNIT
    max_len: int


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Positions, slots and block tables of a step's flat batch; the same for all layers.

    Sequence s owns rows ``[cu_seqlens_q[s], cu_seqlens_q[s + 1])`` of the batch. Its last row is
    the token at position ``seq_lens[s] - 1``; row i of its n rows is at position
    ``seq_lens[s] - n + i`` and attends to every position up to its own.
    """

    positions: Tensor  # int64 [T]
    # int64 [T]: block index * B + slot, where the row's K and V are written. On CUDA, below 0 in rows that
    # belong to no sequence, whose KV is not written.
    slot_mapping: Tensor
    cu_seqlens_q: Tensor  # int32 [S + 1]
    seq_lens: Tensor  # int32 [S]: tokens of KV once this step's rows are written
    block_table: Tensor  # int32 [sum of blocks]: packed BlockRef (index << 1 | reverse), sequence by sequence
    block_table_offsets: Tensor  # int32 [S + 1]: index in block_table of each sequence's first block
    max_query_len: int
    max_seq_len: int
    shared: SharedKeys | None = None  # only on CUDA: the CPU's kernels find their own

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]


class LayerWeights(Protocol):
    """Of a decoder layer, each half with its norm."""

    input_norm: Tensor
    qkv: Linear  # q heads, k heads, v heads
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    post_attention_norm: Tensor
    gate_up: Linear  # silu(gate) * up
    down: Linear


class DecoderInputs(NamedTuple):
    """What all decoder layers of a pass take; see ``Kernels.rotate_and_write_kv`` and ``attention``."""

    kv_pool: Tensor
    batch: AttentionMetadata
    num_heads: int
    cos_sin: Tensor | None
    scale: float
    eps: float  # of the norms


class LayerInputs(NamedTuple):
    """What both operators on the KV of a layer take; see ``Kernels.rotate_and_write_kv``."""

    qkv: Tensor
    kv_pool: Tensor
    layer: int
    batch: AttentionMetadata
    num_heads: int

    @property
    def head_dim(self) -> int:
        return head_dim_of(self.kv_pool)


def head_dim_of(kv_pool: Tensor) -> int:
    """Elements of K or V of a token and head, without the scale of those that are codes."""
    return kv_pool.shape[5] - (KV_SCALE_BYTES if kv_pool.dtype == torch.int8 else 0)
