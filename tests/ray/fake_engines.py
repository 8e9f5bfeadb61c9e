"""Engines whose ranks are actors of Ray that compute nothing."""

from __future__ import annotations

from functools import partial

from backfill.core.clock import WallClock
from backfill.core.config import EngineConfig
from backfill.engine.engine import Engine
from backfill.parallel.executor import ParallelExecutor
from backfill.parallel.ray_stages import plan_stages, start_stages
from tests.parallel.fake_ranks import load_fake


def fake_executor(config: EngineConfig) -> ParallelExecutor:
    return ParallelExecutor(config, 1, load_fake, start=partial(start_stages, plan_stages(config)))


def load_fake_engine(config: EngineConfig) -> Engine:
    executor = fake_executor(config)
    return Engine(config.scheduler, executor, WallClock())
