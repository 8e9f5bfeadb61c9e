from __future__ import annotations

import pytest

from backfill.api.metrics import ObjectiveCounts
from backfill.api.stats_log import StatsLog


def test_missed_objectives_are_told_and_kept_ones_are_not(caplog: pytest.LogCaptureFixture) -> None:
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
    assert len(caplog.messages) == 1, "nothing since"
