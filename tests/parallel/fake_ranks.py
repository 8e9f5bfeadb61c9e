"""Ranks without a model for the processes of a ``ParallelExecutor``: they do what requests are called.

A request ``r0:raise`` makes rank 0 raise, ``*:raise`` all ranks, ``r1:kill`` kills rank 1, ``r1:stop`` stops
its process, ``r1:hang`` makes it wait forever, ``r1:wait`` in an exchange in layer 3, ``r1:slow`` a moment;
``r0:stall`` makes it report ``stalled(interval)``, for the plan's interval or 4.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

from backfill.core.block import BlockCopy, pack_block_ref
from backfill.core.clock import WallClock
from backfill.core.config import EngineConfig
from backfill.core.errors import ConfigError
from backfill.core.plan import (
    AdmittedRequest,
    Compute,
    RankTiming,
    Safepoints,
    SampledToken,
    ScheduledSlice,
    StepOutcome,
    StepPlan,
    WeightTransfers,
)
from backfill.core.request import RequestId
from backfill.core.sampling import SamplingParams
from backfill.engine.engine import Engine
from backfill.parallel.executor import ParallelExecutor
from backfill.parallel.rank import RankContext, output_rank
from tests.builders import make_info

NUM_BLOCKS = 4096
BLOCKS = tuple(pack_block_ref(index) for index in range(3))


def token_of(tokens: Sequence[int], scheduled: ScheduledSlice) -> int:
    """What a fake rank samples: it depends on all that a plan says of the request."""
    return (sum(tokens) + 7 * sum(scheduled.blocks) + 13 * scheduled.start) % 991 + 3


def plan_of(step: int, *names: str, start: int = 0, admits: bool = True, stops: bool = False) -> StepPlan:
    """One token of each request, whose prompt is 1."""
    slices = tuple(
        ScheduledSlice(RequestId(name), start, 1, BLOCKS, samples=True, stoppable=stops) for name in names
    )
    sampling = SamplingParams(max_tokens=8)
    admitted = tuple(AdmittedRequest(RequestId(name), (1,), sampling) for name in names) if admits else ()
    return StepPlan(step, Compute(slices, safepoints=Safepoints(1, False) if stops else None), admitted)


def stalled(interval: int) -> WeightTransfers:
    """Transfers for which layers waited."""
    timing = RankTiming((1.0,), (interval / 8,), (), 100)
    return WeightTransfers(interval, 100, interval / 8, 0.25, 10, interval / 16, (timing,))


class FakeRank:
    def __init__(self, context: RankContext) -> None:
        sizes = context.tensor_parallel_size, context.pipeline_parallel_size
        # Ranks have different memories.
        self.info = make_info(num_blocks=NUM_BLOCKS + context.rank)
        self._samples = context.rank == output_rank(*sizes)
        self._context = context
        self._tokens: dict[RequestId, list[int]] = {}
        self._copying: tuple[BlockCopy, ...] = ()

    def run(self, plan: StepPlan, sampled: Sequence[tuple[RequestId, int]]) -> StepOutcome:
        for request_id, token_id in sampled:
            self._tokens[request_id].append(token_id)
        for request_id in plan.released:
            self._tokens.pop(request_id, None)
        for admitted in plan.admitted:
            self._tokens[admitted.request_id] = list(admitted.prompt_token_ids)
        transfers = WeightTransfers()
        for scheduled in plan.slices:
            self._obey(scheduled.request_id)
            if scheduled.request_id == f"r{self._context.rank}:stall":
                transfers = stalled(plan.offload_interval or 4)
        stopped = tuple(each.request_id for each in plan.slices if each.stoppable)
        if not (stopped and self._context.state.stops.signal(plan.step).is_set()):
            stopped = ()
        return StepOutcome(
            tuple(
                SampledToken(each.request_id, token_of(self._tokens[each.request_id], each))
                for each in plan.slices
                if each.samples and self._samples and each.request_id not in stopped
            ),
            discarded=stopped if self._samples else (),
            completed_copies=self._complete(plan.copies.checkpoint),
            weight_transfers=transfers,
        )

    def _complete(self, begun: tuple[BlockCopy, ...]) -> tuple[BlockCopy, ...]:
        """Rank 0 completes copies at once, others those of the step before."""
        if self._context.rank == 0:
            return begun
        completed, self._copying = self._copying, begun
        return completed

    def _obey(self, name: str) -> None:
        who, _, what = name.partition(":")
        if who not in ("*", f"r{self._context.rank}"):
            return
        if what == "raise":
            raise ValueError(f"asked by {name}")
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "hang":
            time.sleep(3600.0)
        if what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if what == "wait":
            progress = self._context.progress
            progress.begin_layer(3)
            with progress.exchanging():
                time.sleep(3600.0)
        if what == "slow":
            time.sleep(0.2)


def load_fake(_config: EngineConfig, context: RankContext) -> FakeRank:
    context.state.wait_planned(context.local_ranks, context.rank)
    return FakeRank(context)


def load_refused(config: EngineConfig, context: RankContext) -> FakeRank:
    """Rank 1 refuses the configuration, and the others never end."""
    if context.rank == 1:
        raise ConfigError(f"`threads` {config.threads} is refused here.")
    time.sleep(3600.0)
    return FakeRank(context)


def load_broken(_config: EngineConfig, context: RankContext) -> FakeRank:
    """Rank 0 has a bug."""
    if context.rank == 0:
        raise ValueError("a bug")
    return FakeRank(context)


def load_killed(_config: EngineConfig, context: RankContext) -> FakeRank:
    """Rank 1 is killed while it loads, for example for the memory that it takes."""
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3600.0)
    return FakeRank(context)


def load_fake_engine(config: EngineConfig) -> Engine:
    """An engine on fake ranks, which ends if one of them does."""
    executor = ParallelExecutor(config, 1, load_fake)
    return Engine(config.scheduler, executor, WallClock())
