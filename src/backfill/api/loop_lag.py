"""How late the server's event loop is: what holds it up holds up every stream."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)

_INTERVAL_S = 0.01
_WINDOW_S = 60.0


class LoopLag(Collector):
    """Sleeps for short intervals and notes how much longer each took.

    The lag of an interval includes what the timer and the scheduler of the machine add, about 1 ms at rest.

    Args:
        model_name: value of the ``model_name`` label.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._counts = [0] * (len(LAG_BUCKETS) + 1)
        self._sum_s = 0.0
        self._recent: deque[tuple[float, float]] = deque()  # (instant, lag) where no later one is as large

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
        self._counts[sum(lag_s > bound for bound in LAG_BUCKETS)] += 1
        while self._recent and self._recent[-1][1] <= lag_s:
            self._recent.pop()
        self._recent.append((now_s, lag_s))
        while self._recent[0][0] < now_s - _WINDOW_S:
            self._recent.popleft()

    def max_s(self) -> float:
        """The largest lag of the last minute."""
        return self._recent[0][1] if self._recent else 0.0

    def collect(self) -> Iterable[Metric]:
        labels, values = ["model_name"], [self._model_name]
        buckets, total = [], 0
        for bound, count in zip((*map(str, LAG_BUCKETS), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        histogram = HistogramMetricFamily(
            "backfill:event_loop_lag_seconds", "How late the server's event loop was", labels=labels
        )
        histogram.add_metric(values, buckets, self._sum_s)
        yield histogram
        gauge = GaugeMetricFamily(
            "backfill:event_loop_lag_max_seconds", "The largest of the last minute", labels=labels
        )
        gauge.add_metric(values, self.max_s())
        yield gauge
