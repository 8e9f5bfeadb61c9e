"""A pool split among devices (section 6.1)."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backfill.blending.requests import PoolRequest
from backfill.blending.split import split_requests
from backfill.core.errors import ConfigError, RequestError
from tests.blending.builders import LLAMA_8B_ON_A100, known, make_request, num_shared, prompts
from tests.shared import examples

MODEL = LLAMA_8B_ON_A100


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


def test_errors() -> None:
    with pytest.raises(ConfigError, match="shards"):
        split_requests([], 0, MODEL)
    with pytest.raises(RequestError, match="unique"):
        split_requests([make_request(1), make_request(1)], 2, MODEL)
    assert split_requests([], 3, MODEL) == [[], [], []]
