"""Ranks that compute nothing, for the processes that ``plan_transport.py`` starts."""

from __future__ import annotations

from collections.abc import Sequence

from backfill.core.config import EngineConfig
from backfill.core.plan import SampledToken, StepOutcome, StepPlan
from backfill.core.request import RequestId
from backfill.execution.executor import ExecutorInfo
from backfill.parallel.rank import RankContext, output_rank

BLOCK_SIZE = 16


class IdleRank:
    """Computes nothing. The output rank samples a token for each slice."""

    def __init__(self, *, samples: bool) -> None:
        self.info = ExecutorInfo(1 << 20, BLOCK_SIZE, 1 << 17, 1 << 16, (), "none", "none")
        self._samples = samples
        self._tokens: tuple[SampledToken, ...] = ()

    def run(self, plan: StepPlan, sampled: Sequence[tuple[RequestId, int]]) -> StepOutcome:
        if not self._samples or not plan.slices:
            return StepOutcome(())
        if len(self._tokens) != len(plan.slices):
            self._tokens = tuple(SampledToken(each.request_id, 12345) for each in plan.slices)
        return StepOutcome(self._tokens)


def load_idle_rank(_config: EngineConfig, context: RankContext) -> IdleRank:
    sizes = context.tensor_parallel_size, context.pipeline_parallel_size
    return IdleRank(samples=context.rank == output_rank(*sizes))
