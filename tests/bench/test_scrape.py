from __future__ import annotations

import pytest

from backfill.bench.scrape import (
    Sample,
    computed_share,
    discarded_share,
    gained,
    num_present,
    parse_totals,
    tokens_at,
    total_tokens,
)

RECOMPUTED = "backfill:recomputed_tokens_total"
OURS = """
# HELP backfill:iteration_tokens_total Tokens computed in a step
# TYPE backfill:iteration_tokens_total histogram
backfill:iteration_tokens_total_bucket{engine="0",le="8.0",model_name="m"} 3.0
backfill:iteration_tokens_total_sum{engine="0",model_name="m"} 1000.0
backfill:recomputed_tokens_total{class="online",engine="0"} 10.0
backfill:recomputed_tokens_total{class="offline",engine="0"} 90.0
backfill:time_to_first_token_seconds_count{class="online"} 3.0
backfill:time_to_first_token_seconds_count{class="offline"} 4.0
backfill:num_requests_running{class="online"} 2.0
backfill:num_requests_waiting{class="offline"} 5.0
http_requests_total{handler="/a b",method="GET",status="200"} 1e3
"""


def sample(at_s: float, computed: float, recomputed: float = 0.0, discarded: float = 0.0) -> Sample:
    totals = {
        "backfill:iteration_tokens_total_sum": computed,
        "backfill:recomputed_tokens_total": recomputed,
        "backfill:discarded_tokens_total": discarded,
    }
    return Sample(at_s, totals)


def test_samples_are_summed_over_labels() -> None:
    totals = parse_totals(OURS + "not a sample\nx NaNN\n")
    assert totals["backfill:recomputed_tokens_total"] == 100.0
    assert totals["http_requests_total"] == 1000.0
    assert not any(name.endswith("_bucket") for name in totals)
    assert total_tokens(totals) == 1000 - 100 + 7
    assert num_present(totals) == 7


def test_counters_of_vllm_are_read_too() -> None:
    totals = parse_totals('vllm:prompt_tokens_total{m="x"} 5\nvllm:generation_tokens_total{m="x"} 7')
    assert total_tokens(totals) == 12
    assert total_tokens({}) is None and num_present({}) is None


def test_a_counter_that_fell_says_nothing() -> None:
    assert gained([sample(0, 10), sample(1, 30)], "backfill:iteration_tokens_total_sum") == 20
    assert gained([sample(0, 10), sample(1, 3)], "backfill:iteration_tokens_total_sum") is None
    assert gained([sample(0, 10)], "backfill:iteration_tokens_total_sum") is None
    assert gained([sample(0, 10), sample(1, 30)], "other") is None
    assert tokens_at([sample(0, 10), sample(1, 3), sample(2, 30)], [0, 2]) is None


def test_shares() -> None:
    samples = [sample(0, 100, 10, 5), sample(1, 300, 30, 55)]
    assert computed_share(samples, RECOMPUTED) == pytest.approx(20 / 200)
    assert discarded_share(samples) == pytest.approx(50 / 250)
    assert computed_share(samples[:1], RECOMPUTED) is None
    assert computed_share([sample(0, 5), sample(1, 5)], RECOMPUTED) == 0.0


def test_tokens_between_samples_lie_on_a_line() -> None:
    assert tokens_at([sample(0, 0), sample(2, 20), sample(4, 20)], [1, 3, 4]) == [10, 20, 20]
