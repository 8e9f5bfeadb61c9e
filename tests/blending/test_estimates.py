"""Output lengths by subtree (section 3.2)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backfill.blending.estimates import (
    PRIOR_OUTPUT_TOKENS,
    Moments,
    OutputHistory,
    choose_samples,
    output_moments,
)
from tests.blending.builders import make_tree, prompts

# Sorted: two questions about 1, three about 2, one about 3.
QUESTIONS = [[1, 1], [1, 2], [2, 1], [2, 2], [2, 3], [3, 1]]


def estimate(
    observed: list[int],
    known: list[int] | None = None,
    limit: list[int] | None = None,
    history: OutputHistory | None = None,
) -> Moments:
    return output_moments(
        make_tree(QUESTIONS),
        np.array(observed),
        np.array(known or [0] * 6),
        np.array(limit or [10_000] * 6),
        history or OutputHistory(),
    )


def test_a_subtree_has_the_average_of_its_own() -> None:
    outputs = estimate([2, 0, 100, 200, 0, 0])
    assert outputs.mean[1] == 2
    assert outputs.mean[4] == 150
    assert outputs.square[4] == (100**2 + 200**2) / 2


def test_a_subtree_without_any_has_that_of_its_siblings() -> None:
    outputs = estimate([0, 0, 100, 200, 0, 0])
    assert outputs.mean.tolist() == [150] * 6


def test_without_any_all_are_as_those_that_finished_before_or_as_the_prior() -> None:
    assert estimate([0] * 6).mean.tolist() == [PRIOR_OUTPUT_TOKENS] * 6
    history = OutputHistory()
    history.add(10)
    history.add(30)
    outputs = estimate([0] * 6, history=history)
    assert outputs.mean.tolist() == [20] * 6
    assert outputs.square.tolist() == [500] * 6


def test_a_known_length_is_exact_and_says_nothing_about_others() -> None:
    outputs = estimate([0, 8, 0, 0, 0, 0], known=[5000, 0, 0, 0, 0, 0])
    assert outputs.mean[0] == 5000
    assert outputs.square[0] == 5000**2
    assert outputs.mean[1] == 8


def test_an_estimate_keeps_to_the_most_output_tokens() -> None:
    outputs = estimate([1000, 0, 0, 0, 0, 0], limit=[1000, 10, 1, 10, 10, 10])
    assert outputs.mean.tolist() == [1000, 10, 1, 10, 10, 10]
    assert outputs.square.tolist() == [1000**2, 100, 1, 100, 100, 100]


@given(
    st.lists(st.integers(0, 5000), min_size=6, max_size=6),
    st.lists(st.integers(1, 5000), min_size=6, max_size=6),
)
def test_moments_are_those_of_a_length_within_the_limit(observed: list[int], limit: list[int]) -> None:
    mean, square = estimate(observed, limit=limit)
    most = np.array(limit)
    assert (mean >= 1).all() and (mean <= most).all()
    assert (square >= mean**2 * (1 - 1e-12)).all() and (square <= mean * most * (1 + 1e-12)).all()


@given(st.lists(prompts, max_size=30), st.floats(0, 1), st.floats(0, 0.999))
def test_samples_are_evenly_spread(token_ids: list[list[int]], share: float, phase: float) -> None:
    """Any stretch of prompts of unknown length has its share of them, to within one."""
    is_unknown = [bool(prompt[0]) for prompt in token_ids]
    chosen, phase_after = choose_samples(is_unknown, share, phase)
    assert 0 <= phase_after < 1
    assert all(is_unknown[index] for index in chosen)
    for stop in range(len(is_unknown) + 1):
        expected = phase + share * sum(is_unknown[:stop])
        assert len([i for i in chosen if i < stop]) == pytest.approx(expected, abs=1 + 1e-6)


def test_samples_go_on_where_the_last_addition_ended() -> None:
    chosen, phase = [], 0.0
    for _ in range(200):
        some, phase = choose_samples([True] * 3, 0.01, phase)
        chosen += some
    assert len(chosen) in {5, 6}
