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
# An engine that has lived so long can be trusted with offline work again.
_TRUSTED_AFTER_S = 300.0
_POLL_S = 1.0


class Startable(Protocol):
    """What is supervised, an ``EngineClient`` outside of tests.

    ``silent_s`` is for how long the engine has reported nothing, or had when it died.
    """

    @property
    def silent_s(self) -> float: ...
    async def start(self) -> Ready: ...
    async def wait_dead(self) -> None: ...
    def kill(self) -> None: ...


class EngineSupervisor:
    """Starts an engine, and again whenever it dies. The first start must succeed.

    An engine that ends, or reports nothing more, soon after it was ready, or cannot be started again, is
    started after a delay that doubles each time. After the tenth time in a row offline work, the likelier
    cause, is suspended: it comes without anyone waiting for it, again and again. It resumes when an engine
    has lived for five minutes.

    Args:
        on_ready: awaited each time the model is loaded.
        on_lost: called each time a loaded engine has died, before it is started again.
        on_offline_suspended: called with True when offline work is to stop, before the next start, and with
            False when it may go on. None where there is no other work: ``run`` ends with EngineDead instead.
        restart_delay_s: before the first restart.
        poll_s: how often it is asked whether an engine has lived long enough.
    """

    def __init__(
        self,
        engine: Startable,
        *,
        on_ready: Callable[[Ready], Awaitable[None]],
        on_lost: Callable[[], None],
        on_offline_suspended: Callable[[bool], None] | None = None,
        clock: Clock | None = None,
        restart_delay_s: float = _RESTART_DELAY_S,
        poll_s: float = _POLL_S,
    ) -> None:
        self._engine = engine
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._on_offline_suspended = on_offline_suspended
        self._clock = clock or WallClock()
        self._restart_delay_s = restart_delay_s
        self._poll_s = poll_s
        self._num_quick_deaths = 0
        self._is_offline_suspended = False
        self._expects_end = False

    def expect_end(self) -> None:
        """A death from now on is final and no failure: what the engine serves is coming to its end."""
        self._expects_end = True

    async def run(self) -> None:
        """Keep the engine running until an expected end, or until cancelled.

        Raises: BackfillError with the engine's reason when it cannot start the first time, EngineDead when it
        keeps dying and there is no offline work to suspend, and what the first ``on_ready`` raises.
        """
        await self._on_ready(await self._engine.start())
        while True:
            await self._live()
            if self._expects_end:
                return
            self._on_lost()
            reason = "it died"
            while True:
                self._judge(reason)
                num_deaths = _MAX_QUICK_DEATHS if self._is_offline_suspended else self._num_quick_deaths
                delay_s = restart_delay_s(num_deaths, self._restart_delay_s)
                logger.error("the engine is started again in %g s: %s", delay_s, reason)
                await asyncio.sleep(delay_s)
                if self._expects_end:
                    return
                try:
                    ready = await self._engine.start()
                except BackfillError as error:
                    # Such as memory that the last engine has not given back yet.
                    reason = f"it could not start ({error})"
                except Exception as error:
                    logger.exception("the engine could not be started")
                    reason = f"it could not start ({type(error).__name__}: {error})"
                else:
                    break
                self._num_quick_deaths += 1
            try:
                await self._on_ready(ready)
            except Exception:
                logger.exception("the engine was started again, but cannot be used; it is ended")
                self._engine.kill()

    async def _live(self) -> None:
        """Return when the engine that is running has died, its life judged."""
        ready_at_s = self._clock.now_s()
        dying = asyncio.ensure_future(self._engine.wait_dead())
        try:
            while self._is_offline_suspended and not dying.done():
                await asyncio.wait({dying}, timeout=self._poll_s)
                if self._lived_s(ready_at_s) >= _TRUSTED_AFTER_S and not dying.done():
                    logger.warning("the engine lives: offline work goes on")
                    self._suspend_offline(False)
            await dying
        finally:
            dying.cancel()
        is_quick = self._lived_s(ready_at_s) < _QUICK_DEATH_S
        self._num_quick_deaths = self._num_quick_deaths + 1 if is_quick else 0

    def _lived_s(self, ready_at_s: float) -> float:
        """Until its last report: one that hangs is killed long after that."""
        return self._clock.now_s() - ready_at_s - self._engine.silent_s

    def _judge(self, reason: str) -> None:
        """Suspend offline work, or give up, where the engine keeps dying. Raises: EngineDead."""
        if self._num_quick_deaths < _MAX_QUICK_DEATHS or self._is_offline_suspended:
            return
        message = f"The engine ended {self._num_quick_deaths} times soon after it was started"
        if self._on_offline_suspended is None:
            raise EngineDead(f"{message}; the last time {reason}.")
        logger.error("%s: offline work is suspended until it lives for %g s", message, _TRUSTED_AFTER_S)
        self._suspend_offline(True)

    def _suspend_offline(self, is_suspended: bool) -> None:
        self._is_offline_suspended = is_suspended
        if self._on_offline_suspended is not None:
            self._on_offline_suspended(is_suspended)


def restart_delay_s(num_quick_deaths: int, first_s: float) -> float:
    """Doubles with each quick death after the first, up to a limit."""
    return min(_LONGEST_RESTART_DELAY_S, first_s * 2.0 ** max(0, num_quick_deaths - 1))
