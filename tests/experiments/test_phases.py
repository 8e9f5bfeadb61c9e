from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from backfill.core.errors import ConfigError
from backfill.workloads.arrivals import gamma_arrivals
from experiments.phases import Phase, phased_arrivals, reshaped
from tests.workloads.test_arrivals import gap_cv, rng


def test_phases_have_their_rates_and_off_phases_nothing() -> None:
    instants = phased_arrivals(20_000, [Phase(10, 8), Phase(20, 0), Phase(5, 2)], 1.0, rng())
    assert np.all(np.diff(instants) >= 0)
    in_cycle = instants % 35
    num_cycles = instants[-1] / 35
    assert np.sum(in_cycle < 10) / num_cycles / 10 == pytest.approx(8, rel=0.02)
    assert np.sum((in_cycle > 10 + 1e-6) & (in_cycle < 30 - 1e-6)) == 0
    assert np.sum(in_cycle >= 30) / num_cycles / 5 == pytest.approx(2, rel=0.05)


def test_constant_phases_are_exact() -> None:
    instants = phased_arrivals(6, [Phase(1, 2), Phase(3, 0)], math.inf, rng())
    assert instants == pytest.approx([0.5, 1.0, 4.5, 5.0, 8.5, 9.0])


phases_with_a_rate = st.lists(
    st.builds(Phase, st.integers(1, 600).map(float), st.one_of(st.just(0.0), st.integers(1, 50).map(float))),
    min_size=1,
    max_size=6,
).filter(lambda phases: any(phase.rate_per_s > 0 for phase in phases))


def edges(phases: list[Phase]) -> list[tuple[Phase, float, float]]:
    """Each phase with its begin and its end."""
    ends = np.cumsum([phase.duration_s for phase in phases])
    return [(phase, end - phase.duration_s, end) for phase, end in zip(phases, ends, strict=True)]


def end_of_arrivals(phases: list[Phase]) -> float:
    return max(end for phase, _, end in edges(phases) if phase.rate_per_s > 0)


@given(
    st.lists(st.integers(0, 10**6), min_size=2, max_size=60).filter(lambda each: min(each) < max(each)),
    phases_with_a_rate,
)
@example([0, 1, 2, 3, 4], [Phase(2, 0), Phase(2, 1), Phase(3, 0), Phase(2, 1), Phase(1, 0)])
def test_reshaping_keeps_order_and_ends_with_the_phases(at_ms: list[int], phases: list[Phase]) -> None:
    instants = np.sort(np.array(at_ms) / 1000)
    moved = reshaped(instants, phases)
    assert len(moved) == len(instants)
    assert np.all(np.diff(moved) >= -1e-9)
    assert moved[-1] == pytest.approx(end_of_arrivals(phases))
    assert moved[0] == pytest.approx(next(begin for phase, begin, _ in edges(phases) if phase.rate_per_s > 0))
    for phase, begin, end in edges(phases):
        if phase.rate_per_s == 0:
            assert not np.any((moved > begin + 1e-6) & (moved < end - 1e-6))


@given(phases_with_a_rate)
def test_reshaped_even_arrivals_fall_into_phases_by_their_work(phases: list[Phase]) -> None:
    moved = reshaped(np.linspace(100.0, 200.0, 10_001), phases)
    total = sum(phase.duration_s * phase.rate_per_s for phase in phases)
    for phase, begin, end in edges(phases):
        share = np.mean((moved > begin + 1e-6) & (moved < end - 1e-6))
        assert share == pytest.approx(phase.duration_s * phase.rate_per_s / total, abs=0.001)


def test_reshaping_to_one_phase_only_stretches_and_only_ratios_of_rates_count() -> None:
    instants = gamma_arrivals(500, 3.0, 0.5, rng())
    assert gap_cv(reshaped(instants, [Phase(60, 2)])) == pytest.approx(gap_cv(instants))
    low, high = (reshaped(instants, [Phase(10, 1 * times), Phase(30, 4 * times)]) for times in (1, 7))
    assert low == pytest.approx(high)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: phased_arrivals(1, [Phase(0, 1)], 1.0, rng()), "`phases`: every phase"),
        (lambda: phased_arrivals(1, [Phase(1, -1)], 1.0, rng()), "`phases`: every phase"),
        (lambda: phased_arrivals(1, [Phase(1, 0)], 1.0, rng()), "a rate above 0"),
        (lambda: reshaped(np.arange(3.0), []), "a rate above 0"),
        (lambda: reshaped(np.arange(3.0), [Phase(5, 0)]), "a rate above 0"),
        (lambda: reshaped(np.arange(3.0), [Phase(5, 1), Phase(0, 1)]), "`phases`: every phase"),
        (lambda: reshaped(np.arange(3.0), [Phase(5, math.inf)]), "`phases`: every phase"),
        (lambda: reshaped(np.full(3, 7.0), [Phase(5, 1)]), "one instant"),
        (lambda: reshaped(np.array([7.0]), [Phase(5, 1)]), "one instant"),
    ],
)
def test_phases_out_of_range_are_refused(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ConfigError, match=message):
        call()
