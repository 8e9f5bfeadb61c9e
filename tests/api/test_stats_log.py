from __future__ import annotations

import asyncio

import pytest

from backfill.api.metrics.requests import ObjectiveCounts
from backfill.api.stats_log import FieldWarnings, StatsLog
from backfill.core.clock import VirtualClock


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
