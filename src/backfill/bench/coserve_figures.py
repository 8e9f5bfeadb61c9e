"""Figures of runs of online and offline load: one for each policy, medians over rounds, and timelines."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from backfill.bench.coserve import CoserveRun, Status
from backfill.bench.record import Outcome, RequestRecord
from backfill.bench.scrape import (
    PREEMPTIONS,
    PREFIX_HITS,
    STEP_STOPS,
    Sample,
    computed_share,
    discarded_share,
    gained,
    tokens_at,
)

WINDOW_S = 5.0
# Summed over rounds, since a median could hide a failure.
_COUNTS = (
    "num_online",
    "num_left_out",
    "left_out_s",
    "failed",
    "unfinished",
    "offline_completed",
    "offline_failed",
    "step_stops",
    "preemptions",
    "prefix_hit_tokens",
)


@dataclass(frozen=True, slots=True)
class CoserveFigures:
    """One policy's figures; None if there was nothing to measure or the server does not say.

    Attributes:
        ttft_p50_s, ttft_p99_s: over the online requests due in the measurement. A request without a token at
            the end of the run counts with its wait until then, a lower bound. Latencies and attainment are
            without waits and gaps in which a hypervisor took much of the processors.
        itl_p50_s, itl_p99_s: over all gaps between chunks of these requests.
        tpot_p99_s: over requests, (last - first chunk) / (tokens - 1).
        ttft_attainment: share of requests whose first token met its objective; failed requests missed it.
        itl_attainment: share of gaps that met their objective.
        total_tok_s, online_tok_s, offline_tok_s: tokens of prompts and outputs per second of the measurement.
        tokens_from: who counted the offline tokens: "server" (its counters) or "client" (completed requests).
        recomputed_token_share, discarded_token_share: share of all computed tokens.
        checkpointed_token_share, restored_token_share: tokens whose KV was copied to host memory, and back,
            over all tokens computed.
        prefix_hit_tokens: prompt tokens that the server found in its prefix cache; no two prompts of the load
            begin alike.
        num_online: online requests due in the measurement.
        num_left_out, left_out_s: those of them whose first tokens are left out, and the seconds of which a
            hypervisor took much.
        failed, unfinished: online requests that failed, or had not ended at the end of the run.
    """

    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    itl_p50_s: float | None = None
    itl_p99_s: float | None = None
    tpot_p99_s: float | None = None
    ttft_attainment: float | None = None
    itl_attainment: float | None = None
    total_tok_s: float | None = None
    online_tok_s: float | None = None
    offline_tok_s: float | None = None
    tokens_from: str | None = None
    recomputed_token_share: float | None = None
    discarded_token_share: float | None = None
    checkpointed_token_share: float | None = None
    restored_token_share: float | None = None
    preemptions: int | None = None
    step_stops: int | None = None
    prefix_hit_tokens: int | None = None
    num_online: int = 0
    num_left_out: int = 0
    left_out_s: float = 0.0
    failed: int = 0
    unfinished: int = 0
    offline_completed: int = 0
    offline_failed: int = 0
    measured_s: float = 0.0
    status: str = str(Status.COMPLETE)
    errors: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Timeline:
    """A run over time, in seconds from its start, the warm-up included.

    Attributes:
        ttfts: sending time and TTFT of every online request.
        itl_p99s: end of each window of ``WINDOW_S``, and the P99 of the gaps that ended in it.
        rates: end of each window, and its online and offline tokens per second; offline is None if unknown.
    """

    ttfts: list[tuple[float, float]]
    itl_p99s: list[tuple[float, float]]
    rates: list[tuple[float, float, float | None]]


def figures_of(run: CoserveRun) -> CoserveFigures:
    """The figures of the measurement, or of its part before the run was stopped."""
    load = run.load
    due = [r for r in run.online.records if load.warmup <= r.due_at_s <= run.ended_at_s]
    # Each first token and each gap by itself: long answers meet stolen seconds more often than short ones.
    records = [each for each in due if not _is_disturbed(run, _sent_at_s(each), _waited_s(each))]
    waits = [wait for record in records if (wait := _ttft_s(record, run)) is not None]
    gaps = [
        gap
        for record in due
        for ended_at_s, gap in _gaps(record)
        if not _is_disturbed(run, ended_at_s - gap, gap)
    ]
    tpots = [
        each.tpot_s
        for each in due
        if each.outcome is Outcome.COMPLETED
        and each.tpot_s is not None
        and not _is_disturbed(run, _sent_at_s(each), each.ended_after_s)
    ]
    # The requests that a partial run interrupted have neither met nor missed their objective.
    judged = [r for r in records if r.chunk_after_s or _is_judged(r, run)]
    in_time = sum(bool(r.chunk_after_s) and r.ttft_s <= load.ttft_slo for r in judged)
    # The last sample is requested at the end and arrives a little later.
    samples = [s for s in run.samples if load.warmup <= s.at_s <= run.ended_at_s + 1.0]
    return CoserveFigures(
        **_rates(run),
        ttft_p50_s=_percentile(waits, 50),
        ttft_p99_s=_percentile(waits, 99),
        itl_p50_s=_percentile(gaps, 50),
        itl_p99_s=_percentile(gaps, 99),
        tpot_p99_s=_percentile(tpots, 99),
        ttft_attainment=in_time / len(judged) if judged else None,
        itl_attainment=sum(gap <= load.tpot_slo for gap in gaps) / len(gaps) if gaps else None,
        recomputed_token_share=computed_share(samples, "backfill:recomputed_tokens_total"),
        discarded_token_share=discarded_share(samples),
        checkpointed_token_share=computed_share(samples, "backfill:checkpointed_tokens_total"),
        restored_token_share=computed_share(samples, "backfill:restored_tokens_total"),
        preemptions=_count(samples, PREEMPTIONS),
        step_stops=_count(samples, STEP_STOPS),
        prefix_hit_tokens=_count(samples, *PREFIX_HITS),
        num_online=len(due),
        num_left_out=len(due) - len(records),
        left_out_s=sum(
            max(0.0, min(end_s, run.ended_at_s) - max(start_s, load.warmup)) for start_s, end_s in run.stolen
        ),
        failed=sum(record.outcome is Outcome.FAILED for record in due),
        unfinished=sum(record.outcome is Outcome.INTERRUPTED for record in due),
        offline_completed=run.offline.num_completed,
        offline_failed=run.offline.num_failed,
        measured_s=max(run.ended_at_s - load.warmup, 0.0),
        status=str(run.status),
        errors=_errors(due, run),
    )


def median_figures(rounds: Sequence[CoserveFigures]) -> CoserveFigures:
    """Medians over rounds. Counts are summed. One partial round makes the result partial."""
    merged: dict[str, Any] = {}
    for name in (each.name for each in fields(CoserveFigures)):
        values = [value for each in rounds if (value := getattr(each, name)) is not None]
        if name in _COUNTS:
            merged[name] = sum(values) if values else None
        elif name == "errors":
            merged[name] = dict(sum(map(Counter, values), Counter[str]()))
        elif name == "status":
            merged[name] = next((value for value in values if value != Status.COMPLETE), values[0])
        elif name == "tokens_from":
            merged[name] = "client" if "client" in values else next(iter(values), None)
        else:
            merged[name] = statistics.median(values) if values else None
    return CoserveFigures(**merged)


def policy_json(rounds: Sequence[CoserveFigures], baselines: Mapping[str, CoserveFigures]) -> dict[str, Any]:
    """One policy's entry of the result.

    Args:
        baselines: figures by policy, for the ratios.
    """
    figures = median_figures(rounds)
    entry = {
        **asdict(figures),
        "ttft_p99_over_online_only": ratio(figures, baselines.get("online-only"), "ttft_p99_s"),
        "total_tok_s_over_fcfs": ratio(figures, baselines.get("fcfs"), "total_tok_s"),
    }
    if len(rounds) > 1:
        entry["rounds"] = [asdict(each) for each in rounds]
    return entry


def ratio(figures: CoserveFigures, baseline: CoserveFigures | None, name: str) -> float | None:
    """A figure over the baseline's; None if one of them is missing."""
    ours = getattr(figures, name)
    theirs = None if baseline is None else getattr(baseline, name)
    return ours / theirs if ours is not None and theirs else None


def timeline_of(run: CoserveRun) -> Timeline:
    """The run in windows, up to the end of the measurement."""
    records = run.online.records
    gaps = [each for record in records for each in _gaps(record)]
    edges = np.arange(0.0, run.ended_at_s + 1e-6, WINDOW_S).tolist()
    online = _online_tokens(records, edges)
    itl_p99s, rates = [], []
    for index, (start_s, end_s) in enumerate(itertools.pairwise(edges)):
        worst = _percentile([gap for at_s, gap in gaps if start_s <= at_s < end_s], 99)
        if worst is not None:
            itl_p99s.append((end_s, worst))
        offline = _offline_tokens(run, start_s, end_s, online[index])[0]
        rates.append((end_s, online[index] / WINDOW_S, None if offline is None else offline / WINDOW_S))
    ttfts = [(record.sent_at_s or 0.0, record.ttft_s) for record in records if record.chunk_after_s]
    return Timeline(ttfts, itl_p99s, rates)


def _count(samples: Sequence[Sample], *names: str) -> int | None:
    gain = gained(samples, *names)
    return None if gain is None else round(gain)


def _rates(run: CoserveRun) -> dict[str, Any]:
    """Tokens per second of the measurement, and who counted the offline ones; empty if it had not begun."""
    start_s, end_s = run.load.warmup, run.ended_at_s
    if end_s <= start_s:
        return {}
    online = _online_tokens(run.online.records, [start_s, end_s])[0]
    offline, source = _offline_tokens(run, start_s, end_s, online)
    seconds = end_s - start_s
    found = {"online_tok_s": online / seconds, "tokens_from": source}
    if offline is not None:
        found |= {"offline_tok_s": offline / seconds, "total_tok_s": (online + offline) / seconds}
    return found


def _offline_tokens(
    run: CoserveRun, start_s: float, end_s: float, online_tokens: float
) -> tuple[float | None, str | None]:
    """Offline tokens within [start_s, end_s], and who counted them."""
    if run.load.offline_mode == "none":
        return 0.0, None
    totals = tokens_at(run.samples, [start_s, end_s])
    if totals is not None:
        # The server counts a prompt's tokens as it computes them, the client all of them with the first
        # token. The difference can be below 0 in a short window.
        return max(totals[1] - totals[0] - online_tokens, 0.0), "server"
    return run.offline.tokens_between(start_s, end_s), "client"


def _online_tokens(records: Sequence[RequestRecord], edges_s: Sequence[float]) -> list[float]:
    """Tokens in each window between edges. A prompt counts with its first chunk, an output by its chunks."""
    instants: list[float] = []
    weights: list[float] = []
    for record in records:
        if record.chunk_after_s and record.sent_at_s is not None:
            share = record.output_tokens / len(record.chunk_after_s)
            instants += [record.sent_at_s + after for after in record.chunk_after_s]
            weights += [record.input_tokens + share] + [share] * (len(record.chunk_after_s) - 1)
    counts: list[float] = np.histogram(instants, bins=list(edges_s), weights=weights)[0].tolist()
    return counts


def _ttft_s(record: RequestRecord, run: CoserveRun) -> float | None:
    if record.chunk_after_s:
        return record.ttft_s
    return record.ended_after_s if _is_judged(record, run) and record.outcome is not Outcome.FAILED else None


def _is_judged(record: RequestRecord, run: CoserveRun) -> bool:
    """Whether a request without a first token has missed its objective; False if it was only interrupted."""
    if record.outcome is Outcome.FAILED:
        return True
    has_ended = record.outcome is Outcome.INTERRUPTED and record.sent_at_s is not None
    return has_ended and (run.status is Status.COMPLETE or record.ended_after_s > run.load.ttft_slo)


def _sent_at_s(record: RequestRecord) -> float:
    return record.due_at_s if record.sent_at_s is None else record.sent_at_s


def _waited_s(record: RequestRecord) -> float:
    """For its first token, or in vain."""
    return record.chunk_after_s[0] if record.chunk_after_s else record.ended_after_s


def _is_disturbed(run: CoserveRun, since_s: float, seconds: float) -> bool:
    """Whether a hypervisor took much of the processors in this time."""
    return any(start_s < since_s + seconds and since_s < end_s for start_s, end_s in run.stolen)


def _gaps(record: RequestRecord) -> Iterator[tuple[float, float]]:
    """End and length of every gap, in seconds from the start of the run."""
    for after, gap in zip(record.chunk_after_s[1:], record.itls_s, strict=True):
        yield (record.sent_at_s or 0.0) + after, gap


def _errors(records: Sequence[RequestRecord], run: CoserveRun) -> dict[str, int]:
    """The ten most frequent errors of both classes, with their counts."""
    online = Counter(record.error for record in records if record.outcome is Outcome.FAILED)
    return dict((online + run.offline.errors).most_common(10))


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None
