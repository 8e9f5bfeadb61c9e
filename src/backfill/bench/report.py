"""A run on the console, in the layout of ``vllm bench serve``, and as JSON with its keys and ours."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from backfill.bench.cache_figures import CacheFigures
from backfill.bench.metrics import Distribution, Metrics
from backfill.bench.record import Outcome, RequestRecord
from backfill.bench.runner import Run

TITLES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "normalized_latency": ("Normalized Latency", "E2EL per Output Token"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
}
# More than a timer's granularity and a turn of the event loop explain.
_LATE_S = 0.010
# Two different prompts of random tokens may begin with some equal ones.
_FOREIGN_SHARE = 0.01


def format_report(metrics: Metrics, shown: Sequence[str], settings: Mapping[str, Any]) -> str:
    """The console report.

    Args:
        shown: names of ``TITLES`` to print blocks of.
        settings: of the run; ``request_rate`` and ``max_concurrency`` are printed if they limit anything.
    """
    lines = [f"{' Serving Benchmark Result ':=^50}", *_totals(metrics, settings)]
    names = [name for name in TITLES if name in shown or (name == "client_queue_time" and _queued(metrics))]
    for name in names:
        lines += _block(name, metrics.latencies[name])
    lines += _cache_block(metrics.cache)
    lines += _attainment_block(metrics)
    if metrics.errors:
        lines.append(f"{'Errors':-^50}")
        lines += [f"{count:>6} x {error}" for error, count in list(metrics.errors.items())[:10]]
    lines.append("=" * 50)
    if (lag := metrics.send_lag.percentiles.get(99, math.nan)) > _LATE_S:
        lines.append(
            f"Warning: the generator sent 1 % of requests {lag * 1000:.0f} ms late or more; the load offered "
            "was below the one asked for."
        )
    if (foreign := metrics.cache.foreign_tokens or 0) > _FOREIGN_SHARE * metrics.cache.input_tokens:
        lines.append(
            f"Warning: {foreign} prompt tokens came from the server's cache that this run had not sent: an "
            "earlier run probably sent the same prompts. Another --seed gives other prompts."
        )
    return "\n".join(lines)


def result_json(
    metrics: Metrics, run: Run, settings: Mapping[str, Any], *, is_detailed: bool = False
) -> dict[str, Any]:
    """The result as JSON. A figure with nothing to measure is null.

    Args:
        settings: of the run; they come first.
        is_detailed: with lists of one entry for each request.
    """
    result: dict[str, Any] = {
        **settings,
        "status": status_of(metrics, run),
        "duration": metrics.duration_s,
        "completed": metrics.num_completed,
        "failed": metrics.num_failed,
        "interrupted": metrics.num_interrupted,
        "not_sent": metrics.num_not_sent,
        "total_input_tokens": metrics.total_input_tokens,
        "total_output_tokens": metrics.total_output_tokens,
        "request_throughput": metrics.requests_per_s,
        "request_goodput": metrics.goodput_per_s,
        "output_throughput": metrics.output_tokens_per_s,
        "total_token_throughput": metrics.total_tokens_per_s,
        "max_output_tokens_per_s": metrics.peak_output_tokens_per_s,
        "max_concurrent_requests": metrics.peak_concurrency,
    }
    for name, latency in metrics.latencies.items():
        result |= _latency_keys(name, latency)
    result |= _latency_keys("send_lag", metrics.send_lag)
    if metrics.attainment is not None:
        shares = {**metrics.attainment.by_objective, "all": metrics.attainment.all_met}
        result["slo_attainment"] = shares
    result |= _cache_keys(metrics.cache)
    result["error_counts"] = dict(metrics.errors)
    result |= _probe_keys(run.probes)
    if is_detailed:
        result |= _details(run.records)
    finite: dict[str, Any] = _finite(result)
    return finite


def status_of(metrics: Metrics, run: Run) -> str:
    """``complete``, or a partial result: ``interrupted`` or ``failures``."""
    if run.is_interrupted:
        return "interrupted"
    return "failures" if metrics.num_failed else "complete"


def json_line(result: Mapping[str, Any]) -> str:
    return json.dumps(result, ensure_ascii=False, allow_nan=False)


def _totals(metrics: Metrics, settings: Mapping[str, Any]) -> list[str]:
    rows: list[tuple[str, float | int | None]] = [
        ("Successful requests:", metrics.num_completed),
        ("Failed requests:", metrics.num_failed),
        ("Interrupted requests:", metrics.num_interrupted or None),
        ("Requests not sent:", metrics.num_not_sent or None),
        ("Maximum request concurrency:", settings.get("max_concurrency")),
        ("Request rate configured (RPS):", _number(settings.get("request_rate"))),
        ("Benchmark duration (s):", metrics.duration_s),
        ("Total input tokens:", metrics.total_input_tokens),
        ("Total generated tokens:", metrics.total_output_tokens),
        ("Request throughput (req/s):", metrics.requests_per_s),
        ("Request goodput (req/s):", metrics.goodput_per_s),
        ("Output token throughput (tok/s):", metrics.output_tokens_per_s),
        ("Peak output token throughput (tok/s):", metrics.peak_output_tokens_per_s),
        ("Peak concurrent requests:", metrics.peak_concurrency),
        ("Total token throughput (tok/s):", metrics.total_tokens_per_s),
    ]
    return [_row(label, value) for label, value in rows if value is not None]


def _block(name: str, latency: Distribution) -> list[str]:
    label, title = TITLES[name]
    lines = [
        f"{title:-^50}",
        _row(f"Mean {label} (ms):", latency.mean * 1000),
        _row(f"Median {label} (ms):", latency.median * 1000),
    ]
    # The median already says P50.
    return lines + [
        _row(f"P{percentile:g} {label} (ms):", value * 1000)
        for percentile, value in latency.percentiles.items()
        if percentile != 50
    ]


def _attainment_block(metrics: Metrics) -> list[str]:
    if metrics.attainment is None:
        return []
    shares = metrics.attainment.by_objective
    rows = [_row(f"{name.upper()} met (%):", share * 100) for name, share in shares.items()]
    return [f"{'SLO Attainment':-^50}", *rows, _row("All met (%):", metrics.attainment.all_met * 100)]


def _cache_block(cache: CacheFigures) -> list[str]:
    if cache.input_tokens == 0:
        return []
    lines = [
        f"{'Prefix Cache':-^50}",
        _row("Cached prompt tokens:", _reported(cache.cached_tokens)),
        _row("Hit rate (% of prompt tokens):", _reported(_percent(cache.hit_rate))),
    ]
    if cache.shared_rate is not None:
        lines.append(_row("Highest hit rate of this load (%):", cache.shared_rate * 100))
    if cache.turns:
        lines.append(f"{'Turn':>6} {'Requests':>9} {'Median TTFT (ms)':>17} {'Hit rate (%)':>15}")
        lines += [
            f"{turn.turn:>6} {turn.num_completed:>9} {turn.median_ttft_s * 1000:>17.2f} "
            f"{_text(_reported(_percent(turn.hit_rate))):>15}"
            for turn in cache.turns
        ]
    return lines


def _percent(share: float | None) -> float | None:
    return None if share is None else share * 100


def _reported(value: float | int | None) -> float | int | str:
    return "not reported" if value is None else value


def _cache_keys(cache: CacheFigures) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "total_cached_tokens": cache.cached_tokens,
        "cache_hit_rate": cache.hit_rate,
        "highest_cache_hit_rate": cache.shared_rate,
        "foreign_cached_tokens": cache.foreign_tokens,
    }
    if cache.turns:
        keys["by_turn"] = [
            {
                "turn": turn.turn,
                "completed": turn.num_completed,
                "median_ttft_ms": turn.median_ttft_s * 1000,
                "input_tokens": turn.input_tokens,
                "cached_tokens": turn.cached_tokens,
                "cache_hit_rate": turn.hit_rate,
            }
            for turn in cache.turns
        ]
    return keys


def _queued(metrics: Metrics) -> bool:
    # Without a limit, requests wait for a turn of the event loop.
    return metrics.latencies["client_queue_time"].mean > 0.001


def _row(label: str, value: float | int | str) -> str:
    return f"{label:<40} {_text(value):<10}"


def _text(value: float | int | str) -> str:
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return text.replace("nan", "n/a")


def _number(value: Any) -> float | None:
    return value if isinstance(value, float) and math.isfinite(value) else None


def _latency_keys(name: str, latency: Distribution) -> dict[str, float]:
    keys = {
        f"mean_{name}_ms": latency.mean * 1000,
        f"median_{name}_ms": latency.median * 1000,
        f"std_{name}_ms": latency.std * 1000,
    }
    for percentile, value in latency.percentiles.items():
        keys[f"p{percentile:g}_{name}_ms"] = value * 1000
    return keys


def _probe_keys(probes: Sequence[RequestRecord]) -> dict[str, float]:
    if not probes:
        return {}
    latencies = [probe.latency_s for probe in probes if probe.outcome is Outcome.COMPLETED]
    seen = Distribution.of(latencies, (99, 100))
    return {
        "probe_completed": seen.count,
        "probe_failed": len(probes) - seen.count,
        "probe_median_e2el_ms": seen.median * 1000,
        "probe_p99_e2el_ms": seen.percentiles[99] * 1000,
        "probe_max_e2el_ms": seen.percentiles[100] * 1000,
    }


def _details(records: Sequence[RequestRecord]) -> dict[str, list[Any]]:
    """Lists of one entry for each request: vLLM's keys and ours, times in seconds."""
    return {
        "input_lens": [record.input_tokens for record in records],
        "output_lens": [record.output_tokens for record in records],
        "cached_lens": [record.cached_tokens for record in records],
        "turns": [record.turn for record in records],
        "ttfts": [record.ttft_s for record in records],
        "itls": [record.itls_s for record in records],
        "latencies": [record.latency_s for record in records],
        "start_times": [record.sent_at_s for record in records],
        "due_times": [record.due_at_s for record in records],
        "queue_times": [record.queue_time_s for record in records],
        "outcomes": [record.outcome.value for record in records],
        "generated_texts": [record.text for record in records],
        "errors": [record.error for record in records],
    }


def _finite(value: Any) -> Any:
    """The value with NaN as None and infinity as "inf", since JSON has neither."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "inf"
    return value
