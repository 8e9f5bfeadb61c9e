"""The engine process: loads the model, then runs steps while commands come in on another thread."""

from __future__ import annotations

import faulthandler
import logging
import signal
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from backfill.core.clock import WallClock
from backfill.core.config import EngineConfig, SchedulerConfig
from backfill.core.errors import BackfillError, ExecutorDead
from backfill.core.heap import freeze_heap, freeze_imports, pause_collection
from backfill.core.request import Request, RequestId
from backfill.core.slo import SLO
from backfill.costs.profile import CostProfile
from backfill.engine.hang import hang_timeout_s, heartbeat_s
from backfill.engine.messages import (
    AbortRequests,
    AddRequest,
    EngineFailed,
    FromEngine,
    ProfileRefined,
    Ready,
    StartFailed,
    StepReport,
    Stop,
    ToEngine,
)
from backfill.ipc.channel import Channel, open_channel
from backfill.ipc.log_lines import log_format
from backfill.scheduling.objectives import DEFAULT_HEADROOM, DEFAULT_SLO

if TYPE_CHECKING:  # the client, which starts the process, need not load it
    from backfill.engine.engine import Engine

logger = logging.getLogger(__name__)

_MAX_FAILED_STEPS = 5
_MANY_BLOCKS = 100_000  # of a KV cache that is prepared for more than a second

# Makes the process write the stacks of all its threads to standard error, even when it hangs.
DUMP_SIGNAL = signal.SIGUSR1

EngineChannel = Channel[ToEngine, FromEngine]
EngineLoader = Callable[[EngineConfig], "Engine"]


def load_engine(config: EngineConfig) -> Engine:
    """An engine that runs the configuration's model with torch. Raises: BackfillError."""
    from backfill.bus.member import BusMember, OffloadedModel
    from backfill.bus.throttle import open_bus
    from backfill.engine.engine import Engine
    from backfill.engine.interval_choice import create_record_check, with_chosen_interval
    from backfill.execution.machine import StolenTime
    from backfill.execution.profile import create_refiner, load_or_measure_profile
    from backfill.execution.torch_executor import TorchExecutor
    from backfill.parallel.create import create_executor

    freeze_imports()
    is_recorded = config.offload_interval == "auto"
    logger.info("loading the model in %s", config.model_dir)
    config = with_chosen_interval(config)
    bus = open_bus(config)
    with ExitStack() as undo:  # what is open, if something fails
        if bus is not None:
            undo.callback(bus.close)
        executor = create_executor(config, bus)
        undo.callback(executor.close)
        info, clock = executor.info, WallClock()
        member: BusMember | None = None
        if bus is not None:
            assert info.offload_interval is not None, "a bus needs offloaded layers"
            model = OffloadedModel(info.layers_of_stages, info.layer_bytes, info.offload_interval)
            member = BusMember(bus, model, clock, divides_memory=bool(info.residencies))
        profile, refiner = None, None
        needs_profile = config.scheduler.needs_cost_model or config.min_offload_interval is not None
        if needs_profile or config.profile_path is not None:
            profile = load_or_measure_profile(config, executor)
            refiner = create_refiner(config, info, profile, clock)
        if info.num_blocks + info.num_host_blocks >= _MANY_BLOCKS:
            logger.info("preparing a KV cache of %d blocks", info.num_blocks + info.num_host_blocks)
        engine = Engine(
            config.scheduler,
            executor,
            clock,
            profile,
            refiner,
            bus=member,
            record_check=create_record_check(config) if is_recorded else None,
            grammars=executor.grammars if isinstance(executor, TorchExecutor) else None,
            is_disturbed=StolenTime().disturbs,
        )
        undo.pop_all()
    return engine


def run_engine_process(
    config: EngineConfig, log_level: str, load: EngineLoader, commands_url: str, reports_url: str
) -> None:
    """Entry point of the child process. Ends on ``Stop``, or with its parent."""
    logging.basicConfig(level=log_level, format=log_format("engine"))
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    pause_collection()
    with open_channel("backfill-engine", ToEngine, commands_url, reports_url) as channel:
        _serve(config, channel, load)


def _serve(config: EngineConfig, channel: EngineChannel, load: EngineLoader) -> None:
    try:
        engine = load(config)
    except BackfillError as error:
        channel.send(StartFailed(str(error)))
        return
    except Exception as error:
        logger.exception("the engine could not start")
        channel.send(StartFailed(f"The engine could not start: {type(error).__name__}: {error}"))
        return
    slo, info, profile = engine.default_slo, engine.executor.info, engine.profile
    timeout_s = hang_timeout_s(config, info, None if profile is None else profile.cost)
    if profile is not None:
        _log_profile("steps are predicted", profile)
    _log_objectives(config.scheduler, slo, profile)
    for option, reason in config.scheduler.ignored_options().items():
        logger.warning("%s has no effect with %s", option, reason.replace("`", ""))
    channel.send(Ready(info, slo, profile, timeout_s))
    freeze_heap()  # while the client completes its own start
    try:
        EngineLoop(engine, channel, heartbeat_s(timeout_s)).run()
    except ExecutorDead as error:
        logger.error("the engine ends: %s", error)
        channel.send(EngineFailed(f"The engine process ended: {error}"))
        raise SystemExit(1) from error


def _log_objectives(config: SchedulerConfig, slo: SLO, profile: CostProfile | None) -> None:
    logger.info("online requests: first token within %.3g s, each next within %.3g s", slo.ttft_s, slo.tpot_s)
    if config.kept_slo is not None:
        return  # the first engine has said why
    may_return = profile is not None and profile.quality != "full"
    until = ", until served steps show that the device is faster" if may_return else ""
    for field, asked_s, default_s, used_s, floor_s in (
        ("ttft_slo", config.ttft_slo, DEFAULT_SLO.ttft_s, slo.ttft_s, config.min_ttft_slo),
        ("tpot_slo", config.tpot_slo, DEFAULT_SLO.tpot_s, slo.tpot_s, config.min_tpot_slo),
    ):
        if asked_s is None and used_s > default_s and used_s == floor_s:
            logger.info(
                "%s is widened to %.3g s from %g: its floor is min_%s", field, used_s, default_s, field
            )
        elif asked_s is None and used_s > default_s:
            logger.info(
                "%s is widened to %.3g s from %g%s: one request alone is predicted to need %.3g s",
                field,
                used_s,
                default_s,
                until,
                used_s / DEFAULT_HEADROOM,
            )


def _log_profile(event: str, profile: CostProfile, level: int = logging.INFO) -> None:
    error = profile.error
    if profile.quality == "coarse":  # its error is that of a few steps, on a machine that is still starting
        logger.log(level, "%s with a coarse cost profile, which served steps refine", event)
        return
    logger.log(
        level,
        "%s with a %s cost profile: error %.0f %% (median), %.0f %% (P95) on %d steps",
        event,
        profile.quality,
        100 * error.median,
        100 * error.p95,
        error.num_steps,
    )


class EngineLoop:
    """Runs steps while there is work, and reports each; an idle engine reports every few seconds.

    A second thread receives commands, so that an arrival is known while a step runs: the kernels release the
    interpreter's lock. It passes requests to ``Engine.arrive``, once their grammars are compiled; with
    several ranks the one that samples compiles them, in the step. Other commands wait until the step ends.

    The loop ends after several failed steps in a row: a device in a broken state recovers only in a new
    process, which the server's supervisor or the library starts.
    """

    def __init__(self, engine: Engine, channel: EngineChannel, heartbeat_s: float) -> None:
        self._engine = engine
        self._heartbeat_s = heartbeat_s
        self._channel = channel
        self._commands: deque[AbortRequests | Stop] = deque()
        self._compiling: set[RequestId] = set()  # requests that have not arrived
        self._arriving = threading.Lock()
        self._has_news = threading.Event()

    def run(self) -> None:
        listener = threading.Thread(target=self._listen, name="engine-listener", daemon=True)
        listener.start()
        try:
            self._step_until_stopped()
        finally:
            self._channel.close()
            listener.join()

    def _step_until_stopped(self) -> None:
        engine = self._engine
        self._channel.send(StepReport([], engine.stats()))  # the state of an idle engine
        while engine.num_failed_steps_in_a_row < _MAX_FAILED_STEPS:
            self._has_news.clear()
            # Taken before arrivals are admitted, so that the requests they name are admitted by then.
            commands = [self._commands.popleft() for _ in range(len(self._commands))]
            outputs = engine.admit_arrived()
            for command in commands:
                if isinstance(command, Stop):
                    return
                engine.abort(command.request_ids)
            self._refine_profile()
            if engine.has_work:
                outputs += engine.step()
            elif not (commands or outputs) and self._has_news.wait(self._heartbeat_s):
                continue
            else:
                engine.check()
            self._channel.send(StepReport(outputs, engine.stats()))
        raise ExecutorDead(f"{_MAX_FAILED_STEPS} steps in a row failed.")

    def _refine_profile(self) -> None:
        refined = self._engine.refine_profile()
        if refined is not None:
            _log_profile("from now on steps are predicted", refined, logging.DEBUG)
            self._channel.send(ProfileRefined(refined, self._engine.default_slo))

    def _listen(self) -> None:
        try:
            while (command := self._channel.receive()) is not None:
                if isinstance(command, AddRequest):
                    self._receive(command.request)
                    continue
                with self._arriving:
                    if isinstance(command, AbortRequests):
                        self._compiling.difference_update(command.request_ids)
                    self._commands.append(command)
                self._has_news.set()
        except Exception:
            logger.exception("commands cannot be read")
            self._commands.append(Stop())
            self._has_news.set()

    def _receive(self, request: Request) -> None:
        structured, grammars = request.sampling.structured_outputs, self._engine.grammars
        if structured is None or grammars is None:
            self._arrive(request)
            return
        self._compiling.add(request.request_id)
        grammars.compile(structured).add_done_callback(lambda _: self._arrive_compiled(request))

    def _arrive_compiled(self, request: Request) -> None:
        """In the thread that compiles. If it could not, the request's first step ends it."""
        with self._arriving:  # an abort comes before or after it, not in between
            if request.request_id in self._compiling:  # else it was aborted
                self._compiling.discard(request.request_id)
                self._arrive(request)

    def _arrive(self, request: Request) -> None:
        self._engine.arrive(request)
        self._has_news.set()
