"""A router of a simulated world: its own code, on connections that are simulated."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from backfill.engine.tasks import TaskWatch
from backfill.jobs.lines import LineResult
from backfill.preparation.lines import BatchLine
from backfill.protocol.service import TokenCount
from backfill.router.config import RouterConfig
from backfill.router.engines import Engines
from backfill.router.line_runner import EngineRunner
from backfill.router.looks import EngineRefused
from backfill.router.metrics import RouterMetrics

if TYPE_CHECKING:
    from tests.jobs.world import Server

POLL_S = 0.25
TIMEOUT_S = 1.0  # of an engine


class RoutedEngines:
    """A ``LineRunner``: the router's, on the engines of the world."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._engines: Engines | None = None
        self._runner: EngineRunner | None = None

    @property
    def is_up(self) -> bool:
        return self._engines is not None and any(engine.is_up for engine in self._engines.all)

    def start(self) -> None:
        self._server.process.spawn(self._join())

    async def _join(self) -> None:
        world, manager = self._server.world, self._server.manager
        config = RouterConfig(engines=tuple(world.engines), poll_interval=POLL_S, engine_timeout=TIMEOUT_S)
        clock = world.scheduler.clock
        engines = self._engines = Engines(config, clock, TaskWatch())
        runner = self._runner = EngineRunner(engines, RouterMetrics(engines, clock))
        engines.store_id = manager.store_id

        def on_change() -> None:
            manager.feed(runner.capacity)
            runner.on_change()

        engines.on_change = on_change
        while True:
            try:
                await engines.start()
                return
            except EngineRefused:
                await asyncio.sleep(POLL_S)

    def die(self, away_s: float) -> None:
        """One of them."""
        world = self._server.world
        world.source.choice(list(world.engines.values())).die(away_s)

    async def run(
        self, line: BatchLine, count: TokenCount | None = None, *, is_alone: bool = False
    ) -> LineResult:
        assert self._runner is not None, "no lines come before there is capacity"
        self._server.world.note_run(self._server, line)
        return await self._runner.run(line, count, is_alone=is_alone)
