"""The engines of a simulated world that a router has: its own code, on connections that are simulated."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from backfill.engine.tasks import TaskWatch
from backfill.jobs.lines import LineResult
from backfill.preparation.lines import BatchLine
from backfill.protocol.replica_state import ReplicaState
from backfill.protocol.service import TokenCount
from backfill.router.config import RouterConfig
from backfill.router.engines import Engines
from backfill.router.line_runner import EngineRunner
from backfill.router.looks import EngineRefused
from backfill.router.metrics import RouterMetrics
from tests.jobs.virtual_processes import CALL_S

if TYPE_CHECKING:
    from tests.jobs.world import Server, World

POLL_S = 0.25
TIMEOUT_S = 1.0  # of an engine


@dataclass(slots=True)
class Answer:
    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def content(self) -> Answer:
        return self

    async def read(self, num_bytes: int = -1) -> bytes:
        return self.body


class VirtualEngine:
    """Answers looks and lines. It may die, with what is in flight, and answer nothing for a while."""

    def __init__(self, world: World, url: str) -> None:
        self.url = url
        self._world = world
        self._instance = 0
        self._in_flight: dict[asyncio.Future[None], str] = {}  # looks too, without a name
        self._hangs_until_s = 0.0
        self.is_up = True

    def start(self) -> None:
        self.is_up = True
        self._instance += 1

    def die(self, away_s: float) -> None:
        if not self.is_up:
            return
        names = [name for name in self._in_flight.values() if name]
        self._world.scheduler.note(f"{self.url} dies with {len(names)} lines")
        self._world.note_lost(names)
        self.is_up = False
        for end in self._in_flight:
            if not end.done():
                end.set_exception(aiohttp.ServerDisconnectedError())
        self._world.scheduler.after(away_s, self.start)

    def hang(self, seconds: float) -> None:
        self._hangs_until_s = self._world.scheduler.clock.now_s() + seconds

    def wake(self) -> None:
        self._hangs_until_s = 0.0

    async def answer(self, data: bytes | None) -> Answer:
        """``data``: a line's body; None for a look at the state."""
        world = self._world
        await asyncio.sleep(world.source.uniform(0, CALL_S))
        if not self.is_up:
            raise aiohttp.ConnectionTimeoutError
        if data is None:
            await self._until(0.0, "")
            num_lines = sum(bool(name) for name in self._in_flight.values())
            state = ReplicaState(
                instance=str(self._instance),
                phase="ready",
                models=("m",),
                digest="d",
                max_num_seqs=world.plan.capacity,
                kv_tokens=100_000,
                num_offline=num_lines,
            )
            return Answer(200, msgspec.json.encode(state))
        if world.occurs("refusals", 0.03):
            return Answer(503, b"{}")
        name = json.loads(data)["prompt"]
        world.runs[name] += 1
        run = world.runs[name]
        await self._until(world.line_s(), name)
        if world.occurs("lost answers", 0.01):
            raise aiohttp.ServerDisconnectedError
        body = {"usage": {"prompt_tokens": 2, "completion_tokens": 1}, "run": run}
        return Answer(200, json.dumps(body).encode())

    async def _until(self, seconds: float, name: str) -> None:
        end = asyncio.get_running_loop().create_future()
        self._in_flight[end] = name
        self._world.scheduler.after(seconds, partial(self._end, end, name))
        try:
            await end
        finally:
            del self._in_flight[end]

    def _end(self, end: asyncio.Future[None], name: str) -> None:
        if end.done():
            return
        if (left_s := self._hangs_until_s - self._world.scheduler.clock.now_s()) > 0:
            self._world.scheduler.after(min(left_s, POLL_S), partial(self._end, end, name))
        elif name in self._world.fatal:
            self.die(self._world.plan.lease_s / 4)
        else:
            end.set_result(None)


class VirtualSession:
    """In place of aiohttp's."""

    def __init__(self, world: World, **_: object) -> None:
        self._world = world

    def get(self, url: str, **_: object) -> Any:
        return self._exchange(url, None)

    def request(self, method: str, url: str, *, data: bytes, **_: object) -> Any:
        return self._exchange(url, data)

    @asynccontextmanager
    async def _exchange(self, url: str, data: bytes | None) -> AsyncIterator[Answer]:
        engine = self._world.engines["http://" + urlsplit(url).netloc]
        yield await engine.answer(data)

    async def close(self) -> None:
        pass


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

    async def run(self, line: BatchLine, count: TokenCount | None = None) -> LineResult:
        assert self._runner is not None, "no lines come before there is capacity"
        self._server.world.note_run(self._server, line)
        return await self._runner.run(line, count)
