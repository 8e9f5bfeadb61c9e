"""The server process: load, serve, restart a dead engine, drain, stop."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from backfill.api.app import create_app
from backfill.api.metrics.registry import Metrics
from backfill.api.metrics.requests import ObjectiveCounts
from backfill.api.online_load import OnlineLoad
from backfill.api.online_traffic import OnlineTrafficMeter
from backfill.api.replica_state import StateReporter
from backfill.api.state import Phase, ServerState
from backfill.api.stats_log import StatsLog
from backfill.api.tracing import RequestTracer
from backfill.core.config import EngineConfig
from backfill.core.errors import EngineDead
from backfill.core.heap import freeze_heap
from backfill.core.request import ServiceClass
from backfill.costs.profile import CostProfile
from backfill.engine.client import EngineClient
from backfill.engine.messages import Ready, StepReport
from backfill.engine.tasks import TaskWatch
from backfill.http.config import ServerConfig
from backfill.http.keys import ApiKeys
from backfill.http.metrics import JobMetrics
from backfill.http.server import StopSignals, serving, until_none_is_open
from backfill.ipc.child import abandon_children
from backfill.jobs.config import JobsConfig, OrderOptions
from backfill.jobs.manager import JobManager
from backfill.preparation.messages import PreparationSetup
from backfill.preparation.serving import ServingProcesses
from backfill.protocol.preparer import EngineFacts, ServedModel
from backfill.scheduling.objectives import check_server_slo

logger = logging.getLogger(__name__)

# A preparation process uses 1.5 s of CPU to start. The engine and the first responses come first.
_BODIES_WITHIN_S = 6.0


class Server:
    """One HTTP server around one engine process.

    Args:
        client: of the engine, which may already be launched.
        url: the server's address, shown to a process that finds the data folder locked.
        api_keys: None accepts requests without a key.
        jobs_config: None switches the Batch API off.
        on_started: called when the data folder is locked, before the engine is loaded.
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
        on_started: Callable[[], None] | None = None,
        on_ready: Callable[[Ready], None] | None = None,
    ) -> None:
        self._model = model
        self._on_started, self._on_ready = on_started, on_ready
        self._stats_log = StatsLog(self._objective_counts, self._num_late)
        self._tasks = TaskWatch()
        client.on_report, client.on_profile, client.tasks = self._on_report, self._on_profile, self._tasks
        setup = PreparationSetup(
            model=model,
            chat_template=chat_template,
            tool_call_parser=server_config.tool_call_parser,
            reasoning_parser=server_config.reasoning_parser,
            uses_generation_config=server_config.uses_generation_config,
            max_response_tokens=server_config.max_response_tokens,
            is_strict=server_config.strict,
            log_level=server_config.log_level.upper(),
            order=(jobs_config or OrderOptions()).order,
        )
        self._processes = ServingProcesses(client, setup, self._tasks)
        self.state = ServerState(
            server_config,
            engine_config,
            client,
            self._processes.preparation,
            StateReporter(model.names, model.folder),
            api_keys=api_keys,
        )
        self._tracer: RequestTracer | None = None
        if (endpoint := server_config.otlp_traces_endpoint) is not None:
            self._tracer = RequestTracer.to_endpoint(endpoint, model.names[0], self.state.clock)
        self._traffic: OnlineTrafficMeter | None = None
        self._job_metrics: JobMetrics | None = None
        if jobs_config is not None:
            self._job_metrics = JobMetrics(model.names[0])
            self.state.jobs = JobManager(
                jobs_config,
                self._processes.preparation,
                model_names=model.names,
                url=url,
                on_lines=self._job_metrics.on_lines,
                on_batch_upload=self._processes.preparation.files.launch,  # it takes seconds
                weight_of=self.state.weight_of,
                tasks=self._tasks,
            )
            self._job_metrics.watch(self.state.jobs.snapshot)
        self._lag_task: asyncio.Task[None] | None = None
        self._signals = StopSignals(self._abandon)
        self._was_ready = False

    async def run(self, listener: socket.socket) -> signal.Signals | None:
        """Serve until a signal, then drain.

        Returns: the signal, if it came before the first request could be served.
        Raises: BackfillError when the data folder is another server's or the engine cannot be started.
        """
        state, processes = self.state, self._processes
        if state.jobs is not None:
            await state.jobs.start()
        if self._on_started is not None:
            self._on_started()
        self._signals.catch()
        try:
            app = create_app(state)
            async with serving(app, state.server_config, listener, state.clock, state.api_keys) as http:
                engine = await self._serve(http)
        finally:
            if state.jobs is not None:
                # Only now: the next server on the data folder clears away uploads that have no end.
                await state.jobs.stop()
            await processes.preparation.stop()
            if self._tracer is not None:
                await asyncio.to_thread(self._tracer.close)
        if not engine.cancelled():
            engine.result()  # raises the reason where the engine cannot run
        return None if self._was_ready else self._signals.first

    async def _serve(self, http: asyncio.Task[None]) -> asyncio.Task[None]:
        """Run the engine until a signal or its end, then drain. Returns: the engine's task."""
        stats_log = self._tasks.start(self._stats_log.run(), "stats-log")
        engine = self._processes.start(
            on_ready=self._on_engine_ready,
            on_lost=self._on_engine_lost,
            on_offline_suspended=self.state.suspend_offline,
        )
        self._processes.preparation.start(bodies_within_s=_BODIES_WITHIN_S)
        try:
            await self._signals.wait(engine, http)
            if not engine.done():
                await self._drain()
            self.state.phase = Phase.DRAINING
        finally:
            for task in (stats_log, self._lag_task):
                if task is not None:
                    task.cancel()
            engine.cancel()  # first: an engine that gets ready now must not be served
            if self.state.jobs is not None:
                await self.state.jobs.pause()
            await self._processes.stop_engine()
        return engine

    async def _on_engine_ready(self, ready: Ready) -> None:
        """Accept requests. The service is created once and survives restarts of the engine.

        Raises: ConfigError if the first engine can never meet the server's objectives.
        """
        if self.state.service is None:
            for warning in check_server_slo(self.state.engine_config.scheduler, ready.profile):
                logger.warning(warning)
        preparer = await self._processes.loaded()
        self._processes.configure(preparer, EngineFacts.of(ready, self.state.engine_config.scheduler))
        if self.state.service is None:
            self.state.metrics = Metrics(
                self._model.names[0],
                ready.info,
                slo=ready.default_slo,
                jobs=self._job_metrics,
                preparation=self._processes.preparation,
                task_failures=self._tasks.failures,
                vllm_names=self.state.server_config.vllm_metrics,
                trace=None if self._tracer is None else self._tracer.record,
            )
            self.state.preparer = preparer
            self.state.service = self._processes.create_service(preparer, self.state.metrics.requests)
            scheduler = self.state.engine_config.scheduler
            if scheduler.needs_cost_model and ready.profile is not None:
                kv_tokens = ready.info.num_blocks * ready.info.block_size
                self.state.online_load = OnlineLoad(ready.profile.cost, scheduler, kv_tokens)
                if self._processes.preparation.setup.order == "blend":
                    self._traffic = OnlineTrafficMeter(self.state.online_load)
            freeze_heap()
            # Not earlier: without streams a late loop delays nobody.
            self._lag_task = self._tasks.start(self.state.metrics.loop_lag.run(), "loop-lag")
        elif self.state.metrics is not None:
            self.state.metrics.engine.on_objectives(ready.default_slo)
            if self.state.online_load is not None:
                self.state.online_load.on_new_engine()
        if ready.profile is not None:
            self._show_profile(ready.profile)
        if self._signals.asked.is_set():
            return
        self.state.phase = Phase.READY
        self._was_ready = True
        self.state.feed_jobs()
        if self._on_ready is not None:
            self._on_ready(ready)
            self._on_ready = None  # not called again after a restart

    def _on_engine_lost(self) -> None:
        if self.state.metrics is not None:
            self.state.metrics.engine.on_death()
        if self.state.jobs is not None:
            self.state.jobs.engine_lost()
        self.state.phase = Phase.RESTARTING

    async def _drain(self) -> None:
        """Refuse new requests, stop offline ones, and let online ones end within the timeout.

        Unfinished lines of batches are left for the next start.
        """
        self.state.phase = Phase.DRAINING
        self._processes.supervisor.expect_end()
        timeout_s, clock = self.state.server_config.shutdown_timeout, self.state.clock
        ends_at_s = clock.now_s() + timeout_s
        logger.info(
            "shutting down: %d open requests have %g s to end; offline work is left for the next start",
            self.state.num_unanswered,
            timeout_s,
        )
        reason = EngineDead("The server is shutting down.")
        if self.state.jobs is not None:
            await self.state.jobs.pause()
        self.state.client.interrupt(ServiceClass.OFFLINE, reason)
        left_s = max(0.0, ends_at_s - clock.now_s())  # a database that hangs has held up the pause
        await until_none_is_open(lambda: self.state.num_unanswered, left_s)
        self.state.client.interrupt(ServiceClass.ONLINE, reason)

    def _on_profile(self, profile: CostProfile) -> None:
        """The engine predicts steps with ``profile`` from now on."""
        if self.state.preparer is not None:
            facts = self.state.preparer.engine_facts
            slo = self.state.client.default_slo or facts.default_slo
            facts = replace(facts, profile=profile, default_slo=slo)
            self._processes.configure(self.state.preparer, facts)
            if self.state.metrics is not None:
                self.state.metrics.engine.on_objectives(slo)
        self._show_profile(profile)

    def _show_profile(self, profile: CostProfile) -> None:
        if self.state.metrics is not None:
            self.state.metrics.engine.on_profile(profile)
        if self.state.online_load is not None:
            self.state.online_load.set_cost_model(profile.cost)

    def _on_report(self, report: StepReport) -> None:
        self._stats_log.on_report(report)
        self.state.reporter.on_report(report)
        if self.state.metrics is not None:
            self.state.metrics.engine.on_report(report)
        if self.state.online_load is not None:
            self.state.online_load.on_report(report)
        now_s = time.monotonic()
        self._processes.preparation.on_report(report, now_s)
        if self._traffic is not None:
            traffic = self._traffic.on_report(report, now_s)
            if traffic is not None:
                self._processes.preparation.note_online(traffic)

    def _objective_counts(self) -> Mapping[str, ObjectiveCounts]:
        return {} if self.state.metrics is None else self.state.metrics.requests.objective_counts()

    def _num_late(self) -> int:
        load = self.state.online_load
        return 0 if load is None else load.num_relegated(self.state.clock.now_s())

    def _abandon(self) -> None:
        self.state.client.abandon()
        abandon_children()
