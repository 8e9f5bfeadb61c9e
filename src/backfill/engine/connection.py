"""One engine process, from launch to close: commands to it, messages from it, and why it ended."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

import zmq

from backfill.core.config import EngineConfig
from backfill.core.errors import BackfillError
from backfill.engine.environment import engine_environment
from backfill.engine.hang import Watchdog
from backfill.engine.interpreter import ENGINE_NAME, take_interpreter
from backfill.engine.messages import EngineFailed, FromEngine, ToEngine
from backfill.engine.process import DUMP_SIGNAL, EngineLoader, run_engine_process
from backfill.engine.tasks import TaskWatch
from backfill.ipc.child import ChildProcess

logger = logging.getLogger(__name__)

_DUMP_S = 0.5  # for a process to write its stacks


class EngineConnection(ChildProcess[FromEngine, ToEngine]):
    """Launches an engine process, without waiting for it.

    Raises: BackfillError when it cannot be started; its files and sockets are removed then.
    """

    def __init__(self, config: EngineConfig, log_level: str, load: EngineLoader) -> None:
        self._end_reason: str | None = None  # None unless it is known from elsewhere than its exit code
        self._was_killed = False  # by this client, which then says nothing of it
        args, environment = (config, log_level, load), engine_environment(os.environ)
        try:
            super().__init__(
                ENGINE_NAME, run_engine_process, args, FromEngine, environment, take_interpreter()
            )
            self.start()
        except (OSError, zmq.ZMQError) as error:
            reason = error.strerror or error
            raise BackfillError(f"The engine process cannot be started: {reason}.") from error

    async def read(
        self, on_message: Callable[[FromEngine], None], watchdog: Watchdog, tasks: TaskWatch
    ) -> None:
        """Pass messages on until the process ends, of itself or because it hangs and is killed."""
        hanging = tasks.start(self._kill_if_silent(watchdog), "engine-watchdog")
        try:
            while (message := await self.receive()) is not None:
                if isinstance(message, EngineFailed):
                    self._end_reason = message.message
                else:
                    on_message(message)
        except Exception:
            self._end_reason = "The engine's reports could not be read."
            raise
        finally:
            hanging.cancel()
            # Else it was stopped or killed by its client, or its client's event loop has ended.
            if self.exitcode and not self._was_killed:
                logger.error(self.why_it_ended())

    async def _kill_if_silent(self, watchdog: Watchdog) -> None:
        """Kill the process once it hangs, after it had time to write its stacks."""
        await watchdog.wait_silent()
        if self.pid is None or not self.is_alive():
            return
        timeout_s = watchdog.timeout_s
        logger.error(
            "the engine has reported nothing for %g s and is killed; if it still can, it writes its stacks:",
            timeout_s,
        )
        self._end_reason = f"The engine process hung for {timeout_s:g} s and was killed."
        os.kill(self.pid, DUMP_SIGNAL)
        await asyncio.sleep(_DUMP_S)
        await self.give_up()

    def why_it_ended(self) -> str:
        if self._end_reason is not None:
            return self._end_reason
        if self.is_alive():
            return "The event loop that the engine process belonged to has ended."
        return f"The engine process {self.how_it_ended()}."

    def kill(self) -> None:
        self._was_killed |= self.is_alive()
        super().kill()
