"""The engine process: loads the model, then steps while it has work and listens between steps."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from backfill.core.clock import WallClock
from backfill.core.config import EngineConfig
from backfill.core.errors import BackfillError
from backfill.core.request import Request
from backfill.costs.profile import CostProfile
from backfill.engine.engine import Engine
from backfill.engine.messages import (
    AbortRequests,
    AddRequest,
    FromEngine,
    Ready,
    StartFailed,
    StepReport,
    Stop,
    ToEngine,
    TokenOutput,
)
from backfill.execution.executor import Executor

logger = logging.getLogger(__name__)

_MAX_FAILED_STEPS = 5

ExecutorFactory = Callable[[EngineConfig], Executor]


def run_engine_process(config: EngineConfig, commands_url: str, reports_url: str, log_level: str) -> None:
    """Entry point of the child process. Ends on ``Stop``, or with its parent."""
    logging.basicConfig(level=log_level, format="%(asctime)s %(levelname)s engine: %(message)s")
    _die_with_parent()
    # Both may reach the whole process group; the parent decides what they mean and sends Stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with zmq.Context() as context:
        commands, reports = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        for socket in (commands, reports):
            socket.set_hwm(0)  # a step is never dropped and never blocks on a slow reader
        reports.setsockopt(zmq.LINGER, 1000)
        commands.connect(commands_url)
        reports.connect(reports_url)
        try:
            _serve(config, _Channel(commands, reports))
        finally:
            commands.close()
            reports.close()


def _serve(config: EngineConfig, channel: _Channel) -> None:
    from backfill.execution.create import create_torch_executor

    started_at_s = time.monotonic()
    try:
        executor = create_torch_executor(config)
        engine = Engine(config.scheduler, executor, WallClock(), _profile(config, executor))
    except BackfillError as error:
        channel.send(StartFailed(str(error)))
        return
    except Exception as error:
        logger.exception("the engine could not start")
        channel.send(StartFailed(f"The engine could not start: {type(error).__name__}: {error}"))
        return
    slo = engine.default_slo
    logger.info("online requests: first token within %.3g s, each next within %.3g s", slo.ttft_s, slo.tpot_s)
    channel.send(Ready(executor.info, time.monotonic() - started_at_s, slo, engine.scheduler.cost))
    EngineLoop(engine, channel).run()


def _profile(config: EngineConfig, executor: Executor) -> CostProfile | None:
    """What steps cost on this executor; None where no profile was given. Raises: ConfigError."""
    return None if config.profile_path is None else CostProfile.load(Path(config.profile_path))


class _Channel:
    """The two sockets, with messages instead of bytes."""

    def __init__(self, commands: zmq.Socket[bytes], reports: zmq.Socket[bytes]) -> None:
        self._commands = commands
        self._reports = reports
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: FromEngine) -> None:
        self._reports.send(self._encoder.encode(message))

    def receive(self, *, wait: bool) -> list[ToEngine]:
        """All commands that have arrived; with ``wait``, at least one."""
        received: list[ToEngine] = []
        flags = 0 if wait else zmq.NOBLOCK
        while True:
            try:
                received.append(self._decoder.decode(self._commands.recv(flags)))
            except zmq.Again:
                return received
            flags = zmq.NOBLOCK


class EngineLoop:
    """Listens when idle, otherwise listens without waiting and steps.

    Ends after several failed steps in a row: a device in a broken state stays so until its process
    ends, and the client starts a new one.
    """

    def __init__(self, engine: Engine, channel: _Channel) -> None:
        self._engine = engine
        self._channel = channel

    @property
    def _num_failed_steps(self) -> int:
        return self._engine.num_failed_steps_in_a_row

    def run(self) -> None:
        while self._num_failed_steps < _MAX_FAILED_STEPS:
            refused: list[TokenOutput] = []
            for command in self._channel.receive(wait=not self._engine.has_work):
                if isinstance(command, Stop):
                    return
                refused += self._handle(command)
            outputs = refused + (self._engine.step() if self._engine.has_work else [])
            self._channel.send(StepReport(outputs, self._engine.stats()))

    def _handle(self, command: AddRequest | AbortRequests) -> list[TokenOutput]:
        """Outputs of requests that were refused."""
        if isinstance(command, AbortRequests):
            self._engine.abort(command.request_ids)
            return []
        refusal = self._engine.add(
            Request(
                request_id=command.request_id,
                prompt_token_ids=command.prompt_token_ids,
                sampling=command.sampling,
                service_class=command.service_class,
                slo=command.slo,
                complete_by_s=command.complete_by_s,
                priority=command.priority,
                arrived_at_s=command.arrived_at_s,
            )
        )
        return [] if refusal is None else [refusal]


def _die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends, however that happens."""
    if not sys.platform.startswith("linux"):
        return
    set_parent_death_signal = 1
    ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:  # it ended before the request took effect
        os._exit(1)
