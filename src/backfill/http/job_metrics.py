"""Metrics of batches and their lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from backfill.http.metrics import Families
from backfill.jobs.manager import JobsSnapshot
from backfill.jobs.records import BatchStatus, LineOutcome, TokenUsage


class JobMetrics(Collector):
    """Batches and their lines. A ``jobs`` JobObserver; gauges are read when scraped.

    Unlike the other groups it is made before the engine is loaded: batches may end in the meantime.
    """

    def __init__(self, model_name: str) -> None:
        self._families = Families({"model_name": model_name})
        self._snapshot: Callable[[], JobsSnapshot] | None = None
        self._lines: Counter[LineOutcome] = Counter()
        self._tokens = {"input": 0, "cached": 0, "output": 0}

    def watch(self, snapshot: Callable[[], JobsSnapshot]) -> None:
        """Read the gauges from ``snapshot``; before this call there are none."""
        self._snapshot = snapshot

    def on_lines(self, outcome: LineOutcome, num_lines: int, usage: TokenUsage) -> None:
        self._lines[outcome] += num_lines
        self._tokens["input"] += usage.input_tokens
        self._tokens["cached"] += usage.cached_tokens
        self._tokens["output"] += usage.output_tokens

    def collect(self) -> Iterable[Metric]:
        lines = {outcome.value: self._lines[outcome] for outcome in LineOutcome}
        yield self._families.counter_by("outcome", "batch_lines", "Lines whose result is on disk", lines)
        yield self._families.counter_by("kind", "batch_tokens", "Tokens of completed lines", self._tokens)
        if self._snapshot is not None:
            yield from self._gauges(self._snapshot())

    def _gauges(self, snapshot: JobsSnapshot) -> Iterable[Metric]:
        num_jobs = {
            status.value: snapshot.jobs_by_status.get(status, 0)
            for status in BatchStatus
            if not status.is_final
        }
        yield self._families.gauge_by("status", "batch_jobs", "Batches that have not ended", num_jobs)
        yield self._families.gauge(
            "batch_lines_queued", "Lines of open batches that have no result yet", snapshot.num_lines_queued
        )
        yield self._families.gauge(
            "batch_oldest_line_seconds",
            "Age of the oldest batch with unfinished lines",
            snapshot.oldest_line_s,
        )
        yield self._families.gauge(
            "batch_deadline_slack_seconds",
            "Time to the nearest end of a completion window",
            snapshot.least_slack_s,
        )
