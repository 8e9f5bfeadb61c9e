"""Keeps an engine running: starts it, and again whenever it dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from backfill.core.clock import Clock, WallClock
from backfill.core.errors import BackfillError, EngineDead
from backfill.engine.messages import Ready

logger = logging.getLogger(__name__)

_RESTART_DELAY_S = 1.0
_LONGEST_RESTART_DELAY_S = 30.0
# Enough that a batch line over which the engine dies is found (jobs/feeder.py) before this is reached.
_MAX_QUICK_DEATHS = 10
_QUICK_DEATH_S = 30.0


class Startable(Protocol):
    """What is supervised, an ``EngineClient`` outside of tests."""

    async def start(self) -> Ready: ...
    async def wait_dead(self) -> None: ...


class EngineSupervisor:
    """Starts an engine, and again whenever it dies.

    An engine that ends soon after it was ready, or cannot be started again, is waited for ever longer, and
    given up after the tenth time in a row. The first start must succeed.

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
        ready = await self._engine.start()
        while True:
            await self._on_ready(ready)
            ready_at_s = self._clock.now_s()
            await self._engine.wait_dead()
            if self._expects_end:
                return
            self._on_lost()
            is_quick = self._clock.now_s() - ready_at_s < _QUICK_DEATH_S
            num_quick_deaths = num_quick_deaths + 1 if is_quick else 0
            reason = "it died"
            while True:
                if num_quick_deaths >= _MAX_QUICK_DEATHS:
                    message = f"The engine ended {num_quick_deaths} times soon after it was started"
                    raise EngineDead(f"{message}; the last time {reason}.")
                delay_s = self._delay_s(num_quick_deaths)
                logger.error("the engine is started again in %g s: %s", delay_s, reason)
                await asyncio.sleep(delay_s)
                if self._expects_end:
                    return
                try:
                    ready = await self._engine.start()
                    break
                except BackfillError as error:
                    # Such as memory that the last engine has not given back yet.
                    reason = f"it could not start ({error})"
                    num_quick_deaths += 1

    def _delay_s(self, num_quick_deaths: int) -> float:
        doublings = max(0, num_quick_deaths - 1)
        return min(_LONGEST_RESTART_DELAY_S, self._restart_delay_s * 2.0**doublings)
