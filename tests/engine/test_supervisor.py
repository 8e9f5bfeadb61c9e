"""When a dead engine is started again, and when that ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from backfill.core.clock import VirtualClock
from backfill.core.errors import BackfillError, EngineDead
from backfill.engine.messages import Ready
from backfill.engine.supervisor import EngineSupervisor
from backfill.scheduling.objectives import DEFAULT_SLO
from tests.builders import make_info


class MortalEngine:
    """Lives for each of ``lifetimes_s`` in turn, then for ever."""

    def __init__(self, lifetimes_s: Sequence[float]) -> None:
        self.clock = VirtualClock()
        self.num_starts = 0
        self._lifetimes_s = list(lifetimes_s)

    async def start(self) -> Ready:
        self.num_starts += 1
        return Ready(make_info(), 0.0, DEFAULT_SLO)

    async def wait_dead(self) -> None:
        if not self._lifetimes_s:
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        self.clock.advance(self._lifetimes_s.pop(0))


class Watched:
    """A supervisor around a mortal engine, and what it told."""

    def __init__(self, *lifetimes_s: float) -> None:
        self.engine = MortalEngine(lifetimes_s)
        self.told: list[str] = []
        self.supervisor = EngineSupervisor(
            self.engine,
            on_ready=self._on_ready,
            on_lost=lambda: self.told.append("lost"),
            clock=self.engine.clock,
            restart_delay_s=0.0,
        )

    async def _on_ready(self, ready: Ready) -> None:
        self.told.append("ready")


async def run_for_a_while(watched: Watched) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(watched.supervisor.run(), 0.05)


def test_a_dead_engine_is_started_again() -> None:
    watched = Watched(100.0, 100.0, 100.0, 100.0)
    asyncio.run(run_for_a_while(watched))
    assert watched.engine.num_starts == 5
    assert watched.told == ["ready", "lost"] * 4 + ["ready"]


def test_an_engine_that_keeps_dying_soon_is_given_up() -> None:
    watched = Watched(*[1.0] * 10, 100.0)
    with pytest.raises(EngineDead, match="10 times"):
        asyncio.run(watched.supervisor.run())
    assert watched.told == ["ready", "lost"] * 10, "the last loss is told too"


def test_a_long_life_forgives_quick_deaths() -> None:
    watched = Watched(*[1.0] * 9, 100.0, *[1.0] * 9)
    asyncio.run(run_for_a_while(watched))
    assert watched.engine.num_starts == 20


def test_an_engine_that_cannot_be_started_again_at_once_is_tried_again() -> None:
    class Hesitant(MortalEngine):
        async def start(self) -> Ready:
            if self.num_starts in (1, 2, 3):
                self.num_starts += 1
                raise BackfillError("not enough memory")
            return await super().start()

    watched = Watched()
    watched.engine = Hesitant([100.0])
    supervisor = EngineSupervisor(
        watched.engine,
        on_ready=watched._on_ready,
        on_lost=lambda: None,
        clock=watched.engine.clock,
        restart_delay_s=0.0,
    )
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(supervisor.run(), 0.05))
    assert watched.told == ["ready", "ready"]


def test_an_engine_that_can_never_be_started_again_is_given_up_with_its_reason() -> None:
    class Once(MortalEngine):
        async def start(self) -> Ready:
            if self.num_starts:
                raise BackfillError("not enough memory")
            return await super().start()

    engine = Once([100.0])
    watched = Watched()
    supervisor = EngineSupervisor(
        engine, on_ready=watched._on_ready, on_lost=lambda: None, clock=engine.clock, restart_delay_s=0.0
    )
    with pytest.raises(EngineDead, match="not enough memory"):
        asyncio.run(supervisor.run())


def test_restarts_wait_ever_longer() -> None:
    supervisor = EngineSupervisor(MortalEngine([]), on_ready=Watched()._on_ready, on_lost=lambda: None)
    assert [supervisor._delay_s(count) for count in (0, 1, 2, 3, 9)] == [1, 1, 2, 4, 30]


def test_an_expected_end_is_final_and_no_failure() -> None:
    watched = Watched(1.0)

    async def run() -> None:
        running = asyncio.create_task(watched.supervisor.run())
        await asyncio.sleep(0)
        watched.supervisor.expect_end()
        await running

    asyncio.run(run())
    assert watched.told == ["ready"]


def test_an_engine_that_cannot_start_says_why() -> None:
    class Unstartable(MortalEngine):
        async def start(self) -> Ready:
            raise BackfillError("not enough memory")

    watched = Watched()
    supervisor = EngineSupervisor(Unstartable([]), on_ready=watched._on_ready, on_lost=lambda: None)
    with pytest.raises(BackfillError, match="not enough memory"):
        asyncio.run(supervisor.run())
    assert watched.told == []
