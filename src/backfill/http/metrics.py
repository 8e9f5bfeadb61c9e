"""Metrics with constant labels: instruments that keep values, and families that are read when scraped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import Metric

PREFIX = "backfill:"

# Each counter would expose the time of its creation as another series.
disable_created_metrics()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Instruments:
    """Registers metrics that keep their values. Their labels are ``constant`` and those given by name."""

    registry: CollectorRegistry
    constant: Mapping[str, str]

    def histogram(self, name: str, text: str, buckets: Iterable[float], *labels: str) -> Histogram:
        names, bounds = [*self.constant, *labels], sorted(buckets)
        return Histogram(PREFIX + name, text, names, buckets=bounds, registry=self.registry)

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, [*self.constant, *labels], registry=self.registry)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(PREFIX + name, text, [*self.constant, *labels], registry=self.registry)


@dataclass(frozen=True, slots=True)
class Families:
    """Metrics that a ``Collector`` yields, with the labels ``constant``; counter names lack ``_total``."""

    constant: Mapping[str, str] = field(default_factory=dict)
    prefix: str = PREFIX

    def gauge(self, name: str, text: str, value: float | None) -> Metric:
        """Without a sample where ``value`` is None."""
        return self._family("gauge", name, text, [] if value is None else [({}, value)])

    def counter(self, name: str, text: str, value: float) -> Metric:
        return self._family("counter", name, text, [({}, value)])

    def gauge_by(self, label: str, name: str, text: str, values: Mapping[str, float]) -> Metric:
        """With a sample for each value of ``label``, the keys of ``values``."""
        return self._family("gauge", name, text, [({label: key}, value) for key, value in values.items()])

    def counter_by(self, label: str, name: str, text: str, values: Mapping[str, float]) -> Metric:
        """With a sample for each value of ``label``, the keys of ``values``."""
        return self._family("counter", name, text, [({label: key}, value) for key, value in values.items()])

    def counter_by_all(
        self, label_names: Sequence[str], name: str, text: str, values: Mapping[tuple[str, ...], float]
    ) -> Metric:
        """With a sample for each tuple of labels' values, the keys of ``values``."""
        samples = [(dict(zip(label_names, key, strict=True)), value) for key, value in values.items()]
        return self._family("counter", name, text, samples)

    def _family(
        self, kind: str, name: str, text: str, samples: Iterable[tuple[Mapping[str, str], float]]
    ) -> Metric:
        family = Metric(self.prefix + name, text, kind)
        sample_name = family.name + ("_total" if kind == "counter" else "")
        for labels, value in samples:
            family.add_sample(sample_name, {**self.constant, **labels}, float(value))
        return family
