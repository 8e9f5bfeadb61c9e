"""What is known of requests before they run: lengths by subtree, KV that they will need, resources."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backfill.blending.estimates import (
    PRIOR_OUTPUT_TOKENS,
    Lengths,
    Moments,
    OutputHistory,
    choose_samples,
    output_moments,
)
from backfill.blending.memory_forecast import MemoryForecast, reserve_frac
from backfill.blending.resources import OnlineUse, ResourceModel, Work, target_density
from backfill.core.errors import ConfigError
from tests.blending.builders import LLAMA_8B_ON_A100, make_pool, make_request, make_tree, prompts
from tests.shared import examples

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


def test_what_is_held_before_each_end_adds_up() -> None:
    """10 + 90 tokens beside 10 + 40: both hold 50 after 40 steps, and the longer one 100 in the end."""
    forecast = MemoryForecast(100, 0)
    forecast.add(0, 10, 90.0)
    assert forecast.free().most_output_tokens(10) == 40.0
    assert forecast.free().most_output_tokens(11) == 39.5
    assert forecast.free().most_output_tokens(90) == 0.0
    forecast.remove(0)
    assert forecast.free().most_output_tokens(10) == 90.0


def test_it_looks_past_the_ends_of_others() -> None:
    """After 20 steps the first one ends, and what it held is free."""
    forecast = MemoryForecast(100, 0)
    forecast.add(0, 20, 20.0)
    assert forecast.free().most_output_tokens(40) == 60.0
    assert forecast.free().most_output_tokens(42) == 19.0


def test_short_requests_are_followed_by_others() -> None:
    forecast = MemoryForecast(1000, 0)
    forecast.add(100, 100, 400.0)
    assert forecast.free().most_output_tokens(0) == 1000.0
    for number in range(4):
        forecast.add(number, 98, 4.0)
    assert forecast.free().most_output_tokens(0) == 250.0  # (1000 - 4 * 100 - 100) / 2


def test_progress_brings_the_end_nearer_and_a_corrected_expectation_moves_it() -> None:
    """After 50 of 60 tokens 40 are free: 20 + 10 fit beside its last 10, and later all does."""
    forecast = MemoryForecast(100, 0)
    forecast.add(0, 10, 60.0)
    assert forecast.free().most_output_tokens(20) == 35.0
    forecast.note_progress(0, 50)
    assert forecast.free().most_output_tokens(20) == 80.0
    assert forecast.free().most_output_tokens(22) == 9.0
    forecast.note_progress(0, 50, 80.0)
    assert forecast.free().most_output_tokens(20) == 10.0
    forecast.note_progress(1, 50)  # unknown
    forecast.remove(1)
    assert forecast.free().most_output_tokens(20) == 10.0


def test_one_that_outlives_its_expectation_may_end_at_any_step() -> None:
    forecast = MemoryForecast(100, 0)
    forecast.add(0, 10, 20.0)
    forecast.note_progress(0, 40)
    assert forecast.free().most_output_tokens(50) == 0.0
    assert forecast.free().most_output_tokens(48) == 52.0


def test_choices_share_a_prompt_and_grow_each() -> None:
    """Four choices have 20 + 4 * 10 tokens after 10 of 15 steps."""
    forecast = MemoryForecast(100, 0)
    forecast.add(0, 20, 15.0, num_choices=4)
    forecast.note_progress(0, 10)
    assert forecast.free().most_output_tokens(10) == 90.0
    assert forecast.free().most_output_tokens(20) == 4.0  # (100 - 60 - 20) / 5


def test_slack_is_of_each_output_and_online_requests_leave_the_rest() -> None:
    forecast = MemoryForecast(200, 8)
    assert forecast.free().most_output_tokens(0) == 192.0
    forecast.add(0, 10, 40.0, num_choices=2)
    forecast.online_tokens = 50
    assert forecast.offline_tokens == 150
    assert forecast.free().most_output_tokens(0) == (150 - 8 - 26) / 3
    assert forecast.free().most_output_tokens(30) == (150 - 8 - 26 - 30) / 3
    forecast.online_tokens = 300
    assert forecast.offline_tokens == 0
    assert forecast.free().most_output_tokens(0) == 0.0


def test_the_reserve_is_more_than_the_need_and_at_most_all() -> None:
    assert reserve_frac(0.0) == 0.0
    assert reserve_frac(0.4) > 0.4
    assert reserve_frac(0.9) == 1.0


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(50, 100)), min_size=1, max_size=12))
@settings(max_examples=examples(60))
def test_requests_that_are_admitted_never_hold_more_than_there_is(lengths: list[tuple[int, int]]) -> None:
    """Whatever is added as they decode, one token a step. What fits is not refused for ever."""
    capacity = 400
    forecast = MemoryForecast(capacity, 0)
    running: dict[int, int] = {}  # tokens generated
    waiting = list(enumerate(lengths))
    while running or waiting:
        while waiting:
            number, (prompt, output) = waiting[0]
            if forecast.free().most_output_tokens(prompt) < output:
                break
            waiting.pop(0)
            forecast.add(number, prompt, float(output))
            running[number] = 0
        assert running, "none runs and none fits"
        for number in list(running):
            running[number] += 1
            forecast.note_progress(number, running[number])
        assert sum(lengths[number][0] + so_far for number, so_far in running.items()) <= capacity
        for number, so_far in list(running.items()):
            if so_far == lengths[number][1]:
                forecast.remove(number)
                del running[number]


fractions = st.floats(0, 0.25)
seconds = st.floats(1000, 3000)


def density(model: ResourceModel, num_prompt_tokens: int, num_output_tokens: int) -> float:
    compute_s = model.compute_s(num_prompt_tokens, num_output_tokens)
    return compute_s / model.memory_s(num_prompt_tokens, num_output_tokens)


@pytest.mark.parametrize(("lengths", "printed"), [((512, 256), 3.73), ((256, 16384), 0.096)])
def test_densities_are_those_of_figure_5(lengths: tuple[int, int], printed: float) -> None:
    assert density(LLAMA_8B_ON_A100, *lengths) == pytest.approx(printed, rel=0.02)


def test_the_printed_formula_has_twice_the_pairs_of_causal_attention() -> None:
    p, d = 512, 256
    printed_s = ((p + d) * 8.03e9 * 2 + p**2 * 4096 * 32 * 4) / 312e12
    as_printed = replace(LLAMA_8B_ON_A100, prompt_pair_s=2 * LLAMA_8B_ON_A100.prompt_pair_s)
    assert as_printed.compute_s(p, d) == pytest.approx(printed_s, rel=1e-4)
    assert LLAMA_8B_ON_A100.memory_s(p, d) == pytest.approx((p * d + d**2 / 2) * 1024 * 32 * 4 / 2.039e12)


def test_a_shared_prefix_and_the_rest_cost_what_the_whole_prompt_does() -> None:
    model = LLAMA_8B_ON_A100
    assert model.prefill_s(0.0, 300.0) + model.compute_s(1000, 7, 300) == pytest.approx(
        model.compute_s(1000, 7)
    )


def test_memory_of_a_random_length_is_more_than_that_of_its_mean() -> None:
    model = LLAMA_8B_ON_A100
    lengths = np.array([1.0, 1.0, 4000.0])
    expected = model.expected_memory_s(100.0, float(lengths.mean()), float((lengths**2).mean()))
    assert expected == pytest.approx(np.mean([model.memory_s(100, d) for d in lengths]))
    assert expected > 1.5 * model.memory_s(100, float(lengths.mean()))


@pytest.mark.parametrize(
    ("field", "value"),
    [("token_s", 0.0), ("prompt_pair_s", -1.0), ("cached_token_s", 0.0), ("token_s", math.inf)],
)
def test_a_model_refuses_costs_that_are_none(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        replace(LLAMA_8B_ON_A100, **{field: value})


def test_dimensions_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="num_layers"):
        ResourceModel.from_dimensions(1e9, 1024, 256, 0, 1e12, 1e12)
    with pytest.raises(ConfigError, match="memory_frac"):
        OnlineUse(0.1, -0.1)


@given(seconds, seconds, fractions, fractions)
def test_steady_online_use_does_not_shift_the_target(c: float, m: float, x: float, y: float) -> None:
    left, use = Work(c, m), OnlineUse(x, y)
    assert target_density(left, use, use) == pytest.approx(left.density)
    nearly = OnlineUse(x + 1e-9, y)
    assert target_density(left, nearly, use) == pytest.approx(left.density, rel=1e-3, abs=1e-6)


@given(seconds, seconds, fractions, fractions, fractions, fractions)
def test_online_and_offline_work_together_keep_their_density(
    c: float, m: float, x: float, y: float, mean_x: float, mean_y: float
) -> None:
    left = Work(c, m)
    target = target_density(left, OnlineUse(x, y), OnlineUse(mean_x, mean_y))
    if target == 0 or (x, y) == (mean_x, mean_y):
        return  # no offline work makes up for so much compute
    end_s = max(c / (1 - mean_x), m / (1 - mean_y))
    mix = (c + mean_x * end_s) / (m + mean_y * end_s)
    offline_memory = max(min(1, 1 / mix) - y, 0.05)
    assert (target * offline_memory + x) / (offline_memory + y) == pytest.approx(mix)


def test_more_online_compute_than_usual_asks_for_less_of_offline_work() -> None:
    left, usual = Work(1200.0, 1000.0), OnlineUse(0.2, 0.1)
    assert target_density(left, OnlineUse(0.5, 0.1), usual) < left.density
    assert target_density(left, OnlineUse(0.0, 0.1), usual) > left.density


def test_work_has_the_density_of_its_parts() -> None:
    work = Work()
    assert work.density == 0.0
    work.add(2.0, 1.0)
    assert (work.density, work.time_s) == (2.0, 2.0)
    work.remove(3.0, 1.0)
    assert (work.compute_s, work.memory_s) == (0.0, 0.0)


def test_what_has_ended_elsewhere_is_a_sample_and_tells_of_those_that_begin_alike() -> None:
    assert choose_samples([True, None] * 500, 0.01, 0.0)[0] == []
    pool = make_pool(sample_share=0.5)
    waiting = [make_request(number, [number % 2, 7, number], 1000) for number in range(20)]
    ended = [
        replace(
            make_request(100 + number, [number % 2, 7, 100 + number], 1000), observed_output_tokens=tokens
        )
        for number, tokens in enumerate((5, 900, 7, 900))
    ]
    pool.add([*waiting, *ended])
    assert pool.num_waiting == 20
    assert pool.learned.outputs.count == 4
    expected = {each.request_id % 2: each.expected_output_tokens for each in iter(pool.take, None)}
    assert expected == {0: 6.0, 1: 900.0}
    pool.add([replace(ended[0], request_id=1000)])
    assert pool.take() is None


def test_a_run_that_replaces_others_keeps_as_many_ended_requests_as_wait() -> None:
    """An even distance between those that are kept may be no whole number, which rounding may add one to."""
    for num_ended in (15, 22, 50):
        for num_waiting in range(1, num_ended):
            pool = make_pool()
            ended = [
                replace(make_request(number, [number, 1]), observed_output_tokens=10)
                for number in range(num_ended)
            ]
            pool.add([*ended, *(make_request(100 + number, [number, 2]) for number in range(num_waiting))])
            pool.add([make_request(200 + number, [number, 3]) for number in range(num_waiting)])
            assert pool.num_waiting == 2 * num_waiting
