"""The prefix tree of a set of prompts, built by sorting them.

In the sorted order, the prompts below a node of a radix tree are neighbours, and the node's depth is the
longest prefix that all of them share. So the tree is arrays: for each node its range of prompts, depth and
parent. A sum over a subtree is then a difference of prefix sums, and no token is looked at but to sort and
to compare neighbours. The tree does not change. Prompts are added by building another one (``run.py``), and
the requests that are left are counted apart (``waiting.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from backfill.blending.requests import TOKEN_BYTES
from backfill.blending.resources import Floats, Ints

FIRST_COMPARED_BYTES = 256


def shared_prefix_tokens(a: bytes, b: bytes) -> int:
    """Number of leading uint32 tokens that both have."""
    end = min(len(a), len(b))
    start, size = 0, FIRST_COMPARED_BYTES
    while start < end:
        stop = min(start + size, end)
        of_a, of_b = a[start:stop], b[start:stop]
        if of_a != of_b:
            differing = int.from_bytes(of_a, "big") ^ int.from_bytes(of_b, "big")
            return (stop - (differing.bit_length() + 7) // 8) // TOKEN_BYTES
        start, size = stop, 4 * size
    return end // TOKEN_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class PrefixTree:
    """Radix tree of n sorted prompts, as arrays.

    Node 0 is the root, of depth 0. Every other node is a prefix that two or more prompts share and after
    which they differ. A prompt is a leaf, also where it ends at a node.

    Attributes:
        depth: tokens of each node's prefix.
        low, high: each node's prompts, ``[low, high)`` in sorted order.
        parent: of each node; the root's is itself.
        leaf_parent: the deepest node of each prompt.
        num_tokens: of each prompt.
    """

    depth: Ints
    low: Ints
    high: Ints
    parent: Ints
    leaf_parent: Ints
    num_tokens: Ints

    @classmethod
    def build(cls, prompts: Sequence[bytes]) -> Self:
        """The tree of prompts that are sorted as bytes."""
        builder = _Builder(len(prompts))
        for i in range(1, len(prompts)):
            builder.add(i, shared_prefix_tokens(prompts[i - 1], prompts[i]))
        builder.finish()
        num_tokens = np.fromiter(map(len, prompts), np.int64, len(prompts)) // TOKEN_BYTES
        return cls(
            np.array(builder.depth, np.int64),
            np.array(builder.low, np.int64),
            np.array(builder.high, np.int64),
            np.array(builder.parent, np.int64),
            np.array(builder.leaf_parent, np.int64),
            num_tokens,
        )

    @property
    def parent_depth(self) -> Ints:
        """Tokens before each node's own edge."""
        return self.depth[self.parent]

    def sums(self, values: NDArray[np.float64] | NDArray[np.int64]) -> Floats:
        """Of each node, the sum of its prompts' values."""
        cumulative = np.concatenate(([0.0], np.cumsum(values, dtype=np.float64)))
        return cumulative[self.high] - cumulative[self.low]

    def counts(self, is_counted: NDArray[np.bool_]) -> Ints:
        """Of each node, how many of its prompts are counted. Exact."""
        cumulative = np.concatenate(([0], np.cumsum(is_counted, dtype=np.int64)))
        return cumulative[self.high] - cumulative[self.low]

    def shares(self, node_values: Floats, num_sharing: Ints) -> Floats:
        """Of each prompt, its part of the values of all its nodes, each shared equally by ``num_sharing``."""
        share = np.divide(node_values, num_sharing, out=np.zeros(len(node_values)), where=num_sharing > 0)
        change = np.zeros(len(self.num_tokens) + 1)
        np.add.at(change, self.low, share)
        np.add.at(change, self.high, -share)
        return np.maximum(np.cumsum(change[:-1]), 0.0)

    def nearest(self, has: NDArray[np.bool_]) -> Ints:
        """Of each node, itself or its nearest ancestor that ``has`` is true of; else the root."""
        nearest = np.where(has, np.arange(len(has)), self.parent)
        nearest[0] = 0
        while True:  # doubles the distance looked at in each round
            further = nearest[nearest]
            if np.array_equal(further, nearest):
                return nearest
            nearest = further

    def path_sums(self, values: Ints) -> Ints:
        """Of each node, the sum of the values of its path, its own included and the root's not."""
        total, up = values.copy(), self.parent
        total[0] = 0
        while up.any():
            total = total + total[up]
            up = up[up]
        return total

    def levels(self) -> list[Ints]:
        """The nodes by their number of ancestors, the root first."""
        level = self.path_sums(np.ones(len(self.parent), np.int64))
        order = np.argsort(level, kind="stable")
        return np.split(order, np.cumsum(np.bincount(level))[:-1])


class _Builder:
    """Finds the nodes from the prefixes that neighbours share, keeping the path to the last prompt on a
    stack.
    """

    def __init__(self, num_prompts: int) -> None:
        self.depth, self.low, self.high, self.parent = [0], [0], [num_prompts], [0]
        self.leaf_parent = [0] * num_prompts
        self._num_prompts = num_prompts
        self._path = [0]

    def add(self, index: int, shared: int) -> None:
        """Prompt ``index`` shares so many tokens with its predecessor."""
        path, depth = self._path, self.depth
        if shared > depth[path[-1]]:
            path.append(self._node(shared, index - 1))
            self.leaf_parent[index - 1] = path[-1]
        else:
            self._leave(index, shared)
        self.leaf_parent[index] = path[-1]

    def finish(self) -> None:
        self._leave(self._num_prompts, 0)

    def _leave(self, index: int, depth: int) -> None:
        """End the nodes of the path that are deeper than ``depth``."""
        path = self._path
        while self.depth[path[-1]] > depth:
            node = path.pop()
            self.high[node] = index
            if self.depth[path[-1]] < depth:
                path.append(self._node(depth, self.low[node]))
            self.parent[node] = path[-1]

    def _node(self, depth: int, low: int) -> int:
        self.depth.append(depth)
        self.low.append(low)
        self.high.append(self._num_prompts)
        self.parent.append(self._path[-1])
        return len(self.depth) - 1
