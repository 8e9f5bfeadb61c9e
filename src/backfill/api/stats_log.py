"""A line in the log every few seconds while the server works; silence when it idles."""

from __future__ import annotations

import asyncio
import logging

from backfill.core.request import ServiceClass
from backfill.engine.messages import EngineStats, StepReport

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0


class StatsLog:
    """Adds up step reports and writes their rates."""

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._num_output_tokens = 0
        self._num_computed_tokens = 0
        self._last: EngineStats | None = None

    def on_report(self, report: StepReport) -> None:
        self._last = report.stats
        num_sampled = sum(output.token_id is not None for output in report.outputs)
        self._num_output_tokens += num_sampled
        step = report.stats.step
        self._num_computed_tokens += 0 if step.stopped else step.num_tokens

    async def run(self) -> None:
        """Log until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            if self._last is not None and self._num_computed_tokens > 0:
                logger.info("%s", self._line(self._last))
            self._num_output_tokens = self._num_computed_tokens = 0

    def _line(self, stats: EngineStats) -> str:
        by_class = ((ServiceClass.ONLINE, stats.online), (ServiceClass.OFFLINE, stats.offline))
        queues = ", ".join(
            f"{which.value} {state.num_running} running {state.num_waiting} waiting"
            for which, state in by_class
        )
        return (
            f"computed {self._num_computed_tokens / self._interval_s:.1f} tokens/s, "
            f"generated {self._num_output_tokens / self._interval_s:.1f} tokens/s, {queues}, "
            f"KV use {stats.kv_usage_frac:.1%}"
        )
