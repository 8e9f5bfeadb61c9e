"""Replays online traffic beside a pool of offline requests, taken in the pool's order, up to its end."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from backfill.blending.pool import OfflinePool
from backfill.blending.requests import PoolRequest
from backfill.core.clock import VirtualClock
from backfill.core.request import ServiceClass
from backfill.engine.engine import Engine
from backfill.engine.messages import TokenOutput
from backfill.execution.simulated_executor import SimulatedExecutor
from backfill.simulation.processes import RunShare
from backfill.simulation.replay import Replay, Workload
from experiments.blendserve.feed import PoolFeed
from experiments.blendserve.overlap import OverlappedCostModel

BIN_S = 10.0
# Offline requests that wait in the engine, so that a step never lacks prompts.
_QUEUE_DEPTH = 4
# How often the pool is told what online requests use, as a server does.
_PERIOD_S = 1.0
# Memory is kept for as many online tokens as there were lately: the time constant of the policy's reserve.
_RESERVE_DECAY_S = 60.0

Floats = NDArray[np.float64]


class Step(NamedTuple):
    """A step: seconds of either resource alone on the device, in all and by online requests."""

    at_s: float
    seconds: float
    compute_s: float
    memory_s: float
    online_compute_s: float
    online_memory_s: float


@dataclass(slots=True)
class StepUsage:
    """What each step used."""

    _values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, step: Step) -> None:
        self._values.extend(step)

    def between(self, began_s: float, ended_s: float) -> Floats:
        """The steps that ended after one instant and by another: a row each, with the fields of ``Step``."""
        rows = np.array(self._values).reshape(-1, len(Step._fields))
        return rows[(rows[:, 0] > began_s) & (rows[:, 0] <= ended_s)]

    def binned(self, bin_s: float) -> Floats:
        """Seconds a second of compute, memory, online compute and online memory, in each bin."""
        rows = self.between(0.0, math.inf)
        bins = (rows[:, 0] // bin_s).astype(np.int64)
        return np.array([np.bincount(bins, rows[:, column]) / bin_s for column in range(2, 6)])


class OnlineMeter:
    """Tokens that online requests computed and cached ones that they read, as a server counts them."""

    def __init__(self, engine: Engine) -> None:
        self._scheduler = engine.scheduler
        self._num_computed = 0
        self._num_tokens = self._num_reads = 0
        self._began_s = 0.0

    @property
    def num_held_tokens(self) -> int:
        """Of online requests that run."""
        running = self._scheduler.requests.running.values()
        return sum(each.num_tokens for each in running if each.service_class is ServiceClass.ONLINE)

    def on_step(self) -> tuple[int, int]:
        """Count the step that has just ended. Returns: its online tokens and reads."""
        num_computed = self._scheduler.counters[ServiceClass.ONLINE].num_computed_tokens
        num_new, self._num_computed = num_computed - self._num_computed, num_computed
        num_reads = self.num_held_tokens if num_new else 0
        self._num_tokens += num_new
        self._num_reads += num_reads
        return num_new, num_reads

    def on_time(self, now_s: float) -> tuple[float, float] | None:
        """Tokens and reads a second of a period that has ended; None within one."""
        elapsed_s = now_s - self._began_s
        if elapsed_s < _PERIOD_S:
            return None
        rates = self._num_tokens / elapsed_s, self._num_reads / elapsed_s
        self._began_s, self._num_tokens, self._num_reads = now_s, 0, 0
        return rates


class PoolReplay(Replay):
    """See ``Replay``; its offline requests come from a pool.

    They join as far as there is room beside the KV that online requests hold, or have held lately (see
    ``PoolFeed``). The workload ends with the last of them, or else after its duration.

    Attributes:
        usage: of each step.
        num_finished: offline requests that have ended.
        ended_at_s: when the last one did; inf if it did not.

    Args:
        requests: whose ids are the indices of ``outputs``.
        outputs: true output lengths.
        knows_online: the pool is told what online requests use.
    """

    def __init__(
        self,
        engine: Engine,
        executor: SimulatedExecutor,
        clock: VirtualClock,
        workload: Workload,
        pool: OfflinePool,
        requests: Sequence[PoolRequest],
        outputs: Sequence[int],
        *,
        cost: OverlappedCostModel,
        knows_online: bool,
    ) -> None:
        super().__init__(engine, clock, workload)
        self.usage = StepUsage()
        self.num_finished, self.ended_at_s = 0, math.inf
        self._executor = executor
        self._pool, self._cost, self._knows_online = pool, cost, knows_online
        self._feed = PoolFeed(
            engine,
            clock,
            pool,
            requests,
            outputs,
            queue_depth=_QUEUE_DEPTH,
            tells_reuse=True,
        )
        self._meter = OnlineMeter(engine)
        self._online_peak = 0.0
        self._num_requests = len(requests)
        self._share = RunShare()

    def _step(self) -> None:
        began_s = self._elapsed_s
        super()._step()
        seconds = self._elapsed_s - began_s
        if seconds > 0.0:
            self._note_step(seconds)
            self._feed.on_step()

    def _note_step(self, seconds: float) -> None:
        load = self._executor.load
        compute_s, memory_s = self._cost.resources_s(load)
        # A step that was stopped or resumed has computed a part of this load.
        part = min(1.0, seconds / self._cost.step_time_s(load)) if load.num_tokens else 0.0
        num_tokens, num_reads = self._meter.on_step()
        online = self._pool.resources.use_of(num_tokens, num_reads)
        self.usage.add(
            Step(
                self._elapsed_s,
                seconds,
                part * compute_s,
                part * memory_s,
                online.compute_frac,
                online.memory_frac,
            )
        )
        decayed = self._online_peak * math.exp(-seconds / _RESERVE_DECAY_S)
        self._online_peak = max(decayed, float(self._meter.num_held_tokens))
        self._share.note(self.num_finished / self._num_requests)
        rates = self._meter.on_time(self._elapsed_s)
        if rates is not None and self._knows_online:
            self._pool.online = self._pool.resources.use_of(*rates)

    def _record(self, output: TokenOutput, now_s: float) -> None:
        super()._record(output, now_s)
        if output.finish_reason is None or output.request_id not in self._feed.in_flight:
            return
        self._feed.finish(output.request_id)
        self.num_finished += 1
        if self.num_finished == self._num_requests:
            self.ended_at_s = self._elapsed_s
            self._end_traffic()

    def _top_up(self) -> None:
        self._feed.top_up(int(self._online_peak))

    def _end_traffic(self) -> None:
        """What has not arrived does not."""
        self._num_unfinished -= len(self._online) - self._next_arrival
        self._online, self._duration_s = self._online[: self._next_arrival], self._elapsed_s
