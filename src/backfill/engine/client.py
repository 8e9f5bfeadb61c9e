"""The engine process as seen from an asyncio program."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Hashable

from backfill.core.config import EngineConfig
from backfill.core.errors import BackfillError, EngineDead
from backfill.core.options import with_options
from backfill.core.request import Request, ServiceClass
from backfill.core.slo import SLO
from backfill.costs.profile import CostProfile
from backfill.engine.connection import EngineConnection
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
    TokenOutput,
)
from backfill.engine.process import EngineLoader, load_engine
from backfill.engine.streams import RequestStream, RequestStreams
from backfill.engine.tasks import TaskWatch
from backfill.execution.executor import ExecutorInfo

_STOP_TIMEOUT_S = 5.0


class EngineClient:
    """Starts the engine process, sends it requests, and gives each its outputs.

    One event loop owns a client. When the engine ends, its requests get ``EngineDead``; the client accepts
    new ones after ``start`` has succeeded again.

    Attributes:
        info: the running engine's; None while none runs.
        has_computed: the engine that was started last has run a step that did not fail.
        default_slo: of the first engine, until widened defaults return. Later engines keep it.
        on_report: called with each step's report, for metrics.
        on_profile: called with each refined cost profile.
        tasks: starts the client's own tasks.

    Args:
        load: makes the engine, in its process.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_report: Callable[[StepReport], None] = lambda _: None,
        on_profile: Callable[[CostProfile], None] = lambda _: None,
        log_level: str = "INFO",
        load: EngineLoader = load_engine,
    ) -> None:
        self.config = config
        self.on_report = on_report
        self.on_profile = on_profile
        self._log_level = log_level
        self.tasks = TaskWatch()
        self._load = load
        self._watchdog = Watchdog(0.0)
        self._connection: EngineConnection | None = None
        self._reader: asyncio.Task[None] | None = None
        self._starting: asyncio.Task[Ready] | None = None
        self._streams = RequestStreams()
        self.info: ExecutorInfo | None = None
        self.has_computed = False
        self.default_slo: SLO | None = None

    @property
    def is_ready(self) -> bool:
        return self.info is not None

    @property
    def pid(self) -> int | None:
        """Of the process that was started last."""
        return None if self._connection is None else self._connection.pid

    @property
    def num_in_flight(self) -> int:
        """Requests that the engine has."""
        return len(self._streams)

    @property
    def silent_s(self) -> float:
        """Seconds since the engine's last report; for a dead engine, until its death."""
        return self._watchdog.silent_s

    def launch(self) -> None:
        """Start the process without waiting for it; ``start`` waits. It needs no event loop.

        The engine loads while the caller does other work, such as imports.

        Raises: BackfillError when the process cannot be started; its files are removed then.
        """
        assert not self._is_open, "there is a process already"
        self.has_computed = False
        self._connection = EngineConnection(self.config, self._log_level, self._load)

    async def start(self) -> Ready:
        """Launch the process, if it was not, and wait until the model is loaded.

        Raises: BackfillError with the reason when it cannot start, EngineDead if ``stop`` ends the start. The
            process has ended then, and its files are removed.
        """
        starting = self._starting = asyncio.ensure_future(self._start())
        try:
            return await starting
        except BaseException as error:
            self._close()
            if isinstance(error, asyncio.CancelledError) and self._starting is not starting:
                raise EngineDead("The engine was stopped while it was started.") from None
            raise

    async def _start(self) -> Ready:
        if not self._is_open:
            self.launch()
        connection = self._connection
        assert connection is not None
        first = await connection.receive()
        if not isinstance(first, Ready):
            raise BackfillError(
                first.message if isinstance(first, StartFailed) else connection.why_it_ended()
            )
        self._keep_slo(first.default_slo)
        self.info = first.info
        self._watchdog = Watchdog(first.hang_timeout_s)
        self._reader = self.tasks.start(self._read(connection), "engine-reports")
        return first

    async def wait_dead(self) -> None:
        """Return once the process that ``start`` launched has ended and its requests got EngineDead."""
        assert self._reader is not None
        await asyncio.wait([self._reader])

    async def stop(self) -> None:
        """End the process, also one that is still loading; requests in flight get EngineDead."""
        starting, self._starting = self._starting, None
        if starting is not None and not starting.done():
            starting.cancel()
            await asyncio.wait([starting])
        if self.is_ready and self._connection is not None:
            self._connection.send(Stop())
            await self._connection.wait(_STOP_TIMEOUT_S)
        self.kill()
        reader = self._reader
        if reader is not None:  # several callers may wait for it
            await asyncio.wait([reader], timeout=_STOP_TIMEOUT_S)
            reader.cancel()
            await asyncio.wait([reader])
            self._reader = None
        self._close()

    def kill(self) -> None:
        """End the process now, and wait up to a second for its end."""
        if self._connection is not None:
            self._connection.kill()

    def abandon(self) -> None:
        """End the process and remove its files, for a caller that is about to exit."""
        if self._connection is not None:
            self._connection.abandon()

    def interrupt(self, service_class: ServiceClass, error: EngineDead) -> None:
        """End every request in flight of a service class with ``error``."""
        self._interrupt(lambda stream: stream.service_class is service_class, error)

    def interrupt_group(self, group: Hashable, error: BackfillError) -> None:
        """End every request in flight of a group with ``error``."""
        self._interrupt(lambda stream: stream.group == group, error)

    def _interrupt(self, is_meant: Callable[[RequestStream], bool], error: BackfillError) -> None:
        request_ids = self._streams.fail(is_meant, error)
        if request_ids and self._connection is not None:
            self._connection.send(AbortRequests(request_ids))

    async def generate(
        self,
        request: Request,
        *,
        group: Hashable | None = None,
        on_prompt_progress: Callable[[int], None] | None = None,
        on_first_token: Callable[[], None] | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> AsyncGenerator[TokenOutput, None]:
        """Yield all outputs of a request. Closing the iterator early aborts the request.

        Args:
            group: equal for the choices of one client request; None for a request of its own.
            on_prompt_progress: of an online request, called after each step that was to compute a part of its
                prompt, with the tokens that are computed by then.
            on_first_token: called once, when the first output comes from the engine, read or not.
            on_end: called once, when the engine is done with the request, even if outputs are still unread.
        Raises: EngineDead if the engine ends first or is not running, StepFailed if the request was lost in a
            step that failed, and the error of ``interrupt`` or ``interrupt_group``.
        """
        connection = self._connection
        if connection is None or not connection.is_open or self.info is None:
            raise EngineDead("The engine is not running; it is being started. Please retry.")
        request_id = request.request_id
        group = request_id if group is None else group
        stream = RequestStream(request.service_class, group, on_prompt_progress, on_first_token, on_end)
        self._streams.add(request_id, stream)
        is_over = False
        try:
            if not connection.send(AddRequest(request)):
                is_over = True
                self._streams.remove(request_id, stream)  # else it would count as lost with the others
                await connection.wait(_STOP_TIMEOUT_S)
                raise EngineDead(connection.why_it_ended())
            while not is_over:
                output = await stream.queue.get()
                if isinstance(output, BackfillError):
                    is_over = True
                    raise output
                is_over = output.finish_reason is not None
                yield output
        finally:
            self._streams.remove(request_id, stream)
            if not is_over:
                connection.send(AbortRequests([request_id]))

    @property
    def _is_open(self) -> bool:
        return self._connection is not None and self._connection.is_open

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    async def _read(self, connection: EngineConnection) -> None:
        """Hand out reports until the process ends; then end its requests."""
        try:
            await connection.read(self._on_message, self._watchdog, self.tasks)
        finally:
            self.info = None
            self._streams.lose_all(connection.why_it_ended())
            connection.close()

    def _keep_slo(self, slo: SLO) -> None:
        """Also for the engine after this one."""
        self.default_slo = slo
        self.config = with_options(self.config, {"kept_slo": slo})

    def _on_message(self, message: FromEngine) -> None:
        self._watchdog.on_report()
        if isinstance(message, ProfileRefined):
            self._keep_slo(message.default_slo)
            self.on_profile(message.profile)
            return
        assert isinstance(message, StepReport)
        self.has_computed |= message.stats.step.kind != "none"
        self._streams.put(message)
        self.on_report(message)
