"""The tree in arrays against the prompts themselves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backfill.blending.tree import PrefixTree, shared_prefix_tokens
from backfill.blending.waiting import Waiting
from tests.blending.builders import as_bytes, make_tree, num_shared, prompts, sorted_prompts

pools = st.lists(prompts, min_size=1, max_size=40)


@given(prompts, prompts, st.integers(0, 600))
def test_shared_prefixes_are_counted_in_tokens(a: list[int], b: list[int], num_common: int) -> None:
    common = [7] * num_common
    x, y = as_bytes(common + a), as_bytes(common + b)
    assert shared_prefix_tokens(x, y) == num_shared(x, y)


def test_tokens_that_differ_in_one_byte_are_not_shared() -> None:
    for byte in range(4):
        assert shared_prefix_tokens(as_bytes([5, 0]), as_bytes([5, 1 << (8 * byte)])) == 1


@given(pools)
def test_nodes_are_the_prefixes_at_which_prompts_part(token_ids: list[list[int]]) -> None:
    """Each node's prompts are all that begin with its prefix; each prefix at which two part is one node."""
    sorted_ = sorted_prompts(token_ids)
    tree = make_tree(token_ids)
    found = set()
    for node, (depth, low, high) in enumerate(zip(tree.depth, tree.low, tree.high, strict=True)):
        prefix = sorted_[low][: 4 * depth]
        assert [p.startswith(prefix) for p in sorted_] == [low <= i < high for i in range(len(sorted_))]
        parent = tree.parent[node]
        assert tree.low[parent] <= low and high <= tree.high[parent]
        assert node == 0 or tree.depth[parent] < depth
        found.add(prefix)
    parting = {b""} | {a[: 4 * num_shared(a, b)] for i, a in enumerate(sorted_) for b in sorted_[:i]}
    assert found == parting
    assert len(found) == len(tree.depth)


@given(pools)
def test_a_prompt_hangs_from_its_deepest_node(token_ids: list[list[int]]) -> None:
    tree = make_tree(token_ids)
    for index, parent in enumerate(tree.leaf_parent):
        below = (tree.low <= index) & (index < tree.high)
        assert tree.depth[parent] == tree.depth[below].max()
        assert tree.low[parent] <= index < tree.high[parent]


@given(pools, st.data())
def test_edges_of_waiting_prompts_are_their_distinct_prefixes(
    token_ids: list[list[int]], data: st.DataObject
) -> None:
    """What the waiting prompts are charged for edges, each shared equally, is the size of their own tree."""
    sorted_ = sorted_prompts(token_ids)
    tree = PrefixTree.build(sorted_)
    flags = data.draw(st.lists(st.booleans(), min_size=len(sorted_), max_size=len(sorted_)))
    waits = np.array(flags)
    edges = (tree.depth - tree.parent_depth).astype(np.float64)
    charged = tree.shares(edges, tree.counts(waits)) + tree.num_tokens - tree.depth[tree.leaf_parent]
    prefixes = [p[: 4 * n] for p, waiting in zip(sorted_, flags, strict=True) if waiting for n in range(1, 7)]
    distinct = {prefix for prefix in prefixes if prefix}
    duplicates = len([p for p, waiting in zip(sorted_, flags, strict=True) if waiting])
    assert charged[waits].sum() == pytest.approx(len(distinct)) or duplicates == 0


@given(pools, st.data())
def test_sums_and_paths(token_ids: list[list[int]], data: st.DataObject) -> None:
    tree = make_tree(token_ids)
    num = len(tree.num_tokens)
    values = np.array(data.draw(st.lists(st.integers(0, 9), min_size=num, max_size=num)))
    for node, total in enumerate(tree.sums(values)):
        assert total == values[tree.low[node] : tree.high[node]].sum()
    edges = tree.depth - tree.parent_depth
    assert tree.path_sums(edges).tolist() == tree.depth.tolist()
    has = np.array(data.draw(st.lists(st.booleans(), min_size=len(edges), max_size=len(edges))))
    for node, nearest in enumerate(tree.nearest(has)):
        while not has[node] and node != 0:
            node = tree.parent[node]  # noqa: PLW2901
        assert nearest == node
    order = np.concatenate(tree.levels())
    assert sorted(order) == list(range(len(edges)))
    place = np.argsort(order)
    assert (place[tree.parent[1:]] < place[1:]).all()


def test_a_chain_of_prompts_that_extend_each_other() -> None:
    tree = make_tree([[1] * n for n in range(1, 2000)])
    assert len(tree.depth) == 1999
    assert tree.path_sums(np.ones(1999, np.int64)).max() == 1998


@given(st.lists(prompts, min_size=1, max_size=30), st.data())
def test_the_longest_shared_prefix_is_found_among_those_that_wait(
    token_ids: list[list[int]], data: st.DataObject
) -> None:
    sorted_ = sorted_prompts(token_ids)
    flags = data.draw(st.lists(st.booleans(), min_size=len(sorted_), max_size=len(sorted_)))
    waiting = Waiting(sorted_, np.array(flags))
    left = {index for index, waits in enumerate(flags) if waits}
    for index in data.draw(st.permutations(sorted(left))):
        waiting.remove(index)
        left.remove(index)
        assert waiting.count == len(left)
        assert set(np.flatnonzero(waiting.mask)) == left == {i for i in range(len(sorted_)) if i in waiting}
        for prompt in (sorted_[index], as_bytes(data.draw(prompts))):
            expected = max((num_shared(prompt, sorted_[other]) for other in left), default=0)
            assert waiting.longest_shared(prompt) == expected
