"""Metrics of the server process: HTTP requests, long-lived tasks, the preparation processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from backfill.http.metrics import Families
from backfill.preparation.client import PreparationClient

_HTTP_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class HttpMetrics:
    """HTTP requests by route, under the names of prometheus-fastapi-instrumentator."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "http_requests", "HTTP requests", ["method", "handler", "status"], registry=registry
        )
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "Duration of HTTP requests to the end of the response",
            ["method", "handler"],
            buckets=_HTTP_S,
            registry=registry,
        )

    def on_request(self, method: str, handler: str, status: int, duration_s: float) -> None:
        self._requests.labels(method, handler, str(status)).inc()
        self._seconds.labels(method, handler).observe(duration_s)


class ProcessMetrics(Collector):
    """The processes that prepare large request bodies and batch lines, and the server's long-lived tasks.

    Args:
        preparation: its state is read when scraped.
        task_failures: how often each task, by name, ended with an exception; read when scraped.
    """

    def __init__(self, preparation: PreparationClient | None, task_failures: Mapping[str, int]) -> None:
        self._preparation = preparation
        self._task_failures = task_failures

    def collect(self) -> Iterable[Metric]:
        families, preparation = Families(), self._preparation
        if preparation is not None:
            yield families.gauge(
                "preparation_up", "1 while the preparation processes are ready", preparation.is_up
            )
            yield families.counter(
                "preparation_deaths", "Preparation processes that ended unexpectedly", preparation.num_deaths
            )
        yield families.counter_by(
            "task",
            "task_failures",
            "Long-lived tasks of the server that ended with an exception",
            self._task_failures,
        )
