"""Orders of waiting prompts: of one tree, as the dual scanner keeps them, and of a pool that is divided."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import assume, given, settings
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
from backfill.blending.requests import TOKEN_BYTES, PoolRequest
from backfill.blending.resources import Floats
from backfill.blending.scanner import MOST_PASSED, Cursor
from backfill.blending.split import CUT_LOSS_FRAC, MOST_PAIRS, split_requests
from backfill.blending.tree import PrefixTree
from backfill.blending.waiting import Waiting
from backfill.core.errors import ConfigError, RequestError
from tests.blending.builders import (
    LLAMA_8B_ON_A100,
    as_bytes,
    known,
    make_pool,
    make_request,
    make_tree,
    num_shared,
    prompts,
    sorted_prompts,
    take,
)
from tests.shared import examples

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


MODEL = LLAMA_8B_ON_A100


def density_of(num_prompt_tokens: int, num_output_tokens: int) -> float:
    compute_s = MODEL.compute_s(num_prompt_tokens, num_output_tokens)
    return compute_s / MODEL.memory_s(num_prompt_tokens, num_output_tokens)


def test_memory_is_partitioned_as_in_figure_5() -> None:
    """(512, 256) and (256, 16384), of 60 GB for KV at 128 KiB a token: 19.3 and 40.7 GB at density 1.27."""
    target, dense, sparse = 1.27, density_of(512, 256), density_of(256, 16384)
    memory = MODEL.memory_s(512, 256), MODEL.memory_s(256, 16384)
    num_sparse = 50
    num_dense = round(num_sparse * memory[1] * (target - sparse) / (memory[0] * (dense - target)))
    requests = [known(i, 512, 256) for i in range(num_dense)]
    requests += [known(num_dense + i, 256, 16384) for i in range(num_sparse)]
    pool = make_pool()
    pool.add(requests)
    left = right = 0.0  # mean KV tokens of either kind in flight
    while left + right < 60e9 / (128 * 1024):
        if take(pool).request_id < num_dense:
            left += 512 + 256 / 2
        else:
            right += 256 + 16384 / 2
    total = left + right
    assert left * dense + right * sparse == pytest.approx(total * target, rel=0.03)
    assert left / total * 60 == pytest.approx(19.3, abs=0.7)
    assert right / total * 60 == pytest.approx(40.7, abs=0.7)


lengths = st.tuples(st.integers(10, 2000), st.integers(1, 3000))


@settings(max_examples=examples(15))
@given(lengths, lengths, st.integers(5, 50), st.integers(5, 50))
def test_each_request_brings_those_in_flight_nearer_to_the_density(
    dense: tuple[int, int], sparse: tuple[int, int], num_dense: int, num_sparse: int
) -> None:
    if density_of(*dense) < density_of(*sparse):
        dense, sparse = sparse, dense
    assume(density_of(*dense) > 1.01 * density_of(*sparse))
    requests = [known(i, *dense) for i in range(num_dense)]
    requests += [known(num_dense + i, *sparse) for i in range(num_sparse)]
    pool = make_pool()
    pool.add(requests)
    left = {True: num_dense, False: num_sparse}
    compute = memory = 0.0
    while all(left.values()):
        missing = pool.density * memory - compute
        is_dense = take(pool).request_id < num_dense
        assert is_dense == (missing >= 0) or abs(missing) < 1e-9 * compute
        left[is_dense] -= 1
        kind = dense if is_dense else sparse
        compute += MODEL.compute_s(*kind) / kind[1]
        memory += MODEL.memory_s(*kind) / kind[1]


def test_a_pool_of_one_kind_is_served_from_either_end() -> None:
    """Both pointers are in one unit, and densities are equal: there is no partition, and all is served."""
    pool = make_pool()
    pool.add([known(i, 100, 100) for i in range(10)])
    assert {take(pool).request_id for _ in range(10)} == set(range(10))
    assert pool.take() is None


def test_both_ends_meet() -> None:
    cursor_prompts = [as_bytes([i]) for i in range(5)]
    waiting = Waiting(cursor_prompts, np.ones(5, np.bool_))
    cursor = Cursor(np.array([4, 2, 0, 1, 3]), np.arange(5.0), np.ones(5), waiting)
    assert cursor.first() == (0.0, 4)
    assert cursor.last() == (4.0, 3)
    for index in (4, 3, 0):
        waiting.remove(index)
    assert cursor.first() == (1.0, 2)
    assert cursor.last() == (3.0, 1)
    waiting.remove(2)
    assert cursor.first() == cursor.last() == (3.0, 1)
    waiting.remove(1)
    assert cursor.first() is None
    assert cursor.last() is None


def test_the_last_one_of_few_output_tokens() -> None:
    waiting = Waiting([as_bytes([i]) for i in range(4)], np.ones(4, np.bool_))
    cursor = Cursor(np.arange(4), np.arange(4.0), np.array([2.0, 50.0, 5.0, 100.0]), waiting)
    assert cursor.last(100.0) == (3.0, 3)
    assert cursor.last(99.0) == (2.0, 2)
    waiting.remove(2)
    assert cursor.last(49.0) == (0.0, 0)
    assert cursor.last(1.0) is None
    assert cursor.last() == (3.0, 3)
    assert cursor.first() == (0.0, 0)


def test_many_that_left_behind_a_long_one_do_not_hide_those_that_wait() -> None:
    num = 3 * MOST_PASSED
    waiting = Waiting([as_bytes([i]) for i in range(num)], np.ones(num, np.bool_))
    output_tokens = np.full(num, 10.0)
    output_tokens[-1] = 1000.0
    cursor = Cursor(np.arange(num), np.arange(float(num)), output_tokens, waiting)
    for expected in range(num - 2, -1, -1):
        assert cursor.last(10.0) == (float(expected), expected)
        assert cursor.first() == (0.0, 0)
        waiting.remove(expected)
    assert cursor.last(10.0) is None
    assert cursor.last() == cursor.first() == (num - 1.0, num - 1)


def costs(request: PoolRequest) -> tuple[float, float]:
    num = len(request.prompt_token_ids), request.max_output_tokens
    return MODEL.compute_s(*num), MODEL.memory_s(*num)


@settings(deadline=None)
@given(st.lists(st.tuples(prompts, st.integers(1, 500)), max_size=40), st.integers(1, 6))
def test_each_request_is_in_one_shard(pool: list[tuple[list[int], int]], num_shards: int) -> None:
    requests = [make_request(7 * i, prompt, most) for i, (prompt, most) in enumerate(pool)]
    shards = split_requests(requests, num_shards, MODEL)
    assert len(shards) == num_shards
    assert all(shard == sorted(shard) for shard in shards)
    assert sorted(itertools.chain.from_iterable(shards)) == [7 * i for i in range(len(pool))]
    assert shards == split_requests(requests, num_shards, MODEL)


@settings(deadline=None, max_examples=examples(50))
@given(
    st.lists(st.tuples(st.integers(1, 2000), st.integers(1, 3000)), min_size=1, max_size=60),
    st.integers(1, 6),
)
def test_shards_have_equal_compute_and_memory_time(lengths: list[tuple[int, int]], num_shards: int) -> None:
    requests = [known(i, *pair) for i, pair in enumerate(lengths)]
    shards = split_requests(requests, num_shards, MODEL)
    for resource in range(2):
        each = [costs(request)[resource] for request in requests]
        for shard in shards:
            total = sum(each[i] for i in shard)
            assert total == pytest.approx(sum(each) / num_shards, abs=4 * max(each))


def test_few_prefixes_are_computed_by_two_shards() -> None:
    """50 prefixes of 20 requests each on 4 shards: at most two cuts a shard, each through one prefix."""
    requests = [make_request(i, [i % 50, *range(200), i], 50 * (1 + i % 50)) for i in range(1000)]
    shards = split_requests(requests, 4, MODEL)
    num_prefixes = sum(len({i % 50 for i in shard}) for shard in shards)
    assert num_prefixes <= 50 + 2 * 4
    assert num_shared(requests[0].prompt_token_ids, requests[50].prompt_token_ids) == 201  # type: ignore[arg-type]


def test_shards_have_a_share_of_all_that_begins_alike() -> None:
    """What is expected of prompts that begin alike may be wrong, and is so in all shards."""
    outputs = [round(4 * 1.2**task) for task in range(32)]
    rng = random.Random(3)
    requests = [
        make_request(i, [i % 32, *range(1000 * i, 1000 * i + rng.randint(100, 140))], 1000)
        for i in range(32 * 40)
    ]

    def spread(most_pairs: int) -> float:
        shards = split_requests(requests, 4, MODEL, most_pairs=most_pairs)
        sums = [sum(outputs[i % 32] for i in shard) for shard in shards]
        return max(sums) / min(sums)

    assert spread(MOST_PAIRS) < 1.5
    assert spread(1) > 3


def test_cuts_compute_few_prompt_tokens_again() -> None:
    """Long documents with a few questions each: blocks of few requests would cut most of them."""
    requests = [make_request(i, [i % 200, *range(500), 1000 + i], 100) for i in range(200 * 8)]
    shards = split_requests(requests, 4, MODEL)
    num_documents = sum(len({i % 200 for i in shard}) for shard in shards)
    assert 200 < num_documents <= 200 * (1 + CUT_LOSS_FRAC) + 2 * 4


def test_errors() -> None:
    with pytest.raises(ConfigError, match="shards"):
        split_requests([], 0, MODEL)
    with pytest.raises(RequestError, match="unique"):
        split_requests([make_request(1), make_request(1)], 2, MODEL)
    assert split_requests([], 3, MODEL) == [[], [], []]
