from __future__ import annotations

import json
import math

import numpy as np
import pytest

from backfill.bench.metrics import compute_metrics, parse_objectives, tokens_by_second
from backfill.bench.record import Outcome, RequestRecord
from backfill.bench.report import format_report, json_line, result_json
from backfill.bench.runner import Run
from backfill.core.errors import ConfigError


def completed(sent_at_s: float, chunks: list[float], tokens: int, *, index: int = 0) -> RequestRecord:
    return RequestRecord(
        index=index,
        due_at_s=sent_at_s - 0.001,
        arrived_at_s=sent_at_s,
        input_tokens=10,
        sent_at_s=sent_at_s,
        chunk_after_s=chunks,
        output_tokens=tokens,
        ended_after_s=chunks[-1] + 0.001,
        outcome=Outcome.COMPLETED,
    )


def failed() -> RequestRecord:
    return RequestRecord(2, 0.0, 0.0, 10, sent_at_s=0.0, outcome=Outcome.FAILED, error="HTTP 500: no")


ONE = [0.1, 0.2, 0.4]
RECORDS = [completed(0.0, ONE, 3), completed(1.0, [0.3], 1), failed()]


def test_definitions() -> None:
    record = completed(0.0, ONE, 5)
    assert record.ttft_s == pytest.approx(0.1)
    assert record.itls_s == pytest.approx([0.1, 0.2])
    assert record.tpot_s == pytest.approx(0.3 / 4)
    assert record.latency_s == pytest.approx(0.4)
    assert record.normalized_latency_s == pytest.approx(0.4 / 5)
    assert completed(0.0, [0.3], 1).tpot_s is None


def test_figures_of_a_small_run() -> None:
    metrics = compute_metrics(RECORDS, duration_s=2.0, num_requests=4)
    assert (metrics.num_completed, metrics.num_failed, metrics.num_not_sent) == (2, 1, 1)
    assert metrics.requests_per_s == 1.0
    assert metrics.output_tokens_per_s == 2.0
    assert metrics.total_tokens_per_s == 12.0
    assert metrics.goodput_per_s is None
    assert metrics.latencies["ttft"].mean == pytest.approx(0.2)
    assert metrics.latencies["tpot"].count == 1
    assert metrics.latencies["itl"].count == 2
    assert metrics.send_lag.count == 3
    assert metrics.errors == {"HTTP 500: no": 1}


def test_percentiles_are_numpys() -> None:
    values = np.random.default_rng(0).gamma(2.0, 0.1, 500)
    records = [completed(0.0, [value], 1) for value in values]
    seen = compute_metrics(records, duration_s=1.0, num_requests=500).latencies["ttft"]
    assert list(seen.percentiles.values()) == pytest.approx(np.percentile(values, [50, 90, 99]))
    assert seen.std == pytest.approx(values.std())


def test_failed_requests_miss_every_objective_and_interrupted_ones_none() -> None:
    interrupted = RequestRecord(3, 0.0, 0.0, 10, sent_at_s=0.0, outcome=Outcome.INTERRUPTED)
    metrics = compute_metrics(
        [*RECORDS, interrupted],
        duration_s=2.0,
        num_requests=4,
        objectives_s={"ttft": 0.2, "tpot": 0.2, "itl": 0.15, "e2el": 1.0},
    )
    assert metrics.attainment is not None
    assert metrics.attainment.by_objective == pytest.approx(
        {"ttft": 1 / 3, "tpot": 2 / 3, "itl": 1 / 3, "e2el": 2 / 3}
    )
    assert metrics.attainment.all_met == 0.0
    assert metrics.goodput_per_s == 0.0
    assert metrics.num_interrupted == 1


def test_goodput_counts_requests_that_meet_all() -> None:
    metrics = compute_metrics(
        RECORDS, duration_s=2.0, num_requests=3, objectives_s={"ttft": 0.2, "tpot": 0.2}
    )
    assert metrics.goodput_per_s == 0.5


def test_concurrency_and_tokens_over_time() -> None:
    records = [completed(0.0, [0.5, 1.5], 4), completed(1.0, [0.2], 1), completed(1.4, [0.2], 1)]
    assert tokens_by_second(records) == [2.0, 4.0]
    assert compute_metrics(records, duration_s=2.0, num_requests=3).peak_concurrency == 2


def test_json_of_nothing_completed_is_valid() -> None:
    run = Run(started_at=0.0, num_requests=1, records=[failed()], duration_s=1.0)
    metrics = compute_metrics(run.records, duration_s=1.0, num_requests=1, objectives_s={"ttft": 1.0})
    result = json.loads(json_line(result_json(metrics, run, {"request_rate": math.inf})))
    assert result["p99_ttft_ms"] is None
    assert result["request_rate"] == "inf"
    assert result["status"] == "failures"
    assert result["slo_attainment"] == {"ttft": 0.0, "all": 0.0}
    assert "n/a" in format_report(metrics, ("ttft",), {})


def test_report_has_the_layout_of_vllm() -> None:
    metrics = compute_metrics(RECORDS, duration_s=2.0, num_requests=3)
    lines = format_report(metrics, ("ttft",), {"request_rate": 2.0}).splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[1] == f"{'Successful requests:':<40} {2:<10}"
    assert f"{'P99 TTFT (ms):':<40} {298.0:<10.2f}" in lines
    assert "     1 x HTTP 500: no" in lines


def test_objectives() -> None:
    assert parse_objectives(["ttft:1000", "tpot:50.5"], "goodput") == {"ttft": 1.0, "tpot": 0.0505}
    for bad in ("ttft", "ttft:", "speed:5", "ttft:-1", "ttft:nan"):
        with pytest.raises(ConfigError, match="`goodput` takes NAME:MILLISECONDS"):
            parse_objectives([bad], "goodput")
