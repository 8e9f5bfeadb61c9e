"""Keeps an engine running: starts it, and restarts it when it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass, field

from backfill.core.clock import Clock, WallClock
from backfill.core.errors import BackfillError, EngineDead
from backfill.engine.client import EngineClient
from backfill.engine.messages import Ready
from backfill.ipc.restarts import Restarts

logger = logging.getLogger(__name__)

_RESTART_DELAY_S = 1.0
_LONGEST_RESTART_DELAY_S = 30.0
# Enough for jobs/feeder.py to find a batch line that kills the engine before this limit is reached.
_MAX_QUICK_DEATHS = 10
_QUICK_DEATH_S = 30.0
# Offline work resumes when an engine has run this long.
_TRUSTED_AFTER_S = 300.0


@dataclass(slots=True, eq=False)
class EngineSupervisor:
    """Starts an engine, and restarts it when it ends. The first start must succeed.

    A quick death is an end within 30 s after the engine was ready or before it has computed a step, or a
    restart that fails. The delay before a restart doubles with each quick death in a row. After ten of them
    offline work is suspended: it is the likelier cause, because it is retried after each restart. It resumes
    when an engine has run for five minutes.

    Attributes:
        on_ready: awaited each time the model is loaded.
        on_lost: called each time a loaded engine has ended, before the restart.
        on_offline_suspended: called with True when offline work is suspended, before the restart, and with
            False when it resumes. None where all work is offline: ``run`` ends with EngineDead instead.
        restart_delay_s: before the first restart.
        poll_s: interval of the check whether an engine has run long enough.
    """

    engine: EngineClient
    _: KW_ONLY
    on_ready: Callable[[Ready], Awaitable[None]]
    on_lost: Callable[[], None]
    on_offline_suspended: Callable[[bool], None] | None = None
    clock: Clock = field(default_factory=WallClock)
    restart_delay_s: float = _RESTART_DELAY_S
    poll_s: float = 1.0
    _restarts: Restarts = field(init=False)
    _is_offline_suspended: bool = field(init=False, default=False)
    _expects_end: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._restarts = Restarts("the engine", self.restart_delay_s, _LONGEST_RESTART_DELAY_S)

    def expect_end(self) -> None:
        """The engine's next death is expected: it is no failure, and there is no restart."""
        self._expects_end = True

    async def run(self) -> None:
        """Keep the engine running until an expected end, or until cancelled.

        Raises: BackfillError with the engine's reason when it cannot start the first time, EngineDead when it
        keeps ending and there is no offline work to suspend, and what the first ``on_ready`` raises.
        """
        await self.on_ready(await self.engine.start())
        while True:
            await self._wait_dead()
            if self._expects_end:
                return
            self.on_lost()
            reason = "it ended"
            while True:
                self._suspend_or_give_up(reason)
                await self._restarts.wait(reason)
                if self._expects_end:
                    return
                try:
                    ready = await self.engine.start()
                except BackfillError as error:
                    # For example, memory that the previous engine has not released yet.
                    reason = f"it could not start ({error})"
                except Exception as error:
                    logger.exception("the engine could not be started")
                    reason = f"it could not start ({type(error).__name__}: {error})"
                else:
                    break
                self._restarts.on_death(is_quick=True)
            try:
                await self.on_ready(ready)
            except Exception:
                logger.exception("the engine was started again, but cannot be used; it is ended")
                self.engine.kill()

    async def _wait_dead(self) -> None:
        """Return when the running engine has ended; count a quick death."""
        ready_at_s = self.clock.now_s()
        ended = asyncio.ensure_future(self.engine.wait_dead())
        try:
            while self._is_offline_suspended and not ended.done():
                await asyncio.wait({ended}, timeout=self.poll_s)
                if self._ran_s(ready_at_s) >= _TRUSTED_AFTER_S and not ended.done():
                    logger.warning("the engine is stable again: offline work resumes")
                    self._suspend_offline(False)
            await ended
        finally:
            ended.cancel()
        quick_s = _TRUSTED_AFTER_S if self._is_offline_suspended else _QUICK_DEATH_S
        is_quick = self._ran_s(ready_at_s) < quick_s or not self.engine.has_computed
        self._restarts.on_death(is_quick=is_quick)

    def _ran_s(self, ready_at_s: float) -> float:
        """Seconds from ready to the last report: an engine that hangs is killed long after that."""
        return self.clock.now_s() - ready_at_s - self.engine.silent_s

    def _suspend_or_give_up(self, reason: str) -> None:
        """If the engine keeps ending, suspend offline work, or raise EngineDead where there is no other."""
        num_quick = self._restarts.num_quick
        if num_quick < _MAX_QUICK_DEATHS or self._is_offline_suspended:
            return
        message = f"The engine ended {num_quick} times soon after it was started"
        if self.on_offline_suspended is None:
            raise EngineDead(f"{message}; the last time {reason}.")
        logger.error("%s: offline work is suspended until it has run for %g s", message, _TRUSTED_AFTER_S)
        self._suspend_offline(True)

    def _suspend_offline(self, is_suspended: bool) -> None:
        self._is_offline_suspended = is_suspended
        if self.on_offline_suspended is not None:
            self.on_offline_suspended(is_suspended)
