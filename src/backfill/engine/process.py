"""The engine process: loads the model, then steps while it has work and listens between steps."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec
import zmq

from backfill.core.clock import WallClock
from backfill.core.config import EngineConfig
from backfill.core.errors import BackfillError
from backfill.core.request import Request
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
)
from backfill.execution.executor import Executor

logger = logging.getLogger(__name__)

_MAX_FAILED_STEPS = 5
_POLL_MS = 200

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
    from backfill.execution.profile import load_or_measure_profile

    started_at_s = time.monotonic()
    try:
        executor = create_torch_executor(config)
        profile = None
        if config.scheduler.policy == "slo" or config.profile_path is not None:
            profile = load_or_measure_profile(config, executor)
        engine = Engine(config.scheduler, executor, WallClock(), profile)
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


class _Channel:
    """The two sockets, with messages instead of bytes. One thread sends, another receives."""

    def __init__(self, commands: zmq.Socket[bytes], reports: zmq.Socket[bytes]) -> None:
        self._commands = commands
        self._reports = reports
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._encoder = msgspec.msgpack.Encoder()
        self._is_closed = False

    def send(self, message: FromEngine) -> None:
        self._reports.send(self._encoder.encode(message))

    def receive(self) -> ToEngine | None:
        """The next command, once there is one; None after ``close``. For one thread only."""
        while not self._is_closed:
            if self._commands.poll(_POLL_MS):
                command: ToEngine = self._decoder.decode(self._commands.recv())
                return command
        return None

    def close(self) -> None:
        """Let ``receive`` return."""
        self._is_closed = True


class EngineLoop:
    """Steps while there is work, and listens all the while.

    A second thread takes commands in, so that an arrival is known while a step runs: the kernels release the
    interpreter's lock. It hands requests to ``Engine.arrive`` and leaves all else for between two steps.

    The loop ends after several failed steps in a row: a device in a broken state stays so until its process
    ends, and the client starts a new one.
    """

    def __init__(self, engine: Engine, channel: _Channel) -> None:
        self._engine = engine
        self._channel = channel
        self._commands: deque[AbortRequests | Stop] = deque()
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
        self._channel.send(StepReport([], engine.stats()))  # what an engine without work looks like
        while engine.num_failed_steps_in_a_row < _MAX_FAILED_STEPS:
            self._has_news.clear()
            # Commands first: a request they name has then arrived, and is among those admitted next.
            commands = [self._commands.popleft() for _ in range(len(self._commands))]
            outputs = engine.admit_arrived()
            for command in commands:
                if isinstance(command, Stop):
                    return
                engine.abort(command.request_ids)
            if engine.has_work:
                outputs += engine.step()
            elif not (commands or outputs):
                self._has_news.wait()
                continue
            self._channel.send(StepReport(outputs, engine.stats()))

    def _listen(self) -> None:
        try:
            while (command := self._channel.receive()) is not None:
                if isinstance(command, AddRequest):
                    self._engine.arrive(_request_of(command))
                else:
                    self._commands.append(command)
                self._has_news.set()
        except Exception:
            logger.exception("commands cannot be read")
            self._commands.append(Stop())
            self._has_news.set()


def _request_of(command: AddRequest) -> Request:
    return Request(
        request_id=command.request_id,
        prompt_token_ids=command.prompt_token_ids,
        sampling=command.sampling,
        service_class=command.service_class,
        slo=command.slo,
        complete_by_s=command.complete_by_s,
        priority=command.priority,
        arrived_at_s=command.arrived_at_s,
    )


def _die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends, however that happens."""
    if not sys.platform.startswith("linux"):
        return
    set_parent_death_signal = 1
    ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:  # it ended before the request took effect
        os._exit(1)
