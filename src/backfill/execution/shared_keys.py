"""Which decodes of a step begin with the same blocks: cascade attention reads these once for all of them."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from backfill.kernels.inputs import SHARED_UNIT

# Fewest keys that a group shares, and fewest that a step's groups spare it to read again. Estimated, not
# measured: an H200 reads so many of a layer of an 8B model in 8 us, about what two more kernels take.
MIN_SHARED_KEYS = 256
MIN_SAVED_KEYS = 8192

_Ints = NDArray[np.int32]


class SharedKeyArrays(NamedTuple):
    """``SharedKeys`` on the host; all are empty where nothing is shared."""

    sharers: _Ints
    sharer_offsets: _Ints
    shared_lens: _Ints

    @classmethod
    def empty(cls) -> SharedKeyArrays:
        nothing = np.empty(0, dtype=np.int32)
        return cls(nothing, nothing, nothing)


def find_shared_keys(
    cu_seqlens_q: _Ints, seq_lens: _Ints, block_table: _Ints, block_table_offsets: _Ints, block_size: int
) -> SharedKeyArrays:
    """Of a batch as in ``AttentionMetadata``.

    Decodes whose first ``MIN_SHARED_KEYS`` keys lie in the same blocks are a group, which shares what all of
    them have in the same blocks. Each keeps at least a key of its own.
    """
    decodes = np.flatnonzero((np.diff(cu_seqlens_q) == 1) & (seq_lens > MIN_SHARED_KEYS))
    if (len(decodes) - 1) * (int(seq_lens.max()) - 1) < MIN_SAVED_KEYS:
        return SharedKeyArrays.empty()
    first_blocks = np.arange(-(-MIN_SHARED_KEYS // block_size))
    beginnings = block_table[block_table_offsets[decodes, None] + first_blocks]
    if len(np.unique(beginnings[:, -1])) == len(decodes):  # as in most steps, and found in less time
        return SharedKeyArrays.empty()
    groups: defaultdict[bytes, list[int]] = defaultdict(list)
    for seq, beginning in zip(decodes.tolist(), beginnings, strict=True):
        groups[beginning.tobytes()].append(seq)
    sharers: list[int] = []
    sharer_offsets = [0]
    shared_lens = np.zeros_like(seq_lens)
    num_saved = 0
    for members in groups.values():
        if len(members) > 1:
            sharers += members
            sharer_offsets.append(len(sharers))
            most = int(seq_lens[members].min()) - 1
            num_shared = _in_same_blocks(block_table, block_table_offsets[members], most, block_size)
            shared_lens[members] = num_shared
            num_saved += (len(members) - 1) * num_shared
    if num_saved < MIN_SAVED_KEYS:
        return SharedKeyArrays.empty()
    return SharedKeyArrays(np.array(sharers, np.int32), np.array(sharer_offsets, np.int32), shared_lens)


def _in_same_blocks(block_table: _Ints, starts: _Ints, most: int, block_size: int) -> int:
    """Keys that sequences with block tables from ``starts`` on have in the same blocks, in whole units."""
    tables = block_table[starts[:, None] + np.arange(-(-most // block_size))]
    differ = (tables != tables[0]).any(axis=0)
    num_blocks = int(differ.argmax()) if differ.any() else len(differ)
    return min(num_blocks * block_size, most) // SHARED_UNIT * SHARED_UNIT
