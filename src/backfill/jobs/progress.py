"""The speed of a batch and the time it still needs. Nothing here reads a clock: instants are arguments."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from backfill.blending.resources import ResourceModel
from backfill.engine.messages import StepReport
from backfill.execution.executor import ExecutorInfo

_LEAST_SPAN_S = 3.0
_BUCKET_S = 0.5
_WINDOW_TURNS = 3
_LEAST_WINDOW_LINES = 50
_LEAST_ENDED_LINES = 5
_SMOOTHING_S = 15.0


@dataclass(slots=True)
class SlidingRate:
    """Amounts per second over the last ``window_s``, or since the start where that is later."""

    started_at_s: float  # nothing was counted before
    window_s: float = 30.0
    _buckets: deque[tuple[float, float]] = field(default_factory=deque)  # instant of the first amount, sum

    def add(self, amount: float, now_s: float) -> None:
        if self._buckets and now_s < self._buckets[-1][0] + _BUCKET_S:
            at_s, total = self._buckets.pop()
            self._buckets.append((at_s, total + amount))
        else:
            self._buckets.append((now_s, amount))
        self._forget(now_s)

    def per_s(self, now_s: float) -> float | None:
        """None in the first seconds, when a rate says little."""
        self._forget(now_s)
        span_s = min(now_s - self.started_at_s, self.window_s)
        if span_s < _LEAST_SPAN_S:
            return None
        return sum(amount for _, amount in self._buckets) / span_s

    def _forget(self, now_s: float) -> None:
        while self._buckets and self._buckets[0][0] <= now_s - self.window_s:
            self._buckets.popleft()


class TimeLeft:
    """Estimates when the last line ends, from the pace of recent lines.

    The window is a number of lines: three times the lines that run at once. Lines that start together end
    together, so a window of seconds would hold all of them or none. For the same reason the pace is measured
    when a line ends, and between two ends only after the longest gap so far.

    Args:
        num_lines: to run.
        num_at_once: most lines that run at the same time.
    """

    def __init__(self, num_lines: int, num_at_once: int, started_at_s: float) -> None:
        self._num_lines = num_lines
        self._num_ended = 0
        # The first lines to end are short ones. Wait until as many have ended as started together.
        self._least_ended = max(_LEAST_ENDED_LINES, min(num_at_once, num_lines // 4))
        window_lines = max(_WINDOW_TURNS * num_at_once, _LEAST_WINDOW_LINES)
        self._ended_at_s: deque[float] = deque([started_at_s], maxlen=window_lines + 1)
        self._longest_gap_s = 0.0
        self._end_at_s: float | None = None  # smoothed
        self._measured_at_s = started_at_s

    def update(self, num_ended: int, now_s: float) -> None:
        """Set the number of ended lines. Called at an interval, also when none has ended."""
        gap_s = now_s - self._ended_at_s[-1]
        num_new = num_ended - self._num_ended
        if num_new == 0 and gap_s <= self._longest_gap_s:
            return
        if num_new > 0:
            self._longest_gap_s = max(self._longest_gap_s, gap_s)
            self._num_ended = num_ended
            self._ended_at_s.extend([now_s] * num_new)
        if num_ended >= self._least_ended:
            self._measure(now_s)

    def _measure(self, now_s: float) -> None:
        seconds_per_line = (now_s - self._ended_at_s[0]) / (len(self._ended_at_s) - 1)
        end_at_s = now_s + (self._num_lines - self._num_ended) * seconds_per_line
        if self._end_at_s is None:
            self._end_at_s = end_at_s
        else:
            weight = 1 - math.exp((self._measured_at_s - now_s) / _SMOOTHING_S)
            self._end_at_s += weight * (end_at_s - self._end_at_s)
        self._measured_at_s = now_s

    def seconds(self, now_s: float) -> float | None:
        """None before enough lines have ended."""
        return None if self._end_at_s is None else max(0.0, self._end_at_s - now_s)


class TokenRates:
    """Tokens of prompts and of outputs that the engine computes per second."""

    def __init__(self, started_at_s: float) -> None:
        self.prompts = SlidingRate(started_at_s)
        self.outputs = SlidingRate(started_at_s)
        self._num_computed = 0  # by the engine that runs now
        self._num_queried = self._num_hits = 0  # prompt tokens, and those found in the prefix cache

    @property
    def hit_share(self) -> float | None:
        """Prompt tokens that the engine found in its prefix cache, of all; None before there are any."""
        return self._num_hits / self._num_queried if self._num_queried else None

    def on_report(self, report: StepReport, now_s: float) -> None:
        """Count a step. Tokens computed again after a preemption are not counted again."""
        stats = report.stats
        totals = (stats.online.totals, stats.offline.totals)
        self._num_queried = sum(each.num_prefix_queried_tokens for each in totals)
        self._num_hits = sum(each.num_all_prefix_hit_tokens for each in totals)
        num_computed = sum(each.num_computed_tokens - each.num_recomputed_tokens for each in totals)
        if num_computed < self._num_computed:  # a new engine counts from 0
            self._num_computed = 0
        num_new, self._num_computed = num_computed - self._num_computed, num_computed
        num_outputs = sum(output.token_id is not None for output in report.outputs)
        self.outputs.add(num_outputs, now_s)
        # A decode computes one token and outputs one. A prompt's last slice outputs one too: ignored.
        self.prompts.add(max(0, num_new - num_outputs), now_s)


class WorkShares:
    """What the work of the engine's steps is bound by, estimated from their reports.

    Compute is in proportion to the tokens computed. Memory traffic is in proportion to the KV in use, which
    each step reads.
    """

    def __init__(self, resources: ResourceModel, block_size: int, started_at_s: float) -> None:
        self._resources = resources
        self._block_size = block_size
        self._compute = SlidingRate(started_at_s)
        self._memory = SlidingRate(started_at_s)

    def on_report(self, report: StepReport, now_s: float) -> None:
        if report.stats.step.kind != "none":
            num_read = report.stats.kv_usage_frac * report.stats.num_blocks * self._block_size
            self._compute.add(self._resources.token_s * report.stats.step.num_tokens, now_s)
            self._memory.add(self._resources.cached_token_s * num_read, now_s)

    def compute_share(self, now_s: float) -> float | None:
        """Of compute and memory traffic together; None in the first seconds, and without work."""
        compute, memory = self._compute.per_s(now_s), self._memory.per_s(now_s)
        return None if not compute or memory is None else compute / (compute + memory)


class RunSpeed:
    """How fast the lines of a run are done, from its engine's first step on.

    Attributes:
        offload_interval: in use at the start; None without offloading.
        least_offload_interval: the smallest in use until now, likewise.

    Args:
        num_lines: to run.
        num_at_once: most lines that run at the same time.
    """

    def __init__(
        self, resources: ResourceModel, info: ExecutorInfo, *, num_lines: int, num_at_once: int, now_s: float
    ) -> None:
        self.rates = TokenRates(now_s)
        self.work = WorkShares(resources, info.block_size, now_s)
        self.time_left = TimeLeft(num_lines, num_at_once, now_s)
        self.offload_interval = self.least_offload_interval = info.offload_interval

    def on_report(self, report: StepReport, now_s: float) -> None:
        if self.least_offload_interval is not None:
            self.least_offload_interval = min(self.least_offload_interval, report.stats.offload_interval)
        self.rates.on_report(report, now_s)
        self.work.on_report(report, now_s)
