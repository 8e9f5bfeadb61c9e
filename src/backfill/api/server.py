"""A server's life: bind, load, serve, restart a dead engine, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import uvicorn

from backfill.api.app import create_app
from backfill.api.config import ServerConfig
from backfill.api.http_protocol import ConnectionLimits, LimitedHttpProtocol
from backfill.api.keys import ApiKeys, KeyFileWatch
from backfill.api.loop_lag import LoopLag
from backfill.api.metrics import JobMetrics, Metrics, ObjectiveCounts
from backfill.api.open_files import default_max_connections, raise_open_files_limit
from backfill.api.shedding import Shedder
from backfill.api.state import Phase, ServerState
from backfill.api.stats_log import StatsLog
from backfill.core.config import EngineConfig
from backfill.core.errors import EngineDead
from backfill.core.heap import freeze_heap
from backfill.core.request import ServiceClass
from backfill.costs.profile import CostProfile
from backfill.engine.client import EngineClient
from backfill.engine.messages import Ready, StepReport
from backfill.engine.supervisor import EngineSupervisor
from backfill.engine.tasks import TaskWatch
from backfill.generation.generator import TextGenerator
from backfill.ipc.child import abandon_children
from backfill.jobs.config import JobsConfig
from backfill.jobs.manager import JobManager
from backfill.preparation.client import PreparationClient
from backfill.preparation.messages import PreparationSetup
from backfill.protocol.preparer import EngineFacts, RequestPreparer, ServedModel
from backfill.protocol.service import CompletionService
from backfill.scheduling.objectives import check_server_slo

logger = logging.getLogger(__name__)

_DRAIN_POLL_S = 0.05
# Its start takes 1.5 s of a processor, which the engine's start and the first answers need more.
_PREPARATION_WITHIN_S = 6.0
_CLOSE_CONNECTIONS_S = 2
_WHOLE_BODY_FACTOR = 10  # of the time that a body may pause


class Server:
    """One HTTP server around one engine process.

    Args:
        client: of the engine, which may have been launched.
        url: where clients reach it, for whoever finds the data folder taken.
        api_keys: None asks for none.
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
        client: EngineClient,
        url: str,
        api_keys: ApiKeys | None = None,
        jobs_config: JobsConfig | None,
        chat_template: str | None = None,
        uses_generation_config: bool = True,
        on_started: Callable[[], None] | None = None,
        on_ready: Callable[[Ready], None] | None = None,
    ) -> None:
        self._model = model
        self._on_started = on_started
        self._on_ready = on_ready
        self._stats_log = StatsLog(self._objective_counts)
        self._loop_lag = LoopLag(model.names[0])
        self._tasks = TaskWatch()
        self._client = client
        client.set_callbacks(on_report=self._on_report, on_profile=self._on_profile, tasks=self._tasks)
        self._preparation = PreparationClient(
            PreparationSetup(
                model=model,
                chat_template=chat_template,
                uses_generation_config=uses_generation_config,
                max_response_tokens=server_config.max_response_tokens,
                is_strict=server_config.is_strict,
                log_level=server_config.log_level,
            ),
            self._tasks,
        )
        self.state = ServerState(
            server_config, engine_config, self._client, self._preparation, api_keys=api_keys
        )
        self._key_file_watch: KeyFileWatch | None = None
        if api_keys is not None and server_config.api_key_file is not None:
            self._key_file_watch = KeyFileWatch(api_keys)
        self._job_metrics: JobMetrics | None = None
        if jobs_config is not None:
            self._job_metrics = JobMetrics(model.names[0])
            self.state.jobs = JobManager(
                jobs_config,
                self._preparation,
                model_names=model.names,
                url=url,
                on_event=self._job_metrics,
                tasks=self._tasks,
            )
            self._job_metrics.watch(self.state.jobs.snapshot)
        self._supervisor = EngineSupervisor(
            self._client,
            on_ready=self._on_engine_ready,
            on_lost=self._on_engine_lost,
            on_offline_suspended=self.state.suspend_offline,
        )
        self._loading: asyncio.Task[RequestPreparer] | None = None  # while the engine loads
        self._lag_task: asyncio.Task[None] | None = None
        self._stop_asked = asyncio.Event()
        self._stopped_by: signal.Signals | None = None
        self._was_ready = False

    async def run(self, listener: socket.socket) -> signal.Signals | None:
        """Serve until a signal, then drain.

        Returns: the signal, if it came before the first request could be served.
        Raises: BackfillError when the data folder is another server's or the engine cannot be started.
        """
        if self.state.jobs is not None:
            await self.state.jobs.start()
        if self._on_started is not None:
            self._on_started()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        limits = _connection_limits(self.state.server_config, raise_open_files_limit())
        http = HttpServer(create_app(self.state), limits)
        http_task = asyncio.create_task(http.serve(sockets=[listener]))
        log_task = self._tasks.start(self._stats_log.run(), "stats-log")
        self._preparation.start(within_s=_PREPARATION_WITHIN_S)
        self._loading = asyncio.create_task(asyncio.to_thread(self._load_preparer))
        engine_task = asyncio.create_task(self._supervisor.run())
        if self._key_file_watch is not None:
            self._key_file_watch.start()
        stop_task = asyncio.create_task(self._stop_asked.wait())
        try:
            await asyncio.wait({engine_task, stop_task, http_task}, return_when=asyncio.FIRST_COMPLETED)
            if not engine_task.done():
                await self._drain()
            self.state.phase = Phase.DRAINING
        finally:
            if self._key_file_watch is not None:
                self._key_file_watch.stop()
            for task in (engine_task, stop_task, log_task, self._lag_task, self._loading):
                if task is not None:
                    task.cancel()
            failures = await asyncio.gather(engine_task, self._loading, return_exceptions=True)
            if self.state.jobs is not None:
                await self.state.jobs.pause()
            await self._client.stop()
            http.should_exit = True
            await http_task
            if self.state.jobs is not None:
                # Only now: the next server on the data folder clears away uploads that have no end.
                await self.state.jobs.stop()
            await self._preparation.stop()
        if isinstance(failures[0], Exception):
            raise failures[0]
        return None if self._was_ready else self._stopped_by

    async def _on_engine_ready(self, ready: Ready) -> None:
        """Take requests; the service is made once and outlives the engines behind it.

        Raises: ConfigError for objectives of the server that the first engine can never meet.
        """
        if self.state.service is None:
            for warning in check_server_slo(self.state.engine_config.scheduler, ready.profile):
                logger.warning(warning)
        assert self._loading is not None
        preparer = await self._loading
        self._use(preparer, EngineFacts.of(ready, self.state.engine_config.scheduler))
        if self.state.service is None:
            self.state.metrics = Metrics(
                self._model.names[0],
                ready.info,
                slo=ready.default_slo,
                loop_lag=self._loop_lag,
                jobs=self._job_metrics,
                preparation=self._preparation,
                task_failures=self._tasks.failures,
                vllm_names=self.state.server_config.vllm_metrics,
            )
            self.state.preparer = preparer
            self.state.service = CompletionService(
                preparer.tokenizer,
                TextGenerator(self._client, preparer.tokenizer, self.state.metrics.requests),
            )
            if self.state.server_config.sheds_hopeless and ready.cost is not None:
                self.state.shedder = Shedder(ready.cost, self.state.engine_config.scheduler)
            freeze_heap()
            # From here on there are streams to hold up.
            self._lag_task = self._tasks.start(self._loop_lag.run(), "loop-lag")
        if ready.profile is not None:
            self._show_profile(ready.profile)
        if self._stop_asked.is_set():
            return
        self.state.phase = Phase.READY
        self._was_ready = True
        self.state.feed_jobs()
        if self._on_ready is not None:
            self._on_ready(ready)
            self._on_ready = None  # said once, not at every restart

    def _on_engine_lost(self) -> None:
        if self.state.metrics is not None:
            self.state.metrics.engine.on_death()
        if self.state.jobs is not None:
            self.state.jobs.engine_lost()
        self.state.phase = Phase.RESTARTING

    def _load_preparer(self) -> RequestPreparer:
        setup = self._preparation.setup
        return setup.create_preparer(setup.load_tokenizer())

    async def _drain(self) -> None:
        """Refuse new requests, stop offline ones, and let online ones end within the timeout.

        Unfinished lines of batches are left for the next start.
        """
        self.state.phase = Phase.DRAINING
        self._supervisor.expect_end()
        timeout_s = self.state.server_config.drain_timeout_s
        logger.info(
            "shutting down: %d open requests have %g s to end; offline work is left for the next start",
            self.state.num_unanswered,
            timeout_s,
        )
        reason = EngineDead("The server is shutting down.")
        if self.state.jobs is not None:
            await self.state.jobs.pause()
        self._client.interrupt(ServiceClass.OFFLINE, reason)
        deadline_at_s = time.monotonic() + timeout_s
        while self.state.num_unanswered > 0 and time.monotonic() < deadline_at_s:
            await asyncio.sleep(_DRAIN_POLL_S)
        self._client.interrupt(ServiceClass.ONLINE, reason)

    def _use(self, preparer: RequestPreparer, facts: EngineFacts) -> None:
        """Prepare requests by these, here and in the preparation process."""
        preparer.facts = facts
        self._preparation.configure(facts)

    def _on_profile(self, profile: CostProfile) -> None:
        """The engine predicts steps with another profile."""
        if self.state.preparer is not None:
            self._use(self.state.preparer, replace(self.state.preparer.engine, profile=profile))
        self._show_profile(profile)

    def _show_profile(self, profile: CostProfile) -> None:
        if self.state.metrics is not None:
            self.state.metrics.engine.on_profile(profile)
        if self.state.shedder is not None:
            self.state.shedder.set_cost_model(profile.cost)

    def _on_report(self, report: StepReport) -> None:
        self._stats_log.on_report(report)
        if self.state.metrics is not None:
            self.state.metrics.engine.on_report(report)
        if self.state.shedder is not None:
            self.state.shedder.on_report(report)

    def _objective_counts(self) -> Mapping[str, ObjectiveCounts]:
        return {} if self.state.metrics is None else self.state.metrics.requests.objective_counts()

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stop_asked.is_set():
            logger.warning("stopping now")
            self._client.abandon()
            abandon_children()
            os._exit(1)
        self._stopped_by = number
        self._stop_asked.set()


class HttpServer(uvicorn.Server):
    """Uvicorn within limits, and without its signal handlers: its owner decides when connections close."""

    def __init__(self, app: object, limits: ConnectionLimits) -> None:
        super().__init__(
            uvicorn.Config(
                app,  # type: ignore[arg-type]
                http=partial(LimitedHttpProtocol, limits=limits),  # type: ignore[arg-type]
                ws="none",
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


def _connection_limits(config: ServerConfig, num_open_files: int) -> ConnectionLimits:
    return ConnectionLimits(
        max_connections=config.max_connections or default_max_connections(num_open_files),
        head_timeout_s=config.head_timeout_s,
        body_timeout_s=config.body_timeout_s,
        whole_body_timeout_s=_WHOLE_BODY_FACTOR * config.body_timeout_s,
        write_timeout_s=config.write_timeout_s,
    )
