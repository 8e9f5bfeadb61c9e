"""How late the server's event loop runs. A late loop delays every stream."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from backfill.http.metrics import PREFIX, Families

_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_INTERVAL_S = 0.01
_WINDOW_S = 60.0


class LoopLag(Collector):
    """Sleeps for short intervals and records how much longer each sleep took.

    The lag of an interval includes about 1 ms at rest, from the timer and the operating system's scheduler.

    Args:
        model_name: value of the ``model_name`` label.
    """

    def __init__(self, model_name: str) -> None:
        self._labels = {"model_name": model_name}
        self._counts = [0] * (len(_BOUNDS_S) + 1)
        self._sum_s = 0.0
        self._maxima: deque[tuple[float, float]] = deque()  # (instant, lag): lags that no later lag reached

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            started_at_s = time.monotonic()
            await asyncio.sleep(_INTERVAL_S)
            now_s = time.monotonic()
            self.observe(now_s - started_at_s - _INTERVAL_S, now_s)

    def observe(self, lag_s: float, now_s: float) -> None:
        lag_s = max(0.0, lag_s)
        self._sum_s += lag_s
        self._counts[sum(lag_s > bound for bound in _BOUNDS_S)] += 1
        while self._maxima and self._maxima[-1][1] <= lag_s:
            self._maxima.pop()
        self._maxima.append((now_s, lag_s))
        while self._maxima[0][0] < now_s - _WINDOW_S:
            self._maxima.popleft()

    def max_s(self) -> float:
        """The largest lag of the last minute."""
        return self._maxima[0][1] if self._maxima else 0.0

    def collect(self) -> Iterable[Metric]:
        cumulative, total = [], 0
        for bound, count in zip((*map(str, _BOUNDS_S), "+Inf"), self._counts, strict=True):
            total += count
            cumulative.append((bound, float(total)))
        histogram = HistogramMetricFamily(
            f"{PREFIX}event_loop_lag_seconds", "How late the event loop was", labels=list(self._labels)
        )
        histogram.add_metric(list(self._labels.values()), cumulative, self._sum_s)
        yield histogram
        yield Families(self._labels).gauge(
            "event_loop_lag_max_seconds", "Largest lag of the event loop in the last minute", self.max_s()
        )
