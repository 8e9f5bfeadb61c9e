"""When an engine that reports nothing is taken to hang."""

from __future__ import annotations

import asyncio

from backfill.core.config import EngineConfig
from backfill.costs.load import StepLoad
from backfill.costs.model import CostModel
from backfill.execution.executor import ExecutorInfo

_LEAST_S = 30.0
_WITHOUT_PROFILE_S = 300.0
_LONGEST_STEPS = 20.0
_MOST_HEARTBEAT_S = 2.0
_MOST_TICK_S = 1.0
_TICKS = 20


def hang_timeout_s(config: EngineConfig, info: ExecutorInfo, cost: CostModel | None) -> float:
    """Seconds without a report after which an engine hangs; 0 for never.

    Default: 20 times the longest step there can be, as predicted, at least 30 s; 300 s without a profile.
    """
    if config.engine_hang_timeout is not None:
        return config.engine_hang_timeout
    if cost is None:
        return _WITHOUT_PROFILE_S
    return max(_LEAST_S, _LONGEST_STEPS * _longest_step_s(config, info, cost))


def heartbeat_s(timeout_s: float) -> float:
    """Seconds between the reports of an engine that idles."""
    return min(_MOST_HEARTBEAT_S, timeout_s / 4) if timeout_s else _MOST_HEARTBEAT_S


def _longest_step_s(config: EngineConfig, info: ExecutorInfo, cost: CostModel) -> float:
    """A bound: every slot of the pool is read, and every token attends to as many as a request can have."""
    limits, pool_tokens = config.scheduler, info.num_blocks * info.block_size
    most_tokens = limits.max_num_batched_tokens
    load = StepLoad(
        num_tokens=most_tokens,
        num_sampled=limits.max_num_seqs,
        num_requests=limits.max_num_seqs,
        prefill_pairs=most_tokens * info.max_model_len,
        prefill_context_tokens=pool_tokens,
        decode_context_tokens=pool_tokens,
    )
    return cost.step_time_s(load)


class Watchdog:
    """Notices that an engine has reported nothing for a while.

    Time is counted in ticks of this process, so that one in which it did not run itself (a stalled loop, a
    suspended container) counts as one tick and blames nobody.

    Attributes:
        silent_s: since the last report, or since the watch began.

    Args:
        timeout_s: 0 for a dog that sleeps.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.silent_s = 0.0
        self._num_reports = 0

    def on_report(self) -> None:
        self._num_reports += 1

    async def wait_silent(self) -> None:
        """Return once there was no report for the whole timeout."""
        if not self.timeout_s:
            await asyncio.Event().wait()
        tick_s = min(_MOST_TICK_S, self.timeout_s / _TICKS)
        seen = self._num_reports
        while self.silent_s < self.timeout_s:
            await asyncio.sleep(tick_s)
            self.silent_s = self.silent_s + tick_s if self._num_reports == seen else 0.0
            seen = self._num_reports
