"""Engines without a model for the processes of an ``EngineClient``, each with its own failure."""

from __future__ import annotations

import time
from pathlib import Path

from backfill.core.clock import WallClock
from backfill.core.config import EngineConfig
from backfill.core.plan import StepOutcome, StepPlan
from backfill.costs.profile import CostProfile
from backfill.engine.engine import Engine
from tests.builders import ScriptedExecutor, make_info


class _Slow(ScriptedExecutor):
    def run(self, plan: StepPlan) -> StepOutcome:
        time.sleep(0.002)
        return super().run(plan)


class _Failing(ScriptedExecutor):
    def run(self, plan: StepPlan) -> StepOutcome:
        self.fail_at_step = plan.step if len(self.plans) < 2 else None
        return super().run(plan)


class _Crowded(ScriptedExecutor):
    def run(self, plan: StepPlan) -> StepOutcome:
        time.sleep(0.002)
        self.fail_at_step = plan.step if len(plan.slices) > 2 else None
        return super().run(plan)


class _Hanging(ScriptedExecutor):
    def run(self, plan: StepPlan) -> StepOutcome:
        if plan.slices:
            self.wait_forever()
        return super().run(plan)

    def wait_forever(self) -> None:
        time.sleep(3600.0)


def load_slow(config: EngineConfig) -> Engine:
    """Its requests may take minutes."""
    return Engine(config.scheduler, _Slow(make_info(num_blocks=20_000)), WallClock())


def load_profiled(config: EngineConfig) -> Engine:
    """With the profile that the configuration names."""
    assert config.profile_path is not None
    profile = CostProfile.load(Path(config.profile_path))
    return Engine(config.scheduler, ScriptedExecutor(make_info()), WallClock(), profile)


def load_failing(config: EngineConfig) -> Engine:
    """Its first two steps fail."""
    return Engine(config.scheduler, _Failing(make_info()), WallClock())


def load_crowded(config: EngineConfig) -> Engine:
    """Steps of more than two requests fail."""
    return Engine(config.scheduler, _Crowded(make_info(num_blocks=20_000)), WallClock())


def load_hanging(config: EngineConfig) -> Engine:
    """It hangs in its first step."""
    return Engine(config.scheduler, _Hanging(make_info(num_blocks=20_000)), WallClock())


def load_never(config: EngineConfig) -> Engine:
    """It never finishes loading."""
    time.sleep(3600.0)
    raise AssertionError("loaded")
