"""Orders of the waiting prompts of a tree."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backfill.blending.estimates import Moments
from backfill.blending.order import (
    SHARING_LOSS_FRAC,
    Forecast,
    batchllm_order,
    blend_order,
    dense_side,
    forecast,
    layer_sort,
)
from backfill.blending.requests import TOKEN_BYTES
from backfill.blending.resources import Floats
from backfill.blending.tree import PrefixTree
from tests.blending.builders import LLAMA_8B_ON_A100, make_tree, num_shared, prompts, sorted_prompts

pools = st.lists(st.tuples(prompts, st.sampled_from([1, 10, 300, 20_000])), min_size=1, max_size=40)


def costs_of(tree: PrefixTree, outputs: list[int], waits: list[bool] | None = None) -> Forecast:
    mean = np.array(outputs, np.float64)
    is_waiting = np.array(waits or [True] * len(outputs))
    return forecast(tree, LLAMA_8B_ON_A100, is_waiting, Moments(mean, mean * mean))


def costs_of_pool(pool: list[tuple[list[int], int]]) -> tuple[PrefixTree, Forecast]:
    pool = sorted(pool, key=lambda request: sorted_prompts([request[0]]))
    tree = make_tree([prompt for prompt, _ in pool])
    return tree, costs_of(tree, [output for _, output in pool])


def densities(tree: PrefixTree, costs: Forecast) -> Floats:
    return tree.sums(costs.compute_s) / tree.sums(costs.memory_s)


def computed_tokens(sequence: list[int], prompts_: list[bytes]) -> int:
    """Prompt tokens computed with a cache of the last prompt's path alone."""
    in_order = [prompts_[index] for index in sequence]
    pairs = itertools.pairwise([b"", *in_order])
    return sum(len(prompt) // TOKEN_BYTES - num_shared(before, prompt) for before, prompt in pairs)


@given(pools)
def test_the_parts_of_a_pool_cost_what_the_whole_does(pool: list[tuple[list[int], int]]) -> None:
    tree, costs = costs_of_pool(pool)
    edges_s = LLAMA_8B_ON_A100.prefill_s(
        tree.parent_depth.astype(np.float64), tree.depth.astype(np.float64)
    ).sum()
    own = [
        LLAMA_8B_ON_A100.compute_s(float(p), float(d), float(shared))
        for p, d, shared in zip(
            tree.num_tokens, costs.outputs.mean, tree.depth[tree.leaf_parent], strict=True
        )
    ]
    assert costs.compute_s.sum() == pytest.approx(edges_s + sum(own))


@given(pools)
def test_layer_sort_keeps_subtrees_together_and_sorts_siblings(pool: list[tuple[list[int], int]]) -> None:
    tree, costs = costs_of_pool(pool)
    sequence = layer_sort(tree, costs, costs.is_waiting)
    assert sorted(sequence) == list(range(len(pool)))
    place = np.argsort(sequence)
    node_density = densities(tree, costs)
    children: dict[int, list[tuple[int, float]]] = {}
    for node, (low, high) in enumerate(zip(tree.low, tree.high, strict=True)):
        places = place[low:high]
        assert places.max() - places.min() == high - low - 1
        if node:
            children.setdefault(tree.parent[node], []).append((places.min(), node_density[node]))
    for leaf, parent in enumerate(tree.leaf_parent):
        density = costs.compute_s[leaf] / costs.memory_s[leaf]
        children.setdefault(parent, []).append((place[leaf], density))
    for of_node in children.values():
        in_order = [density for _, density in sorted(of_node)]
        assert in_order == pytest.approx(sorted(in_order, reverse=True), rel=1e-6)


@given(pools, st.data())
def test_the_blend_has_each_waiting_prompt_once_and_keeps_sharing(
    pool: list[tuple[list[int], int]], data: st.DataObject
) -> None:
    pool = sorted(pool, key=lambda request: sorted_prompts([request[0]]))
    waits = data.draw(st.lists(st.booleans(), min_size=len(pool), max_size=len(pool)))
    waits[0] = True
    tree = make_tree([prompt for prompt, _ in pool])
    costs = costs_of(tree, [output for _, output in pool], waits)
    sequence = blend_order(tree, costs).tolist()
    assert sorted(sequence) == [index for index, waiting in enumerate(waits) if waiting]
    num_tokens = sum(len(prompt) for (prompt, _), waiting in zip(pool, waits, strict=True) if waiting)
    saved = num_tokens - costs.num_unique_tokens
    computed = computed_tokens(sequence, [sorted_prompts([prompt])[0] for prompt, _ in pool])
    assert computed <= costs.num_unique_tokens + SHARING_LOSS_FRAC * saved + 1e-6


def test_an_outlier_leaves_its_subtree_where_that_costs_little() -> None:
    """Request #2 of figure 4: memory-bound, among compute-bound ones of the same prefix."""
    short = [[1, 1, *range(10, 1000)], [1, 3, *range(10, 1000)]]
    other = [[2, i, *range(10, 20)] for i in range(3)]
    shared = [[3, *range(10, 2000), i] for i in range(3)]
    tree = make_tree([short[0], [1, 2, *range(10)], short[1], *other, *shared])
    costs = costs_of(tree, [10, 8000, 10, 4000, 4000, 4000, 10, 10, 10])
    sequence = blend_order(tree, costs).tolist()
    assert sequence.index(1) > max(sequence.index(0), sequence.index(2)) + 1
    assert set(sequence[:5]) == {0, 2, 6, 7, 8}


def test_a_long_shared_prefix_is_not_computed_twice_for_an_outlier() -> None:
    tree = make_tree([[1, *range(1000), i] for i in range(3)] + [[2, i] for i in range(3)])
    costs = costs_of(tree, [10, 8000, 10, 1, 1, 1])
    is_dense = dense_side(tree, costs)
    assert len(set(is_dense[:3])) == 1


def test_batchllm_serves_groups_by_their_ratio_of_decode_to_prefill() -> None:
    prompts_ = [[1, *range(50), i] for i in range(4)] + [[2, *range(80), i] for i in range(3)] + [[3, 3, 3]]
    tree = make_tree(prompts_)
    sequence, keys = batchllm_order(tree, costs_of(tree, [10, 10, 10, 10, 90, 1, 90, 2]))
    assert sequence.tolist() == [4, 5, 6, 0, 1, 2, 3, 7]
    ratios = [181 / (81 + 3)] * 3 + [40 / (51 + 4)] * 4 + [2 / 3]
    assert keys.tolist() == pytest.approx([-ratio for ratio in ratios])


def test_batchllm_groups_by_the_prefix_that_saves_most() -> None:
    """A token that all share saves less than the long prefixes of its two halves."""
    prompts_ = [[9, 1, *range(50), i] for i in range(3)] + [[9, 2, *range(50), i] for i in range(3)]
    tree = make_tree(prompts_)
    _, keys = batchllm_order(tree, costs_of(tree, [1, 1, 1, 50, 50, 50]))
    assert len(set(np.round(keys, 9))) == 2


@given(pools)
def test_batchllm_has_each_prompt_once(pool: list[tuple[list[int], int]]) -> None:
    tree, costs = costs_of_pool(pool)
    sequence, keys = batchllm_order(tree, costs)
    assert sorted(sequence) == list(range(len(pool)))
    assert (np.diff(keys) >= 0).all()
