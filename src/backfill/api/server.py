"""A server's life: bind, load, serve, restart a dead engine, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator

import uvicorn

from backfill.api.app import create_app
from backfill.api.config import ServerConfig
from backfill.api.metrics import JobMetrics, Metrics
from backfill.api.state import Phase, ServerState
from backfill.api.stats_log import StatsLog
from backfill.core.config import EngineConfig
from backfill.core.errors import ConfigError, EngineDead
from backfill.core.request import ServiceClass
from backfill.engine.client import EngineClient
from backfill.engine.messages import Ready, StepReport
from backfill.engine.supervisor import EngineSupervisor
from backfill.generation.generator import TextGenerator
from backfill.generation.tokenizer import Tokenizer
from backfill.jobs.config import JobsConfig
from backfill.jobs.manager import JobManager
from backfill.models.generation_config import GenerationDefaults
from backfill.protocol.service import CompletionService, ServedModel

logger = logging.getLogger(__name__)

_DRAIN_POLL_S = 0.05
_CLOSE_CONNECTIONS_S = 2


def bind(host: str, port: int) -> socket.socket:
    """Take the port before anything slow happens, so that a clash is known at once. Raises: ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        # A deep backlog: load generators open all their connections at once.
        listener.listen(4096)
    except OSError as error:
        listener.close()
        raise ConfigError(f"Cannot listen on {host}:{port}: {error.strerror or error}.") from error
    return listener


class Server:
    """One HTTP server around one engine process.

    Args:
        url: where clients reach it, for whoever finds the data folder taken.
        jobs_config: None switches the Batch API off.
        on_started: called once the data folder is this server's, before the engine is loaded.
        on_ready: called when the first request can be served.
    """

    def __init__(
        self,
        server_config: ServerConfig,
        engine_config: EngineConfig,
        model: ServedModel,
        *,
        url: str,
        jobs_config: JobsConfig | None,
        chat_template: str | None = None,
        uses_generation_config: bool = True,
        on_started: Callable[[], None] | None = None,
        on_ready: Callable[[Ready], None] | None = None,
    ) -> None:
        self._model = model
        self._chat_template = chat_template
        self._uses_generation_config = uses_generation_config
        self._on_started = on_started
        self._on_ready = on_ready
        self._stats_log = StatsLog()
        self._client = EngineClient(
            engine_config, on_report=self._on_report, log_level=server_config.log_level
        )
        self.state = ServerState(server_config, engine_config, self._client)
        self._job_metrics: JobMetrics | None = None
        if jobs_config is not None:
            self._job_metrics = JobMetrics(model.names[0])
            self.state.jobs = JobManager(
                jobs_config, model_names=model.names, url=url, on_event=self._job_metrics
            )
            self._job_metrics.watch(self.state.jobs.snapshot)
        self._supervisor = EngineSupervisor(
            self._client, on_ready=self._on_engine_ready, on_lost=self._on_engine_lost
        )
        self._tokenizer: asyncio.Task[Tokenizer] | None = None  # loads while the engine does
        self._stop_asked = asyncio.Event()

    async def run(self, listener: socket.socket) -> None:
        """Serve until a signal, then drain.

        Raises: BackfillError when the data folder is another server's or the engine cannot be started.
        """
        if self.state.jobs is not None:
            await self.state.jobs.start()
        if self._on_started is not None:
            self._on_started()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        http = _Http(create_app(self.state), self.state.server_config)
        http_task = asyncio.create_task(http.serve(sockets=[listener]))
        log_task = asyncio.create_task(self._stats_log.run())
        self._tokenizer = asyncio.create_task(asyncio.to_thread(self._load_tokenizer))
        engine_task = asyncio.create_task(self._supervisor.run())
        stop_task = asyncio.create_task(self._stop_asked.wait())
        try:
            await asyncio.wait({engine_task, stop_task, http_task}, return_when=asyncio.FIRST_COMPLETED)
            if not engine_task.done():
                await self._drain()
            self.state.phase = Phase.DRAINING
        finally:
            for task in (engine_task, stop_task, log_task, self._tokenizer):
                task.cancel()
            failures = await asyncio.gather(engine_task, self._tokenizer, return_exceptions=True)
            if self.state.jobs is not None:
                await self.state.jobs.pause()
            await self._client.stop()
            http.should_exit = True
            await http_task
            if self.state.jobs is not None:
                # Only now: the next server on the data folder clears away uploads that have no end.
                await self.state.jobs.stop()
        if isinstance(failures[0], Exception):
            raise failures[0]

    async def _on_engine_ready(self, ready: Ready) -> None:
        """Take requests; the service is made once and outlives the engines behind it."""
        if self.state.service is None:
            assert self._tokenizer is not None
            tokenizer = await self._tokenizer
            self.state.metrics = Metrics(
                self._model.names[0],
                ready.info,
                slo=ready.default_slo,
                jobs=self._job_metrics,
                vllm_names=self.state.server_config.vllm_metrics,
            )
            self.state.service = CompletionService(
                self._model,
                self._client,
                tokenizer,
                TextGenerator(self._client, tokenizer, self.state.metrics.requests),
                GenerationDefaults.from_folder(self._model.folder)
                if self._uses_generation_config
                else GenerationDefaults(),
            )
        if self._stop_asked.is_set():
            return
        self.state.phase = Phase.READY
        if self.state.jobs is not None:
            self.state.jobs.engine_ready(self.state.service, self.state.engine_config.scheduler.max_num_seqs)
        if self._on_ready is not None:
            self._on_ready(ready)
            self._on_ready = None  # said once, not at every restart

    def _on_engine_lost(self) -> None:
        if self.state.metrics is not None:
            self.state.metrics.engine.on_death()
        if self.state.jobs is not None:
            self.state.jobs.engine_lost()
        self.state.phase = Phase.RESTARTING

    def _load_tokenizer(self) -> Tokenizer:
        return Tokenizer.from_folder(self._model.folder, chat_template=self._chat_template)

    async def _drain(self) -> None:
        """Refuse new requests, stop offline ones, and let online ones end within the timeout.

        Unfinished lines of batches are left for the next start.
        """
        self.state.phase = Phase.DRAINING
        self._supervisor.expect_end()
        timeout_s = self.state.server_config.drain_timeout_s
        if self.state.num_open > 0:
            logger.info("shutting down: %d open requests have %g s to end", self.state.num_open, timeout_s)
        reason = EngineDead("The server is shutting down.")
        if self.state.jobs is not None:
            await self.state.jobs.pause()
        self._client.interrupt(ServiceClass.OFFLINE, reason)
        deadline_at_s = time.monotonic() + timeout_s
        while self.state.num_open > 0 and time.monotonic() < deadline_at_s:
            await asyncio.sleep(_DRAIN_POLL_S)
        self._client.interrupt(ServiceClass.ONLINE, reason)

    def _on_report(self, report: StepReport) -> None:
        self._stats_log.on_report(report)
        if self.state.metrics is not None:
            self.state.metrics.engine.on_report(report)

    def _on_signal(self) -> None:
        if self._stop_asked.is_set():
            logger.warning("stopping now")
            self._client.abandon()
            os._exit(1)
        self._stop_asked.set()


class _Http(uvicorn.Server):
    """Uvicorn without its signal handlers: the server decides when connections close."""

    def __init__(self, app: object, config: ServerConfig) -> None:
        super().__init__(
            uvicorn.Config(
                app,  # type: ignore[arg-type]
                access_log=False,
                log_config=None,
                log_level="warning",
                timeout_graceful_shutdown=_CLOSE_CONNECTIONS_S,
                server_header=False,
                lifespan="off",
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
