"""What the offline pool is told of the online requests beside it."""

from __future__ import annotations

import math

from backfill.api.online_load import OnlineLoad
from backfill.api.online_traffic import OnlineTrafficMeter
from backfill.core.config import SchedulerConfig
from backfill.core.counters import ClassCounters
from backfill.engine.messages import ClassStats, EngineStats, StepKind, StepReport, StepStats
from backfill.preparation.messages import OnlineTraffic
from tests.builders import linear_cost


def report(num_computed: int, kind: StepKind = "online") -> StepReport:
    online = ClassStats(1, 0, ClassCounters(num_computed_tokens=num_computed))
    idle = ClassStats(0, 0, ClassCounters())
    return StepReport([], EngineStats(online, idle, 0.0, 0, 0.0, 0, StepStats(kind, 10, 0.1, 0.1)))


def test_rates_are_means_of_about_a_second() -> None:
    load = OnlineLoad(linear_cost(token_s=0.001), SchedulerConfig(policy="slo"))
    load.add([300], priority=0, first_token_by_s=math.inf)
    meter = OnlineTrafficMeter(load)
    assert meter.on_report(report(500), 10.0) is None, "what was computed before is not known in time"
    assert meter.on_report(report(520), 10.5) is None
    assert meter.on_report(report(520, "offline"), 10.8) is None
    assert meter.on_report(report(540, "mixed"), 12.0) == OnlineTraffic(40 / 2.0, 2 * 300 / 2.0, 300)
    assert meter.on_report(report(540, "none"), 14.0) == OnlineTraffic(0.0, 0.0, 300)


def test_a_new_engine_begins_again() -> None:
    meter = OnlineTrafficMeter(OnlineLoad(linear_cost(token_s=0.001), SchedulerConfig(policy="slo")))
    assert meter.on_report(report(500), 10.0) is None
    assert meter.on_report(report(3), 15.0) is None
    assert meter.on_report(report(5), 16.0) == OnlineTraffic(2.0, 0.0, 0)


def test_the_tokens_held_are_a_peak_that_decays_in_a_minute() -> None:
    load = OnlineLoad(linear_cost(token_s=0.001), SchedulerConfig(policy="slo"))
    meter = OnlineTrafficMeter(load)
    few, many = (load.add([tokens], priority=0, first_token_by_s=math.inf) for tokens in (300, 5000))
    meter.on_report(report(1), 10.0)
    many.release()
    found = [traffic for at_s in range(11, 252) if (traffic := meter.on_report(report(1, "none"), at_s))]
    assert [found[after].held_tokens for after in (59, 119)] == [
        int(5300 * math.exp(-1)),
        int(5300 * math.exp(-2)),
    ]
    assert found[-1].held_tokens == 300, "what is held now"
    few.release()
