"""The engine process as seen from an asyncio program."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Hashable
from dataclasses import replace

import msgspec
import zmq
import zmq.asyncio

from backfill.core.config import EngineConfig
from backfill.core.errors import BackfillError, EngineDead, StepFailed
from backfill.core.request import Request, RequestId, ServiceClass
from backfill.core.slo import SLO
from backfill.costs.profile import CostProfile
from backfill.engine.environment import engine_environment
from backfill.engine.hang import Watchdog
from backfill.engine.messages import (
    AbortRequests,
    AddRequest,
    FromEngine,
    ProfileRefined,
    Ready,
    StartFailed,
    StepReport,
    Stop,
    ToEngine,
    TokenOutput,
)
from backfill.engine.process import DUMP_SIGNAL, EngineLoader, load_engine, run_engine_process
from backfill.engine.tasks import TaskWatch
from backfill.execution.executor import ExecutorInfo
from backfill.ipc.python_process import PythonProcess
from backfill.ipc.socket_folder import SocketFolder

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 5.0
# What the kernel may take to end a killed process, before nobody waits for it any more: a driver can hold it.
_KILL_TIMEOUT_S = 1.0
# Time for a process to write its stacks.
_DUMP_S = 0.5
_POLL_S = 0.2


class _Stream:
    """Where one request's outputs wait for its reader."""

    __slots__ = ("_on_end", "_on_first_token", "group", "queue", "service_class")

    def __init__(
        self,
        service_class: ServiceClass,
        group: Hashable,
        on_first_token: Callable[[], None] | None,
        on_end: Callable[[], None] | None,
    ) -> None:
        self.service_class = service_class
        self.group = group
        self.queue: asyncio.Queue[TokenOutput | BackfillError] = asyncio.Queue()
        self._on_first_token = on_first_token
        self._on_end = on_end

    def put(self, output: TokenOutput | BackfillError) -> None:
        self.queue.put_nowait(output)
        if self._on_first_token is not None and isinstance(output, TokenOutput):
            self._on_first_token()
            self._on_first_token = None
        if isinstance(output, BackfillError) or output.finish_reason is not None:
            self.end()

    def end(self) -> None:
        """Say once that the engine is done with the request, whether or not its outputs were read."""
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()


class EngineClient:
    """Starts the engine process, feeds it requests, and hands each its outputs.

    One event loop owns a client. After ``EngineDead`` was raised to the requests it held, the client
    accepts nothing until ``start`` succeeded again.

    Attributes:
        info: the running engine's; None while none runs.
        default_slo: of the first engine. Those that follow keep to it: objectives do not change while a
            server runs.

    Args:
        on_report: called with each step's report, for metrics.
        on_profile: called with each refined cost profile.
        tasks: starts the client's own tasks.
        load: makes the engine, in its process.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_report: Callable[[StepReport], None] | None = None,
        on_profile: Callable[[CostProfile], None] | None = None,
        log_level: str = "INFO",
        tasks: TaskWatch | None = None,
        load: EngineLoader = load_engine,
    ) -> None:
        self.config = config
        self._on_report = on_report
        self._on_profile = on_profile
        self._log_level = log_level
        self._tasks = tasks or TaskWatch()
        self._load = load
        self._watchdog = Watchdog(0.0)
        self._end_reason: str | None = None  # where the process did not end of itself
        self._process: PythonProcess | None = None
        self._context: zmq.asyncio.Context | None = None
        self._commands: zmq.Socket[bytes] | None = None
        self._reports: zmq.asyncio.Socket | None = None
        self._reader: asyncio.Task[None] | None = None
        self._folder: SocketFolder | None = None
        self._starting: asyncio.Task[Ready] | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._streams: dict[RequestId, _Stream] = {}  # of the requests the engine has
        self.info: ExecutorInfo | None = None
        self.default_slo: SLO | None = None

    @property
    def is_ready(self) -> bool:
        return self.info is not None

    @property
    def pid(self) -> int | None:
        """Of the process that was started last."""
        return None if self._process is None else self._process.pid

    @property
    def num_in_flight(self) -> int:
        """Requests that the engine has."""
        return len(self._streams)

    @property
    def silent_s(self) -> float:
        """For how long the engine has reported nothing; of one that is dead, had reported."""
        return self._watchdog.silent_s

    def set_callbacks(
        self,
        *,
        on_report: Callable[[StepReport], None],
        on_profile: Callable[[CostProfile], None],
        tasks: TaskWatch,
    ) -> None:
        """Give what a client that was launched early could not be made with. Called before ``start``."""
        self._on_report, self._on_profile, self._tasks = on_report, on_profile, tasks

    def launch(self) -> None:
        """Begin the process, and leave it to ``start`` to wait for it. It needs no event loop.

        The engine then loads while its caller does something else, such as importing what it needs.

        Raises: BackfillError when it cannot be started; nothing is left of it then.
        """
        assert self._folder is None, "there is a process already"
        try:
            self._launch()
        except (OSError, zmq.ZMQError) as error:
            self._close()
            raise BackfillError(
                f"The engine process cannot be started: {error.strerror or error}."
            ) from error
        except BaseException:
            self._close()
            raise

    async def start(self) -> Ready:
        """Launch the process, if it was not, and wait until the model is loaded.

        Raises: BackfillError with the reason when it cannot start, EngineDead where ``stop`` ends the start;
        nothing is left of it then.
        """
        starting = self._starting = asyncio.ensure_future(self._start())
        try:
            return await starting
        except BaseException as error:
            self._close()
            if isinstance(error, asyncio.CancelledError) and self._starting is not starting:
                raise EngineDead("The engine was stopped while it was started.") from None
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
            (self.config, commands_url, reports_url, self._log_level, self._load),
            environment=engine_environment(os.environ),
        )
        self._process.start()

    async def _start(self) -> Ready:
        if self._reports is None:
            self.launch()
        reports = self._reports
        assert reports is not None
        decoder = msgspec.msgpack.Decoder(FromEngine)
        first = await self._first_message(reports, decoder)
        if not isinstance(first, Ready):
            raise BackfillError(first.message if isinstance(first, StartFailed) else self._how_it_ended())
        if self.default_slo is None:
            self.default_slo = first.default_slo
            self.config = _with_objectives(self.config, first.default_slo)
        self.info = first.info
        self._watchdog = Watchdog(first.hang_timeout_s)
        self._end_reason = None
        self._reader = self._tasks.start(self._read(reports, decoder), "engine-reports")
        return first

    async def wait_dead(self) -> None:
        """Return once the process that ``start`` launched has ended and its requests were told."""
        assert self._reader is not None
        await asyncio.wait([self._reader])

    async def stop(self) -> None:
        """End the process, also one that is still loading; requests in flight get EngineDead."""
        starting, self._starting = self._starting, None
        if starting is not None and not starting.done():
            starting.cancel()
            await asyncio.wait([starting])
        if self.is_ready and self._process is not None:
            self._send(Stop())
            deadline_at_s = time.monotonic() + _STOP_TIMEOUT_S
            while self._process.is_alive() and time.monotonic() < deadline_at_s:
                await asyncio.sleep(0.01)
        self.kill()
        reader = self._reader
        if reader is not None:  # several callers may wait for it
            await asyncio.wait([reader], timeout=_STOP_TIMEOUT_S)
            reader.cancel()
            await asyncio.wait([reader])
            self._reader = None
        self._close()

    def kill(self) -> None:
        """End the process at once, and wait for that a moment."""
        if self._process is not None and self._process.is_alive():
            self._process.kill()
            self._process.join(_KILL_TIMEOUT_S)

    def abandon(self) -> None:
        """End the process and remove its files at once, for a caller that is about to exit."""
        self.kill()
        if self._folder is not None:
            self._folder.remove()

    def interrupt(self, service_class: ServiceClass, error: EngineDead) -> None:
        """Abort every request of a class in flight; each gets ``error``."""
        self._interrupt(lambda stream: stream.service_class is service_class, error)

    def interrupt_group(self, group: Hashable, error: BackfillError) -> None:
        """Abort every request of a group in flight; each gets ``error``."""
        self._interrupt(lambda stream: stream.group == group, error)

    def _interrupt(self, is_meant: Callable[[_Stream], bool], error: BackfillError) -> None:
        request_ids = [request_id for request_id, stream in self._streams.items() if is_meant(stream)]
        for request_id in request_ids:
            self._streams.pop(request_id).put(error)
        if request_ids:
            self._send(AbortRequests(request_ids))

    async def generate(
        self,
        request: Request,
        *,
        group: Hashable | None = None,
        on_first_token: Callable[[], None] | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> AsyncGenerator[TokenOutput, None]:
        """Yield the request's outputs to the last. Closing the iterator early aborts the request.

        Args:
            group: equal for the choices of one client request; None for a request of its own.
            on_first_token: called once, when the first output comes from the engine; it may be unread still.
            on_end: called once, when the engine is done with the request; outputs may wait to be read still.
        Raises: EngineDead if the engine ends first or is not running, StepFailed if the request was lost in a
        step that failed, and what it is interrupted with.
        """
        if self._commands is None or self.info is None:
            raise EngineDead("The engine is not running; it is being started. Please retry.")
        request_id = request.request_id
        assert request_id not in self._streams, f"{request_id} is in flight already"
        stream = self._streams[request_id] = _Stream(
            request.service_class, request_id if group is None else group, on_first_token, on_end
        )
        is_over = False
        try:
            if not self._send(AddRequest(request)):
                is_over = True
                raise EngineDead("The engine process has ended.")
            while not is_over:
                output = await stream.queue.get()
                if isinstance(output, BackfillError):
                    is_over = True
                    raise output
                is_over = output.finish_reason is not None
                yield output
        finally:
            if self._streams.get(request_id) is stream:
                del self._streams[request_id]
            stream.end()
            if not is_over:
                self._send(AbortRequests([request_id]))

    def _send(self, command: ToEngine) -> bool:
        """Hand a command to the engine; False when there is no engine to take it."""
        if self._commands is None:
            return False
        try:
            self._commands.send(self._encoder.encode(command), zmq.NOBLOCK)
        except zmq.Again:  # the peer is gone; the reader will notice its end
            return False
        return True

    async def _first_message(
        self, reports: zmq.asyncio.Socket, decoder: msgspec.msgpack.Decoder[FromEngine]
    ) -> FromEngine | None:
        """The engine's first word, or None if it ended without one."""
        assert self._process is not None
        while True:
            was_alive = self._process.is_alive()
            if await reports.poll(_POLL_S * 1000):
                return decoder.decode(await reports.recv())
            if not was_alive:
                return None

    async def _read(self, reports: zmq.asyncio.Socket, decoder: msgspec.msgpack.Decoder[FromEngine]) -> None:
        """Hand out reports until the process ends, of itself or because it hangs."""
        assert self._process is not None
        has_ended = asyncio.Event()
        loop, sentinel = asyncio.get_running_loop(), self._process.sentinel
        loop.add_reader(sentinel, has_ended.set)
        ending = asyncio.create_task(has_ended.wait())
        hanging = self._tasks.start(self._end_if_it_hangs(self._process), "engine-watchdog")
        try:
            while True:
                arrival = asyncio.ensure_future(reports.recv())
                await asyncio.wait({arrival, ending, hanging}, return_when=asyncio.FIRST_COMPLETED)
                if not arrival.done():
                    arrival.cancel()
                    break
                self._dispatch(decoder.decode(arrival.result()))
        except Exception:
            self._end_reason = "The engine's reports could not be read."
            raise
        finally:
            loop.remove_reader(sentinel)
            ending.cancel()
            hanging.cancel()
            self._process.join(_POLL_S)
            if self._process.exitcode:  # else it was asked to, or nobody listens any more
                logger.error(self._how_it_ended())
            self.info = None
            lost, self._streams = self._streams, {}
            groups = Counter(stream.group for stream in lost.values())
            for stream in lost.values():
                num_others = len(lost) - groups[stream.group]
                stream.put(EngineDead(self._how_it_ended(), num_lost=len(lost), num_others=num_others))
            self._close()

    async def _end_if_it_hangs(self, process: PythonProcess) -> None:
        """Return once the process hangs, has said where, and was killed."""
        await self._watchdog.wait_silent()
        if not process.is_alive() or process.pid is None:
            return
        timeout_s = self._watchdog.timeout_s
        logger.error(
            "the engine has reported nothing for %g s and is killed; if it still can, it says where it is:",
            timeout_s,
        )
        self._end_reason = f"The engine process hung for {timeout_s:g} s and was killed."
        os.kill(process.pid, DUMP_SIGNAL)
        await asyncio.sleep(_DUMP_S)
        process.kill()
        deadline_at_s = time.monotonic() + _KILL_TIMEOUT_S
        while process.is_alive() and time.monotonic() < deadline_at_s:
            await asyncio.sleep(0.01)

    def _dispatch(self, report: FromEngine) -> None:
        self._watchdog.on_report()
        if isinstance(report, ProfileRefined):
            if self._on_profile is not None:
                self._on_profile(report.profile)
            return
        assert isinstance(report, StepReport)
        failed = [self._streams.get(request_id) for request_id in report.stats.step.failed_request_ids]
        groups = Counter(stream.group for stream in failed if stream is not None)
        for output in report.outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:  # else: aborted here while the engine still worked on it
                if output.num_lost:
                    num_others = output.num_lost - groups[stream.group]
                    message = output.message or "The step failed."
                    stream.put(StepFailed(message, num_lost=output.num_lost, num_others=num_others))
                else:
                    stream.put(output)
                if output.finish_reason is not None:  # no longer in flight, whenever its reader comes
                    del self._streams[output.request_id]
        if self._on_report is not None:
            self._on_report(report)

    def _how_it_ended(self) -> str:
        assert self._process is not None
        if self._end_reason is not None:
            return self._end_reason
        code = self._process.exitcode
        if code is None:
            return "The event loop that the engine process belonged to has ended."
        if code < 0:
            return f"The engine process was killed by signal {-code}."
        return f"The engine process ended with exit code {code}."

    def _close(self) -> None:
        """Give back sockets and folder; a process that still runs is of no more use and is killed."""
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


def _with_objectives(config: EngineConfig, slo: SLO) -> EngineConfig:
    scheduler = replace(config.scheduler, ttft_slo_s=slo.ttft_s, tpot_slo_s=slo.tpot_s)
    return replace(config, scheduler=scheduler)
