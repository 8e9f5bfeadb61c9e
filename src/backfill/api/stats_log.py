"""Log lines of a working server: rates, missed objectives, and request fields that have no effect."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from backfill.api.metrics.requests import ObjectiveCounts
from backfill.core.clock import Clock, WallClock
from backfill.core.request import ServiceClass
from backfill.engine.messages import ClassStats, EngineStats, StepReport
from backfill.execution.machine import StolenTime

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0
_NUM_INTERVALS_A_MINUTE = 6
_WARNING_INTERVAL_S = 60.0
# Log an objective that more than this share of a minute's first tokens or gaps missed.
_MISSED_FRAC = 0.01
# Say what the hypervisor took if it was more than this share of the processors' time.
_STOLEN = 0.02
_COUNTED = {"ttft": "requests' first tokens", "tpot": "gaps between tokens"}


@dataclass(slots=True)
class StatsLog:
    """Adds up step reports and logs their rates every ten seconds, and missed objectives once a minute.

    The prefix cache's hit rate is that of the interval, for the classes that looked something up.

    Args:
        objectives: returns how often each objective was met and missed since the start.
        num_late: returns how many prompts that wait cannot be in time any more.
        stolen_s: returns the seconds that a hypervisor took of the mean processor since the last call.
    """

    objectives: Callable[[], Mapping[str, ObjectiveCounts]]
    num_late: Callable[[], int] = lambda: 0
    stolen_s: Callable[[], float] = field(default_factory=lambda: StolenTime().take_s)
    interval_s: float = INTERVAL_S
    _seen: Mapping[str, ObjectiveCounts] = field(default_factory=dict)  # a minute ago
    _num_output_tokens: int = 0
    _num_computed_tokens: int = 0
    _last: EngineStats | None = None
    _before: EngineStats | None = None  # the last of the interval before

    def on_report(self, report: StepReport) -> None:
        self._last = report.stats
        self._num_output_tokens += sum(output.token_id is not None for output in report.outputs)
        step = report.stats.step
        self._num_computed_tokens += 0 if step.stopped else step.num_tokens

    async def run(self) -> None:
        """Log until cancelled."""
        for number in itertools.count(1):
            await asyncio.sleep(self.interval_s)
            if self._last is not None and self._num_computed_tokens > 0:
                logger.info("%s", self._line(self._last))
            self._num_output_tokens = self._num_computed_tokens = 0
            self._before = self._last
            if number % _NUM_INTERVALS_A_MINUTE == 0:
                self.log_missed()

    def log_missed(self) -> None:
        """Log the objectives that were missed since the last call."""
        before, self._seen = self._seen, self.objectives()
        missed = []
        for name, counts in self._seen.items():
            earlier = before.get(name, ObjectiveCounts())
            num_missed = counts.num_missed - earlier.num_missed
            num_all = num_missed + counts.num_met - earlier.num_met
            if num_missed > _MISSED_FRAC * num_all:
                missed.append(f"{name.upper()} by {num_missed} of {num_all} {_COUNTED[name]}")
        if num_late := self.num_late():
            missed.append(f"TTFT by {num_late} that wait")
        minute_s = _NUM_INTERVALS_A_MINUTE * self.interval_s
        stolen = self.stolen_s() / minute_s if minute_s else 0.0
        if missed:
            logger.warning(
                "objectives missed in the last minute: %s. Send fewer online requests, set larger objectives "
                "(--ttft-slo, --tpot-slo) or the least that requests may ask for (--min-ttft-slo, "
                "--min-tpot-slo), or refuse those that cannot be in time (--shed-hopeless).%s",
                ", ".join(missed),
                f" The hypervisor took {stolen:.0%} of the processors' time." if stolen >= _STOLEN else "",
            )

    def _line(self, stats: EngineStats) -> str:
        queues = ", ".join(
            f"{which.value} {state.num_running} running {state.num_waiting} waiting"
            for which, state in _by_class(stats).items()
        )
        rates = _hit_rates(stats, self._before)
        return (
            f"computed {self._num_computed_tokens / self.interval_s:.1f} tokens/s, "
            f"generated {self._num_output_tokens / self.interval_s:.1f} tokens/s, {queues}, "
            f"KV use {stats.kv_usage_frac:.1%}" + (f", prefix cache hit rate {rates}" if rates else "")
        )


def _hit_rates(stats: EngineStats, before: EngineStats | None) -> str:
    """Of the prefix cache since ``before``, for the classes that looked something up."""
    rates = []
    for which, state in _by_class(stats).items():
        queried, hit = state.totals.num_prefix_queried_tokens, state.totals.num_all_prefix_hit_tokens
        if before is not None:
            earlier = _by_class(before)[which].totals
            num_queried, num_hit = earlier.num_prefix_queried_tokens, earlier.num_all_prefix_hit_tokens
            if num_queried <= queried and num_hit <= hit:  # else a new engine, whose totals began at 0
                queried, hit = queried - num_queried, hit - num_hit
        if queried > 0:
            rates.append(f"{which.value} {hit / queried:.1%}")
    return ", ".join(rates)


def _by_class(stats: EngineStats) -> dict[ServiceClass, ClassStats]:
    return {ServiceClass.ONLINE: stats.online, ServiceClass.OFFLINE: stats.offline}


class FieldWarnings:
    """Logs at most one warning a minute, with the number of warnings suppressed since the last one."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = WallClock() if clock is None else clock
        self._logged_at_s: float | None = None
        self._num_suppressed = 0

    def add(self, warning: str) -> None:
        """Args: warning: printable text; it contains names that a client chose."""
        now_s = self._clock.now_s()
        if self._logged_at_s is not None and now_s - self._logged_at_s < _WARNING_INTERVAL_S:
            self._num_suppressed += 1
            return
        others = f" ({self._num_suppressed} other requests since the last such line)"
        logger.warning("in a request: %s%s", warning, others if self._num_suppressed else "")
        self._logged_at_s, self._num_suppressed = now_s, 0
