"""An engine whose steps are observed, and BROS as its section 7.4.1 may be read."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar, Protocol

from backfill.core.clock import Clock
from backfill.core.config import SchedulerConfig
from backfill.core.request import PriorityLevel
from backfill.costs.profile import CostProfile
from backfill.engine.engine import Engine
from backfill.engine.messages import TokenOutput
from backfill.execution.executor import Executor
from backfill.scheduling.policies.bros import BrosPolicy
from backfill.scheduling.policies.create import PolicyFactory
from backfill.scheduling.prediction import StepPredictor
from backfill.simulation.replay import EngineFactory


class Observer(Protocol):
    """Sees each step of an engine."""

    def on_step(self, engine: Engine, began_s: float, ended_s: float) -> None:
        """A step was planned, run and committed between these times of the clock."""


class ObservedEngine(Engine):
    """See ``Engine``.

    Attributes:
        observer: told of each step.
    """

    observer: Observer

    def step(self) -> list[TokenOutput]:
        began_s = self._clock.now_s()
        outputs = super().step()
        self.observer.on_step(self, began_s, self._clock.now_s())
        return outputs


def observed_by(observer: Observer, policy: PolicyFactory | None = None) -> EngineFactory:
    """Makes engines of which this observer is told. Args: policy: see ``Engine``."""

    def create(config: SchedulerConfig, executor: Executor, clock: Clock, profile: CostProfile) -> Engine:
        engine = ObservedEngine(config, executor, clock, profile, policy=policy)
        engine.observer = observer
        return engine

    return create


class LateBros(BrosPolicy):
    """See ``BrosPolicy``. A waiting online request preempts nobody; running ones that lack a block do."""

    may_preempt: ClassVar[Collection[PriorityLevel]] = ()


def late_bros(config: SchedulerConfig, predictor: StepPredictor | None) -> LateBros:
    assert predictor is not None, "simulations have a cost profile"
    chunk_tokens = config.max_chunk_tokens
    return LateBros(predictor, max_num_seqs=config.max_num_seqs, max_chunk_tokens=chunk_tokens)
