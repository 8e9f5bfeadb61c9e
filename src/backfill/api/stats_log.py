"""Log lines of a working server: rates every few seconds, and missed objectives once a minute."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping

from backfill.api.metrics.requests import ObjectiveCounts
from backfill.core.request import ServiceClass
from backfill.engine.messages import EngineStats, StepReport

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0
_NUM_INTERVALS_A_MINUTE = 6
# Log an objective that more than this share of a minute's first tokens or gaps missed.
_MISSED_FRAC = 0.01
_COUNTED = {"ttft": "requests' first tokens", "tpot": "gaps between tokens"}


class StatsLog:
    """Adds up step reports and logs their rates.

    Args:
        objectives: returns how often each objective was met and missed since the start.
    """

    def __init__(
        self,
        objectives: Callable[[], Mapping[str, ObjectiveCounts]] = dict,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._objectives = objectives
        self._seen: Mapping[str, ObjectiveCounts] = {}  # a minute ago
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
        for number in itertools.count(1):
            await asyncio.sleep(self._interval_s)
            if self._last is not None and self._num_computed_tokens > 0:
                logger.info("%s", self._line(self._last))
            self._num_output_tokens = self._num_computed_tokens = 0
            if number % _NUM_INTERVALS_A_MINUTE == 0:
                self.log_missed()

    def log_missed(self) -> None:
        """Log the objectives that were missed since the last call."""
        before, self._seen = self._seen, self._objectives()
        missed = []
        for name, counts in self._seen.items():
            earlier = before.get(name, ObjectiveCounts())
            num_missed = counts.num_missed - earlier.num_missed
            num_all = num_missed + counts.num_met - earlier.num_met
            if num_missed > _MISSED_FRAC * num_all:
                missed.append(f"{name.upper()} by {num_missed} of {num_all} {_COUNTED[name]}")
        if missed:
            logger.warning(
                "objectives missed in the last minute: %s. Send fewer online requests, set larger objectives "
                "(--ttft-slo, --tpot-slo), or refuse requests that cannot meet them (--shed-hopeless).",
                ", ".join(missed),
            )

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
