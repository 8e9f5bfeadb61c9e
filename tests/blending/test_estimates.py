"""Output lengths by subtree (section 3.2)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backfill.blending.estimates import (
    PRIOR_OUTPUT_TOKENS,
    Lengths,
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
    so_far: list[int] | None = None,
    weight: list[float] | None = None,
) -> Moments:
    lengths = Lengths(
        finished=np.array(observed),
        so_far=np.array(so_far or [0] * 6),
        known=np.array(known or [0] * 6),
        limit=np.array(limit or [10_000] * 6),
        weight=np.array(weight or [1.0] * 6),
    )
    return output_moments(make_tree(QUESTIONS), lengths, history or OutputHistory())


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


def test_requests_in_flight_count_with_what_they_have_generated() -> None:
    """One ended after 10 tokens and two run on after 100: 210 tokens for each that ends."""
    outputs = estimate([0, 0, 10, 0, 0, 0], so_far=[0, 0, 0, 100, 100, 0])
    assert outputs.mean[[0, 2, 5]].tolist() == [210] * 3
    assert outputs.mean[[3, 4]].tolist() == [310, 310]
    assert outputs.square[3] > 310**2


def test_a_finished_request_may_stand_for_several() -> None:
    weight = [1.0, 1.0, 3.0, 1.0, 1.0, 1.0]
    outputs = estimate([0, 0, 10, 0, 0, 0], so_far=[0, 0, 0, 100, 100, 0], weight=weight)
    assert outputs.mean[0] == pytest.approx((3 * 10 + 200) / 3)


def test_exponential_lengths_are_estimated_from_the_first_that_end() -> None:
    """Ten thousand of mean 500 are watched for 100 tokens; those that end by then have a mean of 48."""
    rng = np.random.default_rng(1)
    drawn = np.maximum(rng.exponential(500, 10_000).astype(np.int64), 1)
    tree = make_tree([[1, i] for i in range(len(drawn))])
    ended, zeros = drawn <= 100, np.zeros(len(drawn), np.int64)
    lengths = Lengths(
        np.where(ended, drawn, 0),
        np.where(ended, 0, 100),
        zeros,
        np.full(len(drawn), 100_000),
        np.ones(len(drawn)),
    )
    outputs = output_moments(tree, lengths, OutputHistory())
    some = int(np.flatnonzero(ended)[0])
    assert drawn[ended].mean() < 50
    assert outputs.mean[some] == pytest.approx(500, rel=0.05)
    assert outputs.square[some] == pytest.approx(2 * 500**2, rel=0.1)
    assert outputs.mean[int(np.flatnonzero(~ended)[0])] == pytest.approx(600, rel=0.05)


def test_an_estimate_keeps_to_the_most_output_tokens() -> None:
    outputs = estimate([1000, 0, 0, 0, 0, 0], limit=[1000, 10, 1, 10, 10, 10])
    assert outputs.mean.tolist() == [1000, 10, 1, 10, 10, 10]
    assert outputs.square.tolist() == [1000**2, 100, 1, 100, 100, 100]


@given(
    st.lists(st.integers(0, 5000), min_size=6, max_size=6),
    st.lists(st.integers(1, 5000), min_size=6, max_size=6),
    st.lists(st.integers(0, 5000), min_size=6, max_size=6),
)
def test_moments_are_those_of_a_length_within_the_limit(
    observed: list[int], limit: list[int], so_far: list[int]
) -> None:
    running = [0 if ended else tokens for ended, tokens in zip(observed, so_far, strict=True)]
    mean, square = estimate(observed, limit=limit, so_far=running)
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
