from __future__ import annotations

import pytest

from backfill.api.field_warnings import FieldWarnings
from backfill.core.clock import VirtualClock


def test_the_log_has_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = VirtualClock()
    warnings = FieldWarnings(clock)
    for name in ("a", "b", "c"):
        warnings.add(f"unknown fields: {name}")
        clock.advance(20.0)
    warnings.add("unknown fields: d")
    first, second = caplog.messages
    assert first == "in a request: unknown fields: a"
    assert "unknown fields: d (2 other requests" in second
