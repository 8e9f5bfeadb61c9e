"""Which division of device memory is chosen, and when."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backfill.offloading.interval import LayerTimes, num_device_layers, stages_bounds, step_time_s
from backfill.offloading.residency import (
    Residency,
    ResidencyPolicy,
    Situation,
    StepNeed,
    residencies,
)
from tests.shared import examples

NUM_LAYERS = 32


def test_divisions_of_the_same_memory() -> None:
    found = residencies(12, 1, 4, num_blocks=100, layer_bytes=30, block_bytes=7)
    assert [each.interval for each in found] == [1, 2, 3, 4]
    assert [each.num_blocks for each in found] == [100 + freed * 30 // 7 for freed in (9, 3, 1, 0)]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40))
def test_a_smaller_interval_never_leaves_less_for_kv(num_layers: int, low: int, high: int) -> None:
    low, high = sorted((min(low, num_layers), min(high, num_layers)))
    found = residencies(num_layers, low, high, num_blocks=10, layer_bytes=3, block_bytes=2)
    assert found[-1] == Residency(high, 10)
    for less, more in itertools.pairwise(found):
        assert less.interval < more.interval
        assert num_device_layers(num_layers, less.interval) < num_device_layers(num_layers, more.interval)
        assert less.num_blocks >= more.num_blocks


def make_policy() -> ResidencyPolicy:
    """Interval 8 has 100 blocks, and 2 has 340."""
    choices = residencies(NUM_LAYERS, 2, 8, num_blocks=100, layer_bytes=20, block_bytes=1)
    return ResidencyPolicy(choices, (NUM_LAYERS,))


def offline(**changes: Any) -> Situation:
    """Offline requests that fill the smallest pool, while more wait. The step's time is mostly constant."""
    situation = Situation(
        now_s=1000.0,
        transfer_s=1e-3,
        num_online=0,
        decodes=StepNeed(math.inf, 0.0),
        used_blocks=100,
        wanted_blocks=math.inf,
        most_scale=math.inf,
        compute_s=lambda scale: 0.03 + 0.001 * scale,
    )
    return replace(situation, **changes)


def online(**changes: Any) -> Situation:
    """A step takes 8 ms; with interval 2 its 16 transfers take 16."""
    return offline(
        **{
            "num_online": 1,
            "decodes": StepNeed(0.012, 0.008),
            "compute_s": lambda scale: 0.0079 + 0.0001 * scale,
            **changes,
        }
    )


def test_offline_work_alone_that_waits_for_blocks_gets_the_memory_of_weights() -> None:
    policy = make_policy()
    assert policy.choose(offline()) is policy.choices[0]


@pytest.mark.parametrize(
    "situation",
    [
        offline(wanted_blocks=100),  # nobody waits for blocks
        offline(most_scale=1.0),  # a step has as many requests as it may
        offline(used_blocks=0),  # nothing runs
        offline(compute_s=lambda scale: 0.03 * scale),  # larger steps take as much longer
        offline(transfer_s=8e-3),  # 16 transfers take 128 ms, for 3.4 times the requests
        offline(transfer_s=0.0),  # not known
    ],
    ids=["no demand", "full step", "idle", "compute-bound", "slow link", "unknown link"],
)
def test_residency_stays_where_more_kv_gains_nothing(situation: Situation) -> None:
    policy = make_policy()
    assert policy.choose(situation) is policy.choices[-1]


def test_the_gain_is_weighed_against_the_transfers() -> None:
    """A slower link makes an interval between the two the best one."""
    policy = make_policy()
    chosen = policy.choose(offline(transfer_s=3.5e-3))
    rates = {each.interval: policy._rate(each, offline(transfer_s=3.5e-3)) for each in policy.choices}
    assert 2 < chosen.interval < 8
    assert rates[chosen.interval] == max(rates.values())


def test_online_requests_whose_objective_the_transfers_would_miss_get_residency_back_at_once() -> None:
    policy = make_policy()
    policy.choose(offline())
    assert policy.target.interval == 2
    chosen = policy.choose(online(now_s=1000.001))
    assert chosen.interval > 2
    assert policy.step_s(0.008, chosen.interval, 1e-3) <= 0.8 * 0.012
    smaller = policy.choices[policy.choices.index(chosen) - 1]
    assert policy.step_s(0.008, smaller.interval, 1e-3) > 0.8 * 0.012, "it could keep more KV"


def test_prompts_whose_first_tokens_the_transfers_would_make_late_get_residency_back() -> None:
    """With interval 2 every step takes 16 ms, which the decodes may take."""
    policy = make_policy()
    policy.choose(offline())
    patient = replace(online(now_s=1001.0), decodes=StepNeed(0.02, 0.008))
    assert policy.choose(replace(patient, prompts=StepNeed(0.016, 0.010))).interval == 2
    chosen = policy.choose(replace(patient, prompts=StepNeed(0.015, 0.010)))
    assert policy.step_s(0.010, chosen.interval, 1e-3) <= 0.8 * 0.015
    assert chosen.interval == 4, "with 3 decodes take 2 ms more, for less than a quarter more blocks"
    assert policy.choose(patient) is chosen, "offline work gets it back later"


def test_what_the_latest_prompts_needed_holds_for_a_while() -> None:
    policy = make_policy()
    patient = replace(online(), decodes=StepNeed(0.03, 0.008), compute_s=lambda scale: 0.016)
    assert policy.choose(replace(patient, prompts=StepNeed(0.012, 0.008), now_s=1000.0)).interval == 4
    assert policy.choose(replace(patient, prompts=StepNeed(0.5, 0.008), now_s=1006.0)).interval == 4
    assert policy.choose(replace(patient, now_s=1009.9)).interval == 4
    assert policy.choose(replace(patient, now_s=1010.0)).interval == 2


def test_one_tight_prompt_is_forgotten_while_lax_ones_go_on() -> None:
    policy = make_policy()
    patient = replace(online(), decodes=StepNeed(0.03, 0.008), compute_s=lambda scale: 0.016)
    lax = replace(patient, prompts=StepNeed(0.5, 0.008))
    assert policy.choose(replace(patient, prompts=StepNeed(0.012, 0.008), now_s=1000.0)).interval == 4
    chosen = [policy.choose(replace(lax, now_s=1000.0 + second)).interval for second in range(1, 13)]
    assert chosen == 9 * [4] + 3 * [2]


def test_the_lax_prompts_after_a_tight_one_hold_for_as_long() -> None:
    policy = make_policy()
    patient = replace(online(), decodes=StepNeed(0.03, 0.008), compute_s=lambda scale: 0.016)
    medium = StepNeed(0.0155, 0.008)  # interval 3 is in time with a margin
    policy.choose(replace(patient, prompts=StepNeed(0.012, 0.008), now_s=1000.0))
    policy.choose(replace(patient, prompts=medium, now_s=1009.0))
    assert policy.choose(replace(patient, now_s=1010.0)).interval == 3
    assert policy.choose(replace(patient, now_s=1018.9)).interval == 3
    assert policy.choose(replace(patient, now_s=1019.0)).interval == 2


def test_a_phase_that_no_residency_serves_in_time_has_the_shortest_steps() -> None:
    policy = make_policy()
    policy.choose(offline())
    hopeless = replace(online(now_s=1001.0), prompts=StepNeed(0.001, 0.008))
    chosen = policy.choose(hopeless)
    assert policy.step_s(0.008, chosen.interval, 1e-3) == policy.step_s(0.008, 8, 1e-3)
    assert policy.choose(replace(hopeless, now_s=1002.0)) is chosen


def test_online_requests_that_are_in_time_change_nothing() -> None:
    policy = make_policy()
    policy.choose(offline())
    assert policy.choose(replace(online(now_s=1001.0), decodes=StepNeed(0.017, 0.008))).interval == 2
    assert policy.choose(replace(online(now_s=1001.0), decodes=StepNeed(0.016, 0.008))).interval == 2


def test_offline_requests_beside_online_ones_get_the_blocks_that_cost_no_time() -> None:
    policy = make_policy()
    assert policy.choose(online(wanted_blocks=100)).interval == 8, "nobody wants them"
    chosen = policy.choose(online())
    assert chosen.interval == 4
    assert policy.step_s(0.008, 4, 1e-3) == policy.step_s(0.008, 8, 1e-3) < policy.step_s(0.008, 3, 1e-3)


@pytest.mark.parametrize(("tpot_s", "interval"), [(0.04, 8), (0.09, 4), (0.2, 2)])
def test_offline_requests_beside_online_ones_get_the_blocks_that_the_objective_has_time_for(
    tpot_s: float, interval: int
) -> None:
    """Steps take 32 ms with interval 8, 64 with 4 and 128 with 2, which have 100, 340 and 820 blocks."""
    choices = residencies(NUM_LAYERS, 2, 8, num_blocks=100, layer_bytes=60, block_bytes=1)
    policy = ResidencyPolicy(choices, (NUM_LAYERS,))
    chosen = policy.choose(replace(online(transfer_s=8e-3), decodes=StepNeed(tpot_s, 0.008)))
    assert chosen.interval == interval


def test_where_online_requests_fill_the_time_of_a_step_offline_ones_get_no_more_blocks() -> None:
    policy = make_policy()
    busy = online(compute_s=lambda scale: 0.01 + 0.028 * scale)
    assert policy.choose(replace(busy, decodes=StepNeed(0.04, 0.038))).interval == 8
    assert policy.choose(replace(busy, decodes=StepNeed(0.2, 0.038))).interval < 8


def test_where_no_interval_keeps_the_objective_steps_are_as_short_as_they_can_be() -> None:
    policy = make_policy()
    policy.choose(offline())
    chosen = policy.choose(replace(online(now_s=1001.0), decodes=StepNeed(0.001, 0.008)))
    steps_s = {each.interval: policy.step_s(0.008, each.interval, 1e-3) for each in policy.choices}
    assert steps_s[chosen.interval] == min(steps_s.values()) < steps_s[2]
    assert chosen.interval == 8, "no KV makes more of a step that is late"
    assert policy.choose(replace(online(now_s=1002.0), decodes=StepNeed(0.001, 0.008))) is chosen


def test_residency_does_not_follow_every_online_request() -> None:
    policy = make_policy()
    for second in range(100):
        situation = online(wanted_blocks=100) if second % 9 == 0 else offline()
        assert policy.choose(replace(situation, now_s=float(second))).interval == 8
    assert policy.choose(offline(now_s=108.9)).interval == 8
    assert policy.choose(offline(now_s=109.0)).interval == 2


def test_residency_stays_for_a_while_after_a_change() -> None:
    policy = make_policy()
    assert policy.choose(offline(now_s=100.0)).interval == 2
    slower = offline(compute_s=lambda scale: 0.001 * scale)
    assert policy.choose(replace(slower, now_s=104.9)).interval == 2
    assert policy.choose(replace(slower, now_s=105.0)).interval == 8


def test_a_small_gain_changes_nothing() -> None:
    gains = []
    for fixed_s in (1e-4, 2e-4, 4e-4, 8e-4, 16e-4, 32e-4, 64e-4):
        policy = make_policy()
        situation = offline(compute_s=lambda scale, fixed_s=fixed_s: fixed_s + 0.03 * scale)
        chosen = policy.choose(situation)
        best = max(policy._rate(each, situation) for each in policy.choices)
        gain = best / policy._rate(policy.choices[-1], situation) - 1.0
        assert (chosen is policy.choices[-1]) == (gain <= 0.05)
        gains.append(gain)
    assert min(gains) < 0.05 < max(gains)


@given(st.integers(0, 6), st.floats(1e-3, 0.2), st.floats(1e-5, 0.02))
def test_the_interval_of_a_step_is_the_fastest_for_which_there_is_room(
    index: int, compute_s: float, transfer_s: float
) -> None:
    policy = make_policy()
    present = policy.choices[min(index, len(policy.choices) - 1)]
    situation = offline(transfer_s=transfer_s, compute_s=lambda scale: compute_s)
    interval = policy.fastest_interval(present, situation)
    assert 2 <= interval <= present.interval
    times = [policy.step_s(compute_s, each, transfer_s) for each in range(2, present.interval + 1)]
    assert policy.step_s(compute_s, interval, transfer_s) == min(times)


@settings(max_examples=examples(100))
@given(
    stage_layers=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    interval=st.integers(1, 20),
    transfer_s=st.floats(0.0, 1.0),
    compute_s=st.floats(0.0, 1.0),
)
def test_a_step_passes_stages_one_after_another(
    stage_layers: list[int], interval: int, transfer_s: float, compute_s: float
) -> None:
    stages = [step_time_s(LayerTimes(each, compute_s, transfer_s), interval) for each in stage_layers]
    bounds = stages_bounds(stage_layers, interval, transfer_s)
    assert bounds.step_s(sum(stage_layers) * compute_s) == pytest.approx(sum(stages))
