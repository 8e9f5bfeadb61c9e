"""What the server logs of its load, of missed objectives and of fields without effect."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest

from backfill.api.metrics.requests import ObjectiveCounts
from backfill.api.stats_log import FieldWarnings, StatsLog
from backfill.core.clock import VirtualClock
from backfill.core.counters import ClassCounters
from backfill.core.request import FinishReason
from backfill.engine.messages import ClassStats, EngineStats, StepReport, StepStats
from tests.api.test_metrics import ONLINE, SERVER_SLO, WITHOUT_TOKEN, make_metrics


def test_objectives_that_one_of_several_owners_missed_are_told(caplog: pytest.LogCaptureFixture) -> None:
    requests = make_metrics().requests
    log = StatsLog(requests.objective_counts, missed_by_one=requests.take_missed_by_one)
    whose = ", all of one owner's requests"

    def warning() -> str:
        caplog.clear()
        log.log_missed()
        return caplog.text

    requests.on_first_token(ONLINE, 99.0, SERVER_SLO, "a")
    assert whose not in warning(), "there is one owner"
    requests.on_first_token(ONLINE, 0.1, SERVER_SLO, "b")
    requests.on_first_token(ONLINE, 99.0, SERVER_SLO, "a")
    assert f"TTFT by 1 of 2 requests' first tokens{whose}" in warning()
    for owner in ("a", "b"):
        requests.on_first_token(ONLINE, 99.0, SERVER_SLO, owner)
    requests.on_next_token(ONLINE, 99.0, SERVER_SLO, "b")
    assert f"first tokens, TPOT by 1 of 1 gaps between tokens{whose}." in warning()
    requests.on_finished(replace(WITHOUT_TOKEN, owner="a", finish_reason=FinishReason.ERROR))
    assert f"TTFT by 1 of 1 requests' first tokens{whose}" in warning()


def test_only_missed_objectives_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    counts = {"ttft": ObjectiveCounts(0, 0), "tpot": ObjectiveCounts(0, 0)}
    log = StatsLog(lambda: dict(counts))
    log.log_missed()
    counts.update(ttft=ObjectiveCounts(100, 0), tpot=ObjectiveCounts(1000, 10))
    log.log_missed()
    assert not caplog.messages, "one gap in a hundred may be late"
    counts.update(ttft=ObjectiveCounts(130, 10), tpot=ObjectiveCounts(1100, 10))
    log.log_missed()
    (line,) = caplog.messages
    assert "TTFT by 10 of 40 requests" in line
    assert "TPOT" not in line
    assert "--shed-hopeless" in line
    log.log_missed()
    assert len(caplog.messages) == 1, "no objective was missed since"


def test_prompts_that_wait_and_are_late_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    StatsLog(dict, lambda: 3, stolen_s=lambda: 0.0).log_missed()
    assert "TTFT by 3 that wait" in caplog.text
    assert "hypervisor" not in caplog.text


def test_what_the_hypervisor_took_is_said_beside_missed_objectives(caplog: pytest.LogCaptureFixture) -> None:
    StatsLog(dict, lambda: 3, stolen_s=lambda: 6.0).log_missed()
    assert "The hypervisor took 10% of the processors' time." in caplog.text


def test_missed_objectives_are_logged_every_minute(caplog: pytest.LogCaptureFixture) -> None:
    num_asked = 0

    def counts() -> dict[str, ObjectiveCounts]:
        nonlocal num_asked
        num_asked += 1
        return {"tpot": ObjectiveCounts(0, num_asked)}

    async def run() -> None:
        log = asyncio.create_task(StatsLog(counts, interval_s=0.0).run())
        while num_asked < 3:
            await asyncio.sleep(0)
        log.cancel()

    asyncio.run(run())
    assert caplog.messages[0].startswith("objectives missed in the last minute: TPOT by 1 of 1 gaps")
    assert len(caplog.messages) == 3


def reported(online: tuple[int, int, int], offline: tuple[int, int, int]) -> StepReport:
    """Of one step. Totals of a class: tokens looked up, found on the device, found in host memory."""
    states = [
        ClassStats(
            0,
            0,
            ClassCounters(
                num_prefix_queried_tokens=totals[0],
                num_prefix_hit_tokens=totals[1],
                num_host_prefix_hit_tokens=totals[2],
            ),
        )
        for totals in (online, offline)
    ]
    step = StepStats("mixed", 1, 0.1, 0.1)
    return StepReport([], EngineStats(*states, 0.5, 0, 0.0, 0, step))


def test_the_hit_rate_is_that_of_the_interval_by_class(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    intervals = [
        [reported((100, 50, 0), (0, 0, 0)), reported((200, 60, 15), (0, 0, 0))],
        [reported((200, 60, 15), (0, 0, 0))],
        [reported((300, 160, 15), (80, 0, 8))],
        [reported((40, 0, 20), (0, 0, 0))],  # a new engine
    ]

    async def run() -> None:
        log = StatsLog(dict, interval_s=0.001)
        logging_task = asyncio.create_task(log.run())
        for number, reports in enumerate(intervals, start=1):
            for each in reports:
                log.on_report(each)
            while len(caplog.messages) < number:
                await asyncio.sleep(0)
        logging_task.cancel()

    asyncio.run(asyncio.wait_for(run(), 60))
    rates = [message.partition("prefix cache hit rate ")[2] for message in caplog.messages]
    assert rates == ["online 37.5%", "", "online 100.0%, offline 10.0%", "online 50.0%"]
    assert caplog.messages[1].endswith("KV use 50.0%"), "nothing was looked up"


def test_warnings_of_fields_have_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = VirtualClock()
    warnings = FieldWarnings(clock)
    for name in ("a", "b", "c"):
        warnings.add(f"unknown fields: {name}")
        clock.advance(20.0)
    warnings.add("unknown fields: d")
    first, second = caplog.messages
    assert first == "in a request: unknown fields: a"
    assert "unknown fields: d (2 other requests" in second
