"""The order in which the waiting requests of a tree run.

Source: BlendServe (section 3.3, algorithms 1 and 2); ``batchllm`` is BatchLLM (arXiv 2412.03594).
docs/blending.md says where node splitting differs from the print, and why.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backfill.blending.estimates import Moments
from backfill.blending.resources import Floats, Ints, ResourceModel
from backfill.blending.tree import PrefixTree

SHARING_LOSS_FRAC = 0.01
"""Of the tokens that sharing saves, the share that splitting may give up at most."""

ROUNDING = 1e-9
"""Relative differences below this are those of floating-point sums."""


@dataclass(frozen=True, slots=True, eq=False)
class Forecast:
    """What every waiting prompt is expected to cost. Values of others are 0 or without meaning.

    The compute of a prefix that several waiting prompts share is charged to them in equal parts. So the sum
    over any set of them is what it adds to the pool, and the sum over all counts each prefix once.

    Attributes:
        is_waiting: the prompts that it is about.
        outputs: moments of the output length.
        compute_s, memory_s: expected seconds.
        num_unique_tokens: prompt tokens of all waiting prompts, each shared prefix counted once.
    """

    is_waiting: NDArray[np.bool_]
    outputs: Moments
    compute_s: Floats
    memory_s: Floats
    num_unique_tokens: float

    @property
    def density(self) -> float:
        return float(self.compute_s.sum() / self.memory_s.sum())

    @property
    def is_compute_bound(self) -> NDArray[np.bool_]:
        """The waiting prompts that are denser than all of them together."""
        return self.is_waiting & (self.compute_s >= self.density * self.memory_s)


def forecast(
    tree: PrefixTree,
    resources: ResourceModel,
    is_waiting: NDArray[np.bool_],
    outputs: Moments,
    num_choices: Floats | float = 1.0,
) -> Forecast:
    """
    Args:
        outputs: of each choice of a prompt.
        num_choices: outputs of each prompt.
    """
    num_sharing = tree.counts(is_waiting)
    start, end = tree.parent_depth.astype(np.float64), tree.depth.astype(np.float64)
    own_start = end[tree.leaf_parent]
    num_tokens = tree.num_tokens.astype(np.float64)
    prefix_s = tree.shares(resources.prefill_s(start, end), num_sharing)
    prefix_tokens = tree.shares(end - start, num_sharing)
    own_s = resources.prefill_s(own_start, num_tokens) + resources.token_s * num_choices * outputs.mean
    unique_tokens = prefix_tokens + num_tokens - own_start
    memory_s = num_choices * resources.expected_memory_s(num_tokens, outputs.mean, outputs.square)
    return Forecast(
        is_waiting,
        outputs,
        np.where(is_waiting, prefix_s + own_s, 0.0),
        np.where(is_waiting, memory_s, 0.0),
        float(unique_tokens[is_waiting].sum()),
    )


def blend_order(tree: PrefixTree, costs: Forecast) -> Ints:
    """Compute-bound requests first, memory-bound ones last, those with a shared prefix together.

    The tree is split in two where that costs little sharing: one of requests denser than the pool, one of the
    others. Each is sorted layer by layer.
    """
    is_dense = dense_side(tree, costs)
    return np.concatenate(
        (
            layer_sort(tree, costs, costs.is_waiting & is_dense),
            layer_sort(tree, costs, costs.is_waiting & ~is_dense),
        )
    )


def layer_sort(tree: PrefixTree, costs: Forecast, chosen: NDArray[np.bool_]) -> Ints:
    """Algorithm 1 on the chosen prompts: depth first, the children of every node by descending density."""
    num_nodes, leaves = len(tree.depth), np.flatnonzero(chosen)
    count = tree.counts(chosen)
    compute_s = tree.sums(np.where(chosen, costs.compute_s, 0.0))
    memory_s = tree.sums(np.where(chosen, costs.memory_s, 0.0))
    nodes = np.flatnonzero(count > 0)
    nodes = nodes[nodes > 0]
    parent = np.concatenate((tree.parent[nodes], tree.leaf_parent[leaves]))
    density = np.concatenate(
        (compute_s[nodes] / memory_s[nodes], costs.compute_s[leaves] / costs.memory_s[leaves])
    )
    first = np.concatenate((tree.low[nodes], leaves))
    size = np.concatenate((count[nodes], np.ones(len(leaves), np.int64)))
    order = np.lexsort((first, -density, parent))
    before = np.cumsum(size[order]) - size[order]  # prompts before each child among the children of all nodes
    is_eldest = np.diff(parent[order], prepend=-1) != 0
    offset = np.empty(len(order), np.int64)
    offset[order] = before - np.maximum.accumulate(np.where(is_eldest, before, 0))
    node_offset = np.zeros(num_nodes, np.int64)
    node_offset[nodes] = offset[: len(nodes)]
    position = tree.path_sums(node_offset)[tree.leaf_parent[leaves]] + offset[len(nodes) :]
    sequence = np.empty(len(leaves), np.int64)
    sequence[position] = leaves
    return sequence


def dense_side(tree: PrefixTree, costs: Forecast) -> NDArray[np.bool_]:
    """Which side of the pool's density each prompt is put on (instead of algorithm 2).

    At a node that is split, each child goes to the side of its own density, and the node's prefix is
    computed on both sides. Below a node that is not split, all prompts stay together. The root is split,
    which costs nothing. Then the nodes whose split moves the most work for each token computed again are
    split, until what that gives up of the sharing reaches ``SHARING_LOSS_FRAC``.
    """
    # Positive for a prompt with more compute than the pool's density allows for its memory time.
    surplus_s = costs.compute_s - costs.density * costs.memory_s
    surplus_s[np.abs(surplus_s) <= ROUNDING * costs.compute_s] = 0.0
    node_surplus_s = tree.sums(surplus_s)
    num_nodes = len(tree.depth)
    parent = np.concatenate((tree.parent[1:], tree.leaf_parent))
    of_children_s = np.concatenate((node_surplus_s[1:], surplus_s))
    dense_s = np.bincount(parent, np.maximum(of_children_s, 0.0), num_nodes)
    sparse_s = np.bincount(parent, np.maximum(-of_children_s, 0.0), num_nodes)
    misplaced_s = np.minimum(dense_s, sparse_s)  # what stays on the wrong side where the node is not split
    is_split = tree.depth == 0
    candidates = np.flatnonzero((misplaced_s > 0) & ~is_split)
    gain = misplaced_s[candidates] / tree.depth[candidates]
    candidates = candidates[np.argsort(-gain, kind="stable")]
    num_tokens = float(tree.num_tokens[costs.is_waiting].sum())
    budget = SHARING_LOSS_FRAC * (num_tokens - costs.num_unique_tokens)
    is_split[candidates[np.cumsum(tree.depth[candidates]) <= budget]] = True
    return _sides(tree, is_split, node_surplus_s, surplus_s)


def _sides(
    tree: PrefixTree, is_split: NDArray[np.bool_], node_surplus_s: Floats, surplus_s: Floats
) -> NDArray[np.bool_]:
    """Each prompt's side: that of the child through which its path leaves its deepest split node."""
    # The parent of such a child is split, and the child itself is not, or is the prompt.
    is_child = is_split[tree.parent]
    child = tree.nearest(is_child | is_split)[tree.leaf_parent]
    return np.where(is_split[child], surplus_s, node_surplus_s[child]) >= 0


def batchllm_order(tree: PrefixTree, costs: Forecast) -> tuple[Ints, Floats]:
    """Groups of a common prefix, those with the larger ratio of decode to prefill tokens first.

    A group is the subtree of a node. Nodes are chosen so that the tokens saved are the most that sharing one
    prefix a group can save.

    Returns: prompts in order, and minus the ratio of each one's group.
    """
    waiting = np.flatnonzero(costs.is_waiting)
    group = _prefix_groups(tree, tree.counts(costs.is_waiting))
    of_leaf = group[tree.leaf_parent[waiting]]
    # A prompt of no group is one by itself: numbered after the nodes.
    label = np.where(of_leaf > 0, of_leaf, len(tree.depth) + waiting)
    _, index = np.unique(label, return_inverse=True)
    start = tree.depth[of_leaf]
    prefix = np.bincount(index, start) / np.bincount(index)
    prefill = np.bincount(index, tree.num_tokens[waiting] - start) + prefix  # the prefix once
    ratio = (np.bincount(index, costs.outputs.mean[waiting]) / prefill)[index]
    order = np.lexsort((waiting, tree.low[of_leaf], -ratio))
    return waiting[order], -ratio[order]


def _prefix_groups(tree: PrefixTree, count: Ints) -> Ints:
    """Of each node, the node whose subtree is its group; 0 where its prompts share no prefix of a group."""
    saved = (tree.depth * np.maximum(count - 1, 0)).astype(np.float64)
    below = np.zeros(len(saved))  # the most that groups inside can save
    levels = tree.levels()
    for nodes in reversed(levels[1:]):
        np.add.at(below, tree.parent[nodes], np.maximum(saved[nodes], below[nodes]))
    group = np.zeros(len(saved), np.int64)
    for nodes in levels[1:]:
        inherited = group[tree.parent[nodes]]
        is_chosen = (saved[nodes] >= below[nodes]) & (saved[nodes] > 0)
        group[nodes] = np.where(inherited > 0, inherited, np.where(is_chosen, nodes, 0))
    return group
