"""The load of a run, what is read of the server, and the figures."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

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
from backfill.bench.coserve_load import CoserveLoad, LengthRange
from backfill.bench.coserve_result import draw
from backfill.bench.offline import OfflineLoad
from backfill.bench.record import Outcome, RequestRecord
from backfill.bench.runner import Run
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
from backfill.core.errors import ConfigError

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


def test_waits_and_gaps_while_a_hypervisor_took_much_are_left_out() -> None:
    records = [
        record(6.0, 0.5, 0.6),
        record(7.0, 0.9, 3.0),  # its last gap
        record(9.5, 2.0, 2.1),  # its first token
        record(12.0, 0.5, 0.6),
        record(9.2, outcome=Outcome.FAILED),
    ]
    run = run_of(*records)
    run.stolen = [(1.0, 2.0), (9.0, 10.0), (13.0, 14.0)]  # the first in the warm-up
    figures = figures_of(run)
    assert (figures.num_online, figures.num_left_out, figures.left_out_s) == (5, 2, 2.0)
    assert figures.ttft_p99_s == pytest.approx(0.9, rel=0.02) and figures.ttft_attainment == 1.0
    assert figures.itl_p99_s == pytest.approx(0.1) and figures.itl_attainment == 1.0
    assert figures.tpot_p99_s == pytest.approx(0.1), "of what ran in none of these seconds"
    assert figures.failed == 1, "whatever the hypervisor did"
    merged = median_figures([figures, figures])
    assert (merged.num_left_out, merged.left_out_s) == (4, 4.0)


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
        ({"duration": 0.0}, "`duration` must be above 0, got 0"),
        ({"rate": math.inf}, "`rate` must be finite and above 0, got inf"),
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
