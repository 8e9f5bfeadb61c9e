"""The blend that the dual scanner keeps, against the two equations of section 3.4."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from backfill.blending.scanner import MOST_PASSED, Cursor
from backfill.blending.waiting import Waiting
from tests.blending.builders import LLAMA_8B_ON_A100, as_bytes, known, make_pool, take
from tests.shared import examples

MODEL = LLAMA_8B_ON_A100


def density_of(num_prompt_tokens: int, num_output_tokens: int) -> float:
    compute_s = MODEL.compute_s(num_prompt_tokens, num_output_tokens)
    return compute_s / MODEL.memory_s(num_prompt_tokens, num_output_tokens)


def test_memory_is_partitioned_as_in_figure_5() -> None:
    """(512, 256) and (256, 16384), of 60 GB for KV at 128 KiB a token: 19.3 and 40.7 GB at density 1.27."""
    target, dense, sparse = 1.27, density_of(512, 256), density_of(256, 16384)
    memory = MODEL.memory_s(512, 256), MODEL.memory_s(256, 16384)
    num_sparse = 100
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
