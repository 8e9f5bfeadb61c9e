"""Metrics with constant labels, which keep values or are read when scraped; the metrics of batches."""

from __future__ import annotations

from collections import Counter as Totals
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from backfill.jobs.open_batch import JobsSnapshot
from backfill.jobs.records import BatchStatus, LineOutcome, TokenUsage

PREFIX = "backfill:"

# Each counter would expose the time of its creation as another series.
disable_created_metrics()  # type: ignore[no-untyped-call]


def exposed(registry: CollectorRegistry, names: Collection[str] = ()) -> bytes:
    """Prometheus text of all samples, or of those with these names, such as ``backfill:step_seconds_sum``."""
    return generate_latest(registry.restricted_registry(names) if names else registry)


@dataclass(frozen=True, slots=True)
class Instruments:
    """Registers metrics that keep their values, with the labels ``constant``.

    One without ``labels`` of its own can be used as it is; of others each child is, see ``labels`` there.
    """

    registry: CollectorRegistry
    constant: Mapping[str, str]

    def histogram(self, name: str, text: str, buckets: Iterable[float], *labels: str) -> Histogram:
        names, bounds = [*self.constant, *labels], sorted(buckets)
        family = Histogram(PREFIX + name, text, names, buckets=bounds, registry=self.registry)
        return family if labels else family.labels(**self.constant)

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        family = Counter(PREFIX + name, text, [*self.constant, *labels], registry=self.registry)
        return family if labels else family.labels(**self.constant)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        family = Gauge(PREFIX + name, text, [*self.constant, *labels], registry=self.registry)
        return family if labels else family.labels(**self.constant)


Samples = Mapping[Any, float] | float | None
"""By the value of a label, or the values of several; without labels a value, or None for no sample."""


@dataclass(frozen=True, slots=True)
class Families:
    """Metrics that a ``Collector`` yields, with the labels ``constant``; counter names lack ``_total``."""

    constant: Mapping[str, str] = field(default_factory=dict)
    prefix: str = PREFIX

    def gauge(self, name: str, text: str, values: Samples, *labels: str) -> Metric:
        return self._family("gauge", name, text, values, labels)

    def counter(self, name: str, text: str, values: Samples, *labels: str) -> Metric:
        return self._family("counter", name, text, values, labels)

    def _family(self, kind: str, name: str, text: str, values: Samples, labels: tuple[str, ...]) -> Metric:
        family = Metric(self.prefix + name, text, kind)
        sample_name = family.name + ("_total" if kind == "counter" else "")
        if values is None:
            return family
        for key, value in (values if isinstance(values, Mapping) else {(): values}).items():
            of_sample = dict(zip(labels, (key,) if isinstance(key, str) else key, strict=True))
            family.add_sample(sample_name, {**self.constant, **of_sample}, float(value))
        return family


class JobMetrics(Collector):
    """Batches and their lines. ``on_lines`` counts; gauges are read when scraped.

    Unlike the other groups it is made before the engine is loaded: batches may end in the meantime.
    """

    def __init__(self, model_name: str) -> None:
        self._families = Families({"model_name": model_name})
        self._snapshot: Callable[[], JobsSnapshot] | None = None
        self._lines: Totals[LineOutcome] = Totals()
        self._tokens = {"input": 0, "cached": 0, "output": 0}

    def watch(self, snapshot: Callable[[], JobsSnapshot]) -> None:
        """Read the gauges from ``snapshot``; before this call there are none."""
        self._snapshot = snapshot

    def show(self, snapshot: JobsSnapshot) -> None:
        """Read the gauges from this one until the next call."""
        self._snapshot = lambda: snapshot

    def on_lines(self, outcome: LineOutcome, num_lines: int, usage: TokenUsage) -> None:
        self._lines[outcome] += num_lines
        self._tokens["input"] += usage.input_tokens
        self._tokens["cached"] += usage.cached_tokens
        self._tokens["output"] += usage.output_tokens

    def collect(self) -> Iterable[Metric]:
        lines = {outcome.value: self._lines[outcome] for outcome in LineOutcome}
        yield self._families.counter("batch_lines", "Lines whose result is on disk", lines, "outcome")
        yield self._families.counter("batch_tokens", "Tokens of completed lines", self._tokens, "kind")
        if self._snapshot is not None:
            yield from self._gauges(self._snapshot())

    def _gauges(self, snapshot: JobsSnapshot) -> Iterable[Metric]:
        num_jobs = {
            status.value: snapshot.jobs_by_status.get(status, 0)
            for status in BatchStatus
            if not status.is_final
        }
        yield self._families.gauge("batch_jobs", "Batches that have not ended", num_jobs, "status")
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
