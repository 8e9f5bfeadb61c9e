"""Keeps an engine running: starts it, and again whenever it dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from backfill.core.clock import Clock, WallClock
from backfill.core.errors import EngineDead
from backfill.engine.messages import Ready

logger = logging.getLogger(__name__)

_RESTART_DELAY_S = 1.0
_MAX_QUICK_DEATHS = 3
_QUICK_DEATH_S = 30.0


class Startable(Protocol):
    """What is supervised, an ``EngineClient`` outside of tests."""

    async def start(self) -> Ready: ...
    async def wait_dead(self) -> None: ...


class EngineSupervisor:
    """Starts an engine, and again whenever it dies, unless it dies soon and repeatedly.

    Args:
        on_ready: awaited each time the model is loaded; an exception it raises ends ``run``.
        on_lost: called each time a loaded engine has died, before it is started again.
    """

    def __init__(
        self,
        engine: Startable,
        *,
        on_ready: Callable[[Ready], Awaitable[None]],
        on_lost: Callable[[], None],
        clock: Clock | None = None,
        restart_delay_s: float = _RESTART_DELAY_S,
    ) -> None:
        self._engine = engine
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._clock = clock or WallClock()
        self._restart_delay_s = restart_delay_s
        self._expects_end = False

    def expect_end(self) -> None:
        """A death from now on is final and no failure: what the engine serves is coming to its end."""
        self._expects_end = True

    async def run(self) -> None:
        """Keep the engine running until an expected end, or until cancelled.

        Raises: BackfillError with the engine's reason when it cannot start, EngineDead when it keeps dying.
        """
        num_quick_deaths = 0
        while not self._expects_end:
            await self._on_ready(await self._engine.start())
            ready_at_s = self._clock.now_s()
            await self._engine.wait_dead()
            if self._expects_end:
                return
            self._on_lost()
            is_quick = self._clock.now_s() - ready_at_s < _QUICK_DEATH_S
            num_quick_deaths = num_quick_deaths + 1 if is_quick else 0
            if num_quick_deaths >= _MAX_QUICK_DEATHS:
                raise EngineDead(f"The engine died {num_quick_deaths} times soon after it was started.")
            logger.error("the engine died; starting it again")
            await asyncio.sleep(self._restart_delay_s)
