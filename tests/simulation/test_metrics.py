from __future__ import annotations

import pytest

from backfill.core.counters import ClassCounters
from backfill.core.request import ServiceClass
from backfill.core.slo import SLO
from backfill.simulation.metrics import PolicyMetrics, metrics_of
from backfill.simulation.replay import OnlineRecord, ReplayResult

OBJECTIVES = SLO(ttft_s=1.0, tpot_s=0.1)


def figures(*online: OnlineRecord, duration_s: float = 4.0, num_offline_completed: int = 0) -> PolicyMetrics:
    result = ReplayResult(
        duration_s=duration_s,
        online=list(online),
        counters={each: ClassCounters() for each in ServiceClass},
        num_offline_completed=num_offline_completed,
        timeline=[],
        num_steps=1,
        num_stopped_steps=0,
        scheduling_s=0.0,
        num_prefix_hit_tokens=0,
    )
    return metrics_of(result, OBJECTIVES)


GOOD = OnlineRecord(10.0, [10.5, 10.6, 10.65])
# One gap of 150 ms, but 80 ms on average.
UNEVEN = OnlineRecord(0.0, [1.0, 1.15, 1.16])
LATE = OnlineRecord(0.0, [1.01, 1.05])
SLOW = OnlineRecord(0.0, [0.5, 0.75])
SINGLE = OnlineRecord(5.0, [5.2])


def test_a_request_is_good_if_its_first_token_and_its_mean_gap_are_in_time() -> None:
    each = [figures(record) for record in (GOOD, UNEVEN, LATE, SLOW, SINGLE)]
    assert [one.ttft_attainment for one in each] == [1, 1, 0, 1, 1]
    assert [one.tpot_attainment for one in each] == [1, 1, 1, 0, 1]
    assert [one.attainment for one in each] == [1, 1, 0, 0, 1]
    assert [one.goodput_rps for one in each] == [0.25, 0.25, 0, 0, 0.25]
    assert figures(UNEVEN).itl_attainment == 0.5


def test_goodput_is_over_the_duration_and_attainment_over_the_requests() -> None:
    together = figures(GOOD, UNEVEN, LATE, SLOW, SINGLE, duration_s=2.0)
    assert together.goodput_rps == 1.5
    assert together.attainment == pytest.approx(3 / 5)


def test_normalized_latency_is_the_mean_over_requests_of_latency_by_output_token() -> None:
    assert figures(GOOD, SLOW).normalized_latency_s == pytest.approx((0.65 / 3 + 0.75 / 2) / 2)


def test_offline_requests_count_when_they_have_ended() -> None:
    assert figures(GOOD, duration_s=2.0, num_offline_completed=3).offline_rps == 1.5


def test_without_online_requests_every_objective_is_met_and_goodput_is_nought() -> None:
    empty = figures()
    assert (empty.attainment, empty.tpot_attainment, empty.goodput_rps) == (1.0, 1.0, 0.0)
    assert empty.normalized_latency_s == 0.0
