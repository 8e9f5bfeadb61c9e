"""Metrics of the server process: HTTP requests, the event loop, long-lived tasks, preparation."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from backfill.http.metrics import Families, Instruments
from backfill.preparation.client import PreparationClient

_LAG_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_LAG_INTERVAL_S = 0.01
_LAG_WINDOW_S = 60.0
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


class LoopLag:
    """How late the event loop runs; a late loop delays every stream.

    Sleeps for short intervals and records how much longer each sleep took. The lag of an interval includes
    about 1 ms at rest, from the timer and the operating system's scheduler.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        instruments = Instruments(registry, {"model_name": model_name})
        self._lags = instruments.histogram("event_loop_lag_seconds", "How late the event loop was", _LAG_S)
        instruments.gauge(
            "event_loop_lag_max_seconds", "Largest lag of the event loop in the last minute"
        ).set_function(self.max_s)
        self._maxima: deque[tuple[float, float]] = deque()  # (instant, lag): lags that no later lag reached

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            started_at_s = time.monotonic()
            await asyncio.sleep(_LAG_INTERVAL_S)
            now_s = time.monotonic()
            self.observe(now_s - started_at_s - _LAG_INTERVAL_S, now_s)

    def observe(self, lag_s: float, now_s: float) -> None:
        lag_s = max(0.0, lag_s)
        self._lags.observe(lag_s)
        while self._maxima and self._maxima[-1][1] <= lag_s:
            self._maxima.pop()
        self._maxima.append((now_s, lag_s))
        while self._maxima[0][0] < now_s - _LAG_WINDOW_S:
            self._maxima.popleft()

    def max_s(self) -> float:
        """The largest lag of the last minute."""
        return self._maxima[0][1] if self._maxima else 0.0


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
        yield families.counter(
            "task_failures",
            "Long-lived tasks of the server that ended with an exception",
            self._task_failures,
            "task",
        )
