"""Block references and the geometry of a KV block.

A *block* holds the KV of ``block_size`` consecutive tokens of one request, for every layer.
A request fills a block from slot 0 up, or, if its reference is *reversed*, from slot ``block_size - 1`` down.
So two requests can share one block from opposite ends (BROS, section 5.1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, NewType

BlockRef = NewType("BlockRef", int)
"""A physical block and the direction in which its owner fills it, packed as ``index << 1 | reverse``.

Packed because a step passes thousands of them to the kernels, which read the same encoding.
"""


def pack_block_ref(index: int, reverse: bool = False) -> BlockRef:
    return BlockRef(index << 1 | reverse)


def block_index(ref: BlockRef) -> int:
    return ref >> 1


def is_reversed(ref: BlockRef) -> bool:
    return bool(ref & 1)


class BlockCopy(NamedTuple):
    """A device block, and the host block that it is copied to or from."""

    device: int
    host: int


class BlockMove(NamedTuple):
    """Two device blocks: the KV of the first is copied to the second."""

    source: int
    target: int


class SlotCopy(NamedTuple):
    """Slots ``[first, first + num)`` of a device block, and the same slots of the host block.

    For a block that two requests share, where one of them must not be overwritten. Slots are physical: a
    request that fills the block from the back has its first token in the last slot.
    """

    device: int
    host: int
    first: int
    num: int


KV_SCALE_BYTES = 4
"""Of a float32, which follows each row of codes of 8 bits and multiplies them."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of a KV pool: ``[num_blocks, num_layers, 2, num_kv_heads, block_size, row_size]``.

    A block is contiguous over all layers, so that one copy moves it between device and host. Index 0 of the
    third axis is K, 1 is V.

    Attributes:
        dtype_bytes: of an element. KV of one byte is in codes, and a row has its scale too.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype_bytes: int

    @property
    def row_size(self) -> int:
        """Elements that K or V of a token and head have in the pool."""
        return self.head_dim + (KV_SCALE_BYTES if self.dtype_bytes == 1 else 0)

    @property
    def block_bytes(self) -> int:
        return math.prod(self.shape(1)) * self.dtype_bytes

    def shape(self, num_blocks: int) -> tuple[int, int, int, int, int, int]:
        return (num_blocks, self.num_layers, 2, self.num_kv_heads, self.block_size, self.row_size)
