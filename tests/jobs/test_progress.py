"""Rates and the time left, at instants that the tests choose."""

from __future__ import annotations

import itertools
import random

import pytest

from backfill.core.counters import ClassCounters
from backfill.core.request import RequestId
from backfill.engine.messages import ClassStats, EngineStats, StepReport, StepStats, TokenOutput
from backfill.jobs.progress import SlidingRate, TimeLeft, TokenRates


def test_a_rate_is_of_the_last_half_minute() -> None:
    rate = SlidingRate(started_at_s=100.0)
    for second in range(100, 200):
        rate.add(1000 if second < 150 else 10, float(second))
    assert rate.per_s(149.5) is not None
    assert rate.per_s(199.0) == pytest.approx(10, rel=0.05)
    assert rate.per_s(400.0) == 0.0


def test_a_rate_is_unknown_at_first_and_then_counts_from_the_start() -> None:
    rate = SlidingRate(started_at_s=0.0)
    rate.add(30_000, 0.1)
    assert rate.per_s(0.2) is None
    assert rate.per_s(10.0) == 3000


def test_a_rate_keeps_few_numbers_for_many_steps() -> None:
    rate = SlidingRate(started_at_s=0.0)
    for step in range(10_000):
        rate.add(1, step * 0.01)
    assert rate.per_s(100.0) == pytest.approx(100, rel=0.02)
    assert len(rate._buckets) <= 61


def left_after(times: list[float], num_lines: int, num_at_once: int, now_s: float) -> list[float | None]:
    """Estimates twice a second up to ``now_s``, of lines that end at ``times``."""
    left = TimeLeft(num_lines, num_at_once, 0.0)
    said = []
    for tick in range(int(now_s * 2) + 1):
        at_s = tick / 2
        left.update(sum(each <= at_s for each in times), at_s)
        said.append(left.seconds(at_s))
    return said


def test_there_is_no_estimate_before_a_wave_has_ended() -> None:
    rng = random.Random(0)
    wave = sorted(rng.uniform(20, 120) for _ in range(64))
    said = left_after(wave, 640, 64, 100.0)
    assert said[-1] is None
    assert left_after(wave, 640, 64, 130.0)[-1] is not None


def test_waves_do_not_make_the_estimate_jump() -> None:
    """Sixteen lines at once, all equal: nothing ends for a minute, then sixteen."""
    num_waves = 12
    times = [60.0 * (1 + index // 16) for index in range(16 * num_waves)]
    said = left_after(times, len(times), 16, 60.0 * (num_waves - 1))
    for tick, seconds in enumerate(said):
        if tick / 2 >= 60:
            assert seconds == pytest.approx(60.0 * num_waves - tick / 2, rel=0.1)


def test_the_estimate_stays_near_the_truth_for_lines_of_any_length() -> None:
    """Eight at once of 5 to 60 seconds; the estimate never doubles nor halves within a second."""
    rng = random.Random(3)
    ends_at = [0.0] * 8
    times = []
    for _ in range(400):
        worker = ends_at.index(min(ends_at))
        ends_at[worker] += rng.uniform(5, 60)
        times.append(ends_at[worker])
    said = left_after(sorted(times), 400, 8, max(times) * 0.8)
    known = [(tick / 2, seconds) for tick, seconds in enumerate(said) if seconds is not None]
    assert known[0][0] < 60
    for at_s, seconds in known:
        if at_s > 120:
            assert seconds == pytest.approx(max(times) - at_s, rel=0.35)
    assert all(after < 1.2 * before for (_, before), (_, after) in itertools.pairwise(known))


def test_the_estimate_follows_a_machine_that_becomes_slower() -> None:
    times = [second / 10 for second in range(1, 1001)] + [100.0 + second for second in range(1, 2000)]
    left = TimeLeft(len(times), 4, 0.0)
    for second in range(400):
        left.update(sum(each <= second for each in times), float(second))
    assert left.seconds(399.0) == pytest.approx(len(times) - 1300, rel=0.15)


def test_a_line_that_never_ends_makes_the_estimate_grow() -> None:
    said = left_after([float(second) for second in range(1, 31)], 60, 4, 300.0)
    assert said[-1] is not None
    assert said[-1] > 200


def report(num_computed: int, num_recomputed: int, outputs: int) -> StepReport:
    totals = ClassCounters(num_computed_tokens=num_computed, num_recomputed_tokens=num_recomputed)
    none = ClassStats(0, 0, ClassCounters())
    step = StepStats("offline", 0, 0.0, 0.0)
    stats = EngineStats(none, ClassStats(0, 0, totals), 0.0, 0, 0.0, 0, step)
    return StepReport([TokenOutput(RequestId(str(index)), 7) for index in range(outputs)], stats)


def test_prompts_are_counted_as_they_are_computed_and_apart_from_outputs() -> None:
    rates = TokenRates(0.0)
    rates.on_report(report(1000, 0, 0), 1.0)  # prompts
    rates.on_report(report(1100, 0, 100), 2.0)  # decodes of 100 requests
    rates.on_report(report(1700, 500, 100), 3.0)  # the same, and 500 tokens again
    rates.on_report(report(1700, 500, 0), 9.0)  # nothing to do
    assert rates.prompts.per_s(10.0) == 100
    assert rates.outputs.per_s(10.0) == 20


def test_a_restarted_engine_counts_from_zero() -> None:
    rates = TokenRates(0.0)
    rates.on_report(report(5000, 0, 0), 1.0)
    rates.on_report(report(300, 0, 0), 2.0)
    assert rates.prompts.per_s(10.0) == 530
