"""Figures of a run: latencies, throughput, and how many requests met their objectives."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from backfill.bench.cache_figures import CacheFigures, cache_figures
from backfill.bench.record import Outcome, RequestRecord
from backfill.core.errors import ConfigError

# What a request's objectives bound, in seconds.
OBJECTIVES: Mapping[str, Callable[[RequestRecord], float]] = {
    "ttft": lambda record: record.ttft_s,
    "tpot": lambda record: record.tpot_s or 0.0,  # one token meets any TPOT, as in vLLM
    "itl": lambda record: max(record.itls_s, default=0.0),
    "e2el": lambda record: record.latency_s,
}


@dataclass(frozen=True, slots=True)
class Distribution:
    """Statistics of a sample, NaN if it is empty. Percentiles are numpy's, linearly interpolated.

    Attributes:
        percentiles: value of each percentile, by its number.
    """

    count: int
    mean: float
    std: float
    median: float
    percentiles: Mapping[float, float]

    @classmethod
    def of(cls, values: Sequence[float], percentiles: Sequence[float]) -> Distribution:
        if not values:
            return cls(0, math.nan, math.nan, math.nan, dict.fromkeys(percentiles, math.nan))
        sample = np.asarray(values)
        at = np.percentile(sample, list(percentiles)).tolist() if percentiles else []
        return cls(
            len(values),
            float(sample.mean()),
            float(sample.std()),
            float(np.median(sample)),
            dict(zip(percentiles, at, strict=True)),
        )


@dataclass(frozen=True, slots=True)
class Attainment:
    """How many requests met their objectives. Failed and refused requests are misses; requests that the user
    interrupted do not count.

    Attributes:
        by_objective: share of requests, in [0, 1], that met each objective.
        all_met: share of requests that met all objectives.
        num_good: requests that met all objectives.
    """

    by_objective: Mapping[str, float]
    all_met: float
    num_good: int


@dataclass(frozen=True, slots=True)
class Metrics:
    """Figures of a run; docs/benchmarking.md has the formulas.

    Attributes:
        latencies: seconds, over completed requests, by ``ttft``, ``tpot``, ``itl``, ``e2el``,
            ``normalized_latency`` and ``client_queue_time``.
        send_lag: how late the generator was, in seconds, over all requests sent.
        cache: what the server's prefix cache did.
        attainment: None if no objective was given.
        errors: how often each error occurred, most frequent first.
    """

    duration_s: float
    num_requests: int
    num_completed: int
    num_failed: int
    num_interrupted: int
    total_input_tokens: int
    total_output_tokens: int
    peak_output_tokens_per_s: float
    peak_concurrency: int
    latencies: Mapping[str, Distribution]
    send_lag: Distribution
    cache: CacheFigures
    attainment: Attainment | None = None
    errors: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_not_sent(self) -> int:
        return self.num_requests - self.num_completed - self.num_failed - self.num_interrupted

    @property
    def requests_per_s(self) -> float:
        return self._per_s(self.num_completed)

    @property
    def goodput_per_s(self) -> float | None:
        return None if self.attainment is None else self._per_s(self.attainment.num_good)

    @property
    def output_tokens_per_s(self) -> float:
        return self._per_s(self.total_output_tokens)

    @property
    def total_tokens_per_s(self) -> float:
        return self._per_s(self.total_input_tokens + self.total_output_tokens)

    def _per_s(self, amount: float) -> float:
        return amount / self.duration_s if self.duration_s > 0 else math.nan


def compute_metrics(
    records: Sequence[RequestRecord],
    *,
    duration_s: float,
    num_requests: int,
    objectives_s: Mapping[str, float] | None = None,
    percentiles: Sequence[float] = (50, 90, 99),
) -> Metrics:
    """Summarize a run.

    Args:
        records: of all requests that arrived; those still waiting to be sent count as interrupted.
        num_requests: requests that the run was to send.
        objectives_s: bounds in seconds by names of ``OBJECTIVES``.
    """
    completed = [record for record in records if record.outcome is Outcome.COMPLETED]
    failed = [record for record in records if record.outcome is Outcome.FAILED]
    sent = [record for record in records if record.sent_at_s is not None]
    lags = [record.arrived_at_s - record.due_at_s for record in sent]
    latencies = {name: Distribution.of(values, percentiles) for name, values in _samples(completed).items()}
    return Metrics(
        duration_s=duration_s,
        num_requests=num_requests,
        num_completed=len(completed),
        num_failed=len(failed),
        num_interrupted=sum(record.outcome is Outcome.INTERRUPTED for record in records),
        total_input_tokens=sum(record.input_tokens for record in completed),
        total_output_tokens=sum(record.output_tokens for record in completed),
        peak_output_tokens_per_s=float(max(tokens_by_second(completed), default=0.0)),
        peak_concurrency=max((running for _, running in concurrency_steps(sent)), default=0),
        latencies=latencies,
        send_lag=Distribution.of(lags, percentiles),
        cache=cache_figures(completed),
        attainment=_attainment(completed, len(failed), objectives_s) if objectives_s else None,
        errors=dict(Counter(record.error for record in failed).most_common()),
    )


def parse_objectives(pairs: Iterable[str], field: str) -> dict[str, float]:
    """``ttft:1000 tpot:150`` in milliseconds as bounds in seconds by name.

    Raises: ConfigError naming ``field`` for another shape, an unknown name or a bound not above 0.
    """
    objectives: dict[str, float] = {}
    for pair in pairs:
        name, colon, text = pair.partition(":")
        try:
            bound_ms = float(text)
        except ValueError:
            bound_ms = math.nan
        if not colon or name not in OBJECTIVES or not bound_ms > 0:
            raise ConfigError(
                f"`{field}` takes NAME:MILLISECONDS with a name of {', '.join(OBJECTIVES)} and a number "
                f"above 0, got {pair!r}."
            )
        objectives[name] = bound_ms / 1000
    return objectives


def concurrency_steps(records: Iterable[RequestRecord]) -> list[tuple[float, int]]:
    """The time in seconds of each change of the number of requests at the server, and the number after it."""
    changes = []
    for record in records:
        if record.sent_at_s is not None:
            changes += [(record.sent_at_s, 1), (record.sent_at_s + record.ended_after_s, -1)]
    steps, running = [], 0
    for instant, change in sorted(changes):  # ends come before starts at the same time
        running += change
        steps.append((instant, running))
    return steps


def tokens_by_second(records: Iterable[RequestRecord]) -> list[float]:
    """Output tokens received in each second of the run. Each chunk counts as an equal share of the output."""
    instants, weights = [], []
    for record in records:
        if record.chunk_after_s and record.sent_at_s is not None:
            instants += [record.sent_at_s + after for after in record.chunk_after_s]
            share = record.output_tokens / len(record.chunk_after_s)
            weights += [share] * len(record.chunk_after_s)
    if not instants:
        return []
    per_second: list[float] = np.bincount(np.floor(instants).astype(np.int64), weights).tolist()
    return per_second


def _samples(completed: Sequence[RequestRecord]) -> dict[str, list[float]]:
    tpots = (record.tpot_s for record in completed)
    normalized = (record.normalized_latency_s for record in completed)
    return {
        "ttft": [record.ttft_s for record in completed],
        "tpot": [tpot for tpot in tpots if tpot is not None],
        "itl": [gap for record in completed for gap in record.itls_s],
        "e2el": [record.latency_s for record in completed],
        "normalized_latency": [value for value in normalized if value is not None],
        "client_queue_time": [record.queue_time_s for record in completed],
    }


def _attainment(
    completed: Sequence[RequestRecord], num_failed: int, objectives_s: Mapping[str, float]
) -> Attainment:
    num_ended = len(completed) + num_failed
    met = [
        [OBJECTIVES[name](record) <= bound for name, bound in objectives_s.items()] for record in completed
    ]
    num_good = sum(all(row) for row in met)
    shares = {
        name: sum(row[column] for row in met) / num_ended if num_ended else math.nan
        for column, name in enumerate(objectives_s)
    }
    return Attainment(shares, num_good / num_ended if num_ended else math.nan, num_good)
