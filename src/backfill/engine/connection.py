"""One engine process and the two sockets to it, from launch to close."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from backfill.core.config import EngineConfig
from backfill.core.errors import BackfillError
from backfill.engine.environment import engine_environment
from backfill.engine.hang import Watchdog
from backfill.engine.messages import EngineFailed, FromEngine, ToEngine
from backfill.engine.process import DUMP_SIGNAL, EngineLoader, run_engine_process
from backfill.engine.tasks import TaskWatch
from backfill.ipc.python_process import PythonProcess
from backfill.ipc.socket_folder import SocketFolder

logger = logging.getLogger(__name__)

# A driver can delay the end of a killed process; after this nobody waits for it any longer.
_KILL_TIMEOUT_S = 1.0
# Time for a process to write its stacks.
_DUMP_S = 0.5
_POLL_S = 0.2
# The last message and the end of the process are noticed in any order.
_LAST_MESSAGE_S = 0.1


class EngineConnection:
    """Launches an engine process, sends it commands, and receives its messages.

    Only receiving needs an event loop.
    """

    def __init__(self, config: EngineConfig, log_level: str, load: EngineLoader) -> None:
        self._config, self._log_level, self._load = config, log_level, load
        self._end_reason: str | None = None  # None unless this client ended the process
        self._was_killed = False  # by this client, which then says nothing of it
        self._folder: SocketFolder | None = None
        self._context: zmq.asyncio.Context | None = None
        self._commands: zmq.Socket[bytes] | None = None
        self._reports: zmq.asyncio.Socket | None = None
        self._process: PythonProcess | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)

    def launch(self) -> None:
        """Start the process without waiting for it.

        Raises: BackfillError when it cannot be started; its files and sockets are removed then.
        """
        try:
            self._launch()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError | zmq.ZMQError):
                reason = error.strerror or error
                raise BackfillError(f"The engine process cannot be started: {reason}.") from error
            raise

    def _launch(self) -> None:
        self._folder = SocketFolder()
        commands_url, reports_url = self._folder.url("commands"), self._folder.url("reports")
        self._context = zmq.asyncio.Context()
        # Not an asyncio socket: sending never waits, so it can neither hang nor be cancelled.
        self._commands = zmq.Context(self._context).socket(zmq.PUSH)
        self._reports = self._context.socket(zmq.PULL)
        for socket, url in ((self._commands, commands_url), (self._reports, reports_url)):
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(url)
        self._process = PythonProcess(
            "backfill-engine",
            run_engine_process,
            (self._config, commands_url, reports_url, self._log_level, self._load),
            environment=engine_environment(os.environ),
        )
        self._process.start()

    @property
    def is_open(self) -> bool:
        return self._folder is not None

    @property
    def is_alive(self) -> bool:
        """The process has not ended."""
        return self._process is not None and self._process.is_alive()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def send(self, command: ToEngine) -> bool:
        """Hand a command to the engine; False when there is no engine to take it."""
        if self._commands is None:
            return False
        try:
            self._commands.send(self._encoder.encode(command), zmq.NOBLOCK)
        except zmq.Again:  # the peer is gone; the reader will notice its end
            return False
        return True

    async def first_message(self) -> FromEngine | None:
        """The engine's first message, or None if it ended without one."""
        reports = self._reports
        assert reports is not None
        while True:
            was_alive = self.is_alive
            if await reports.poll(_POLL_S * 1000):
                return self._decoder.decode(await reports.recv())
            if not was_alive:
                return None

    async def read(
        self, on_message: Callable[[FromEngine], None], watchdog: Watchdog, tasks: TaskWatch
    ) -> None:
        """Pass messages on until the process ends, of itself or because it hangs and is killed."""
        process, reports = self._process, self._reports
        assert process is not None and reports is not None
        has_ended = asyncio.Event()
        loop, sentinel = asyncio.get_running_loop(), process.sentinel
        loop.add_reader(sentinel, has_ended.set)
        ending = asyncio.create_task(has_ended.wait())
        hanging = tasks.start(self._kill_if_silent(process, watchdog), "engine-watchdog")
        try:
            while True:
                arrival = asyncio.ensure_future(reports.recv())
                await asyncio.wait({arrival, ending, hanging}, return_when=asyncio.FIRST_COMPLETED)
                if not arrival.done():  # it may have sent why it ends
                    await asyncio.wait({arrival}, timeout=_LAST_MESSAGE_S)
                if not arrival.done():
                    arrival.cancel()
                    break
                message = self._decoder.decode(arrival.result())
                if isinstance(message, EngineFailed):
                    self._end_reason = message.message
                else:
                    on_message(message)
        except Exception:
            self._end_reason = "The engine's reports could not be read."
            raise
        finally:
            loop.remove_reader(sentinel)
            ending.cancel()
            hanging.cancel()
            process.join(_POLL_S)
            # Else it was stopped or killed by its client, or its client's event loop has ended.
            if process.exitcode and not self._was_killed:
                logger.error(self.how_it_ended())

    async def _kill_if_silent(self, process: PythonProcess, watchdog: Watchdog) -> None:
        """Kill the process once it hangs, after it had time to write its stacks."""
        await watchdog.wait_silent()
        if not process.is_alive() or process.pid is None:
            return
        timeout_s = watchdog.timeout_s
        logger.error(
            "the engine has reported nothing for %g s and is killed; if it still can, it writes its stacks:",
            timeout_s,
        )
        self._end_reason = f"The engine process hung for {timeout_s:g} s and was killed."
        os.kill(process.pid, DUMP_SIGNAL)
        await asyncio.sleep(_DUMP_S)
        process.kill()
        await self.wait_ended(_KILL_TIMEOUT_S)

    async def wait_ended(self, timeout_s: float) -> None:
        """Return when the process has ended, or after the timeout."""
        deadline_at_s = time.monotonic() + timeout_s
        while self.is_alive and time.monotonic() < deadline_at_s:
            await asyncio.sleep(0.01)

    def how_it_ended(self) -> str:
        assert self._process is not None
        if self._end_reason is not None:
            return self._end_reason
        code = self._process.exitcode
        if code is None:
            return "The event loop that the engine process belonged to has ended."
        if code < 0:
            return f"The engine process was killed by signal {-code}."
        return f"The engine process ended with exit code {code}."

    def kill(self) -> None:
        """End the process now, and wait up to a second for its end."""
        if self._process is not None and self.is_alive:
            self._was_killed = True
            self._process.kill()
            self._process.join(_KILL_TIMEOUT_S)

    def abandon(self) -> None:
        """End the process and remove its files, for a caller that is about to exit."""
        self.kill()
        if self._folder is not None:
            self._folder.remove()

    def close(self) -> None:
        """End the process, and close sockets and folder."""
        self.kill()
        for socket in (self._commands, self._reports):
            if socket is not None:
                socket.close()
        self._commands = self._reports = None
        if self._context is not None:
            self._context.term()
            self._context = None
        if self._folder is not None:
            self._folder.remove()
            self._folder = None
