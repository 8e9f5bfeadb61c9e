from __future__ import annotations

import json
from pathlib import Path

import pytest

from backfill.bench.coserve import CoserveRun, Status
from backfill.bench.coserve_figures import (
    CoserveFigures,
    Timeline,
    figures_of,
    median_figures,
    policy_json,
    timeline_of,
)
from backfill.bench.coserve_load import CoserveLoad
from backfill.bench.coserve_result import draw
from backfill.bench.offline import OfflineLoad
from backfill.bench.record import Outcome, RequestRecord
from backfill.bench.runner import Run
from backfill.bench.scrape import Sample

LOAD = CoserveLoad(duration=10.0, warmup=5.0, ttft_slo=1.0, tpot_slo=0.15)


def record(sent_at_s: float, *chunks: float, outcome: Outcome = Outcome.COMPLETED) -> RequestRecord:
    made = RequestRecord(sent_at_s, 100, sent_at_s, list(chunks), len(chunks), outcome=outcome)
    made.ended_after_s = chunks[-1] if chunks else 4.0
    return made


def run_of(
    *records: RequestRecord, status: Status = Status.COMPLETE, tokens_per_s: float = 0.0
) -> CoserveRun:
    online = Run(len(records), 0.0, list(records))
    samples = [
        Sample(at, {"vllm:prompt_tokens_total": tokens_per_s * at})
        for at in (0.0, 5.0, 10.0, 15.0)
        if tokens_per_s
    ]
    return CoserveRun(LOAD, "m", online, OfflineLoad(), samples, status, ended_at_s=15.0)


def test_only_what_is_due_in_the_measurement_counts() -> None:
    figures = figures_of(run_of(record(1.0, 9.0), record(5.0, 0.5, 0.6), record(14.0, 2.0, 2.3, 2.4)))
    assert figures.num_online == 2
    assert figures.ttft_p50_s == pytest.approx(1.25)
    assert figures.ttft_attainment == 0.5
    assert figures.itl_p50_s == pytest.approx(0.1)
    assert figures.itl_attainment == pytest.approx(2 / 3)


def test_tokens_are_those_of_the_measurement() -> None:
    # The first began in the warm-up: its prompt and first token count there. The last ends afterwards.
    records = [record(4.0, 0.5, 1.5), record(6.0, 1.0), record(14.5, 0.25, 2.0)]
    figures = figures_of(run_of(*records, tokens_per_s=50.0))
    assert figures.online_tok_s == pytest.approx((1 + 101 + 101) / 10)
    assert figures.total_tok_s == pytest.approx(50.0) and figures.tokens_from == "server"
    assert figures.offline_tok_s == pytest.approx(50.0 - 20.3)


@pytest.mark.parametrize("name", ["backfill:prefix_cache_hits_total", "vllm:prefix_cache_hits_total"])
def test_hits_of_the_measurement_in_the_prefix_cache_are_reported(name: str) -> None:
    run = run_of(record(6.0, 0.5))
    assert figures_of(run).prefix_hit_tokens is None
    run.samples = [Sample(at, {name: hits}) for at, hits in ((0.0, 7.0), (5.0, 16.0), (15.0, 48.0))]
    figures = figures_of(run)
    assert figures.prefix_hit_tokens == 32
    assert median_figures([figures, figures]).prefix_hit_tokens == 64


def test_failed_requests_miss_and_broken_off_ones_wait() -> None:
    records = [
        record(6.0, 0.5),
        record(7.0, outcome=Outcome.FAILED),
        record(8.0, outcome=Outcome.INTERRUPTED),
    ]
    figures = figures_of(run_of(*records))
    assert (figures.failed, figures.unfinished) == (1, 1)
    assert figures.ttft_attainment == pytest.approx(1 / 3)
    assert figures.ttft_p99_s == pytest.approx(4.0, rel=0.02)
    assert figures.errors == {"": 1}


def test_nothing_measured_is_null() -> None:
    run = run_of()
    run.ended_at_s = 2.0
    figures = figures_of(run)
    assert figures.ttft_p99_s is None and figures.total_tok_s is None and figures.measured_s == 0.0
    assert timeline_of(run).rates == []
    json.dumps(policy_json([figures], {}), allow_nan=False)


def test_medians_ratios_and_sums() -> None:
    rounds = [
        CoserveFigures(ttft_p99_s=value, total_tok_s=100.0, failed=1, num_online=5, errors={"x": 1})
        for value in (3.0, 1.0, 2.0)
    ]
    merged = median_figures(rounds)
    assert (merged.ttft_p99_s, merged.failed, merged.num_online, merged.errors) == (2.0, 3, 15, {"x": 3})
    baselines = {"online-only": CoserveFigures(ttft_p99_s=1.0), "fcfs": CoserveFigures(total_tok_s=200.0)}
    entry = policy_json(rounds, baselines)
    assert entry["ttft_p99_over_online_only"] == 2.0 and entry["total_tok_s_over_fcfs"] == 0.5
    assert len(entry["rounds"]) == 3
    alone = policy_json(rounds[:1], {})
    assert alone["ttft_p99_over_online_only"] is None and "rounds" not in alone


def test_a_partial_round_marks_the_whole() -> None:
    rounds = [CoserveFigures(), CoserveFigures(status="server lost"), CoserveFigures()]
    assert median_figures(rounds).status == "server lost"


def test_a_timeline_counts_in_windows(tmp_path: Path) -> None:
    timeline = timeline_of(run_of(record(1.0, 0.5, 0.75), record(6.0, 1.0, 1.5), tokens_per_s=50.0))
    assert timeline.ttfts == [(1.0, 0.5), (6.0, 1.0)]
    assert timeline.itl_p99s == [(5.0, 0.25), (10.0, 0.5)]
    assert [window[0] for window in timeline.rates] == [5.0, 10.0, 15.0]
    assert timeline.rates[0][1:] == (pytest.approx(102 / 5), pytest.approx(50 - 102 / 5))
    unknown = Timeline([], [], [(5.0, 1.0, None)])
    path = tmp_path / "plot.png"
    draw(path, {"slo": timeline, "another": unknown, "third": timeline}, LOAD, "title")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_offline_load_all_tokens_are_online() -> None:
    run = run_of(record(6.0, 1.0), tokens_per_s=70.0)
    run.load = CoserveLoad(duration=10.0, warmup=5.0, offline_mode="none")
    figures = figures_of(run)
    assert figures.offline_tok_s == 0.0 and figures.total_tok_s == figures.online_tok_s == pytest.approx(10.1)
