"""How much longer than typically neighbouring times take together."""

from __future__ import annotations

import pytest

from backfill.offloading.spread import delays_s, quantile, run_times_s


def test_runs_of_what_varies_are_steadier_than_one() -> None:
    """Every tenth takes five times as long; so of eight in a row at most one does."""
    times_s = [0.005 if number % 10 == 0 else 0.001 for number in range(640)]
    runs = run_times_s(times_s)
    assert runs[0] == 0.005
    assert runs[3] == pytest.approx((7 * 0.001 + 0.005) / 8)
    assert len(runs) == 6, "of runs of 64 there are too few"
    assert runs[5] == pytest.approx((28 * 0.001 + 4 * 0.005) / 32)


def test_what_is_slow_for_a_while_is_slow_for_whole_runs() -> None:
    times_s = [0.005 if number % 320 < 32 else 0.001 for number in range(640)]
    assert run_times_s(times_s)[:5] == pytest.approx([0.005] * 5)


def test_one_time_is_a_run() -> None:
    assert run_times_s([0.5]) == [0.5]


def test_delays_are_those_of_stretches_of_typical_time() -> None:
    """Parts of 1 ms; one of 50 takes 21."""
    stretches = [(0.001, 0.021 if number % 50 == 0 else 0.001) for number in range(2000)]
    found = delays_s(stretches)
    assert found == pytest.approx([0.020] * 6 + [0.040])
    assert delays_s([(0.001, 0.001)] * 100) == [0.0] * 3
    assert delays_s([]) == []


def test_what_is_faster_than_typical_is_no_delay() -> None:
    assert delays_s([(0.001, 0.0005)] * 100) == [0.0] * 3


def test_the_quantile_is_exceeded_by_one_in_a_hundred() -> None:
    assert quantile(range(1, 101)) == 99
