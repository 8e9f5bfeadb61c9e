from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest

from backfill.bench.coserve_load import CoserveLoad, LengthRange
from backfill.core.errors import ConfigError


def test_lengths_are_a_number_or_a_range() -> None:
    assert LengthRange.parse("x", "7") == (7, 7)
    assert LengthRange.parse("x", "7:9") == (7, 9)


@pytest.mark.parametrize("text", ["", "0", "-1", "9:7", "7:", ":7", "7:8:9", "a", "1.5"])
def test_bad_lengths_name_their_option(text: str) -> None:
    with pytest.raises(ConfigError, match=r"`x` takes tokens as N or LOW:HIGH, at least 1, got "):
        LengthRange.parse("x", text)


def test_equal_loads_are_equal_whatever_the_offline_work() -> None:
    load = CoserveLoad(input_len="5:9")
    other = dataclasses.replace(load, offline_mode="none", offline_concurrency=3)
    assert load.online_requests() == other.online_requests()
    assert load.online_requests() != dataclasses.replace(load, seed=1).online_requests()
    first, again = (list(itertools.islice(load.offline_requests(), 50)) for _ in range(2))
    assert first == again
    assert {r.input_tokens for r in first} <= set(range(256, 513))
    assert {r.output_tokens for r in first} <= set(range(32, 129))


def test_arrivals_cover_warm_up_and_measurement() -> None:
    load = CoserveLoad(duration=100.0, warmup=20.0, rate=2.0)
    due = [request.due_at_s for request in load.online_requests()]
    assert len(due) == 240 and due == sorted(due)
    assert due[0] >= 0 and due[-1] == pytest.approx(120.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"duration": 0.0}, "`duration` must be a number above 0, got 0"),
        ({"rate": math.inf}, "`rate` must be a number above 0, got inf"),
        ({"ttft_slo": -1.0}, "`ttft_slo` must be"),
        ({"tpot_slo": math.nan}, "`tpot_slo` must be"),
        ({"warmup": -1.0}, "`warmup` must be"),
        ({"drain_timeout": math.inf}, "`drain_timeout` must be"),
        ({"offline_concurrency": 0}, "`offline_concurrency` must be at least 1"),
        ({"offline_lines": 0}, "`offline_lines` must be at least 1"),
        ({"cv": -1.0}, "`cv` must be"),
        ({"seed": -1}, "`seed` must be"),
        ({"duration": 1.0, "rate": 0.01}, "leaves no request to measure"),
    ],
)
def test_bad_settings_name_their_option(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(CoserveLoad(), **change).validate()
