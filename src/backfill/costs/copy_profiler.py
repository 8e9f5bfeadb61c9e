"""Times copies of KV blocks between device and host memory: alone, and beside a step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Protocol

from backfill.core.block import BlockCopy
from backfill.core.clock import Clock
from backfill.core.plan import BlockCopies, Compute, CopyDirections, StepOutcome, StepPlan
from backfill.costs.profile import CopySpeed

EMPTY_PLAN = StepPlan(step=0, work=Compute(slices=()))
_COPIED_BLOCKS = 64
_COPY_ROUNDS = 6
_SHORTEST_S = 1e-9
_MAX_COPIES_BESIDE = 4096
# As where copies take twice as long beside a step, which stands still meanwhile. Beyond is the noise of a
# machine that is busy with other work, and would stop checkpoints until it is measured again.
_MOST_INTERFERENCE = 2.0


class RunsPlans(Protocol):
    """The part of an executor that the profiler needs."""

    def run(self, plan: StepPlan) -> StepOutcome: ...


RunStep = Callable[[BlockCopies], tuple[float, int]]
"""Runs a step that begins these copies, and waits for those that outlast it.

Returns its seconds, and how many of the copies completed in it.
"""


@dataclass(frozen=True, slots=True)
class CopyProfiler:
    """Copies the first blocks of both pools. Their contents are lost.

    Args:
        num_blocks: blocks that both pools have.
        block_bytes: size of one.
    """

    executor: RunsPlans
    clock: Clock
    num_blocks: int
    block_bytes: int

    def time_alone(self) -> CopySpeed | None:
        """Bytes per second of copies in each direction on an idle machine; None without two pools."""
        count = min(self.num_blocks, _COPIED_BLOCKS)
        if not count:
            return None
        copies = self._copies(count)
        plans = (
            replace(EMPTY_PLAN, copies=begun)
            for begun in (
                BlockCopies(checkpoint=copies, blocking=CopyDirections.CHECKPOINT),
                BlockCopies(restore=copies, blocking=CopyDirections.RESTORE),
            )
        )
        speeds = []
        for plan in plans:
            samples = []
            for _ in range(_COPY_ROUNDS):
                began_s = self.clock.now_s()
                self.executor.run(plan)
                samples.append(self.clock.now_s() - began_s)
            # The first copy touches new memory. A clock that did not move yields no speed.
            seconds = max(statistics.median(samples[1:]), _SHORTEST_S)
            speeds.append(count * self.block_bytes / seconds)
        return CopySpeed(*speeds)

    def time_interference(self, speed: CopySpeed, run_step: RunStep, step_s: float, rounds: int) -> float:
        """Seconds by which a step becomes longer for each second of copying beside it, from 0 to 2.

        The step runs without and with copies in turn, and the median of the differences counts: so a drift of
        the machine's speed does not. Half of the copies go to the host, half to the device.

        Args:
            step_s: about what the step takes: copies begin that take as long.
        """
        pair_s = self.block_bytes / speed.to_host_bytes_per_s + self.block_bytes / speed.to_device_bytes_per_s
        num_pairs = min(math.ceil(step_s / pair_s), _MAX_COPIES_BESIDE // 2)
        copies = self._copies(num_pairs)
        longer_s, copying_s = [], []
        for _ in range(rounds):
            alone_s, _ = run_step(EMPTY_PLAN.copies)
            beside_s, num_completed = run_step(BlockCopies(checkpoint=copies, restore=copies))
            longer_s.append(beside_s - alone_s)
            # The slower direction counts for all, as where copies are planned.
            copying_s.append(num_completed * speed.block_copy_s(self.block_bytes))
        copied_s = statistics.median(copying_s)
        if copied_s == 0.0:
            return 0.0
        return min(max(0.0, statistics.median(longer_s)) / copied_s, _MOST_INTERFERENCE)

    def _copies(self, count: int) -> tuple[BlockCopy, ...]:
        """As many copies as asked, of few blocks: the first copy of each block is slower."""
        num_blocks = min(self.num_blocks, _COPIED_BLOCKS)
        return tuple(islice(cycle(BlockCopy(index, index) for index in range(num_blocks)), count))
