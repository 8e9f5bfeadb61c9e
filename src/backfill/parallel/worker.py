"""A rank's process: loads its part of the model, then runs the plans that the driver sends.

The driver that has started it shares memory with it: plans come through a ring, and reports go to a socket.
To a driver on another node it connects, and a thread receives plans and stop requests.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import pkgutil
import queue
import select
import signal
import socket
import struct
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import msgspec

from backfill.core.config import EngineConfig
from backfill.core.errors import BackfillError
from backfill.core.heap import freeze_heap
from backfill.ipc.log_lines import log_format
from backfill.ipc.python_process import PythonProcess, name_process
from backfill.parallel.messages import (
    FrameReader,
    Loaded,
    LoadFailed,
    Moved,
    Report,
    RunPlan,
    StepDone,
    StepRaised,
    ToRank,
    encode_frame,
    step_done,
)
from backfill.parallel.plan_codec import BadMessage, PlanDecoder
from backfill.parallel.rank import RankContext, RankExecutor, RankLoader, RemoteStage
from backfill.parallel.shared_memory import RingReader
from backfill.parallel.sockets import connect_to, receive_exactly

logger = logging.getLogger(__name__)

HELLO = struct.Struct("<II")  # rank and process id
CLOCK = struct.Struct("<d")
NUM_CLOCK_READINGS = 5
_CONNECT_S = 60.0
_PROGRESS_S = 0.25
_REAP_S = 5.0


class DriverFds(NamedTuple):
    """What a rank inherits of a driver that has started it: the ring's memory, and its end of a socket."""

    ring_fd: int
    socket_fd: int


class DriverClosed(Exception):
    """The driver has ended, or no longer wants this rank."""


def name_of(load: RankLoader) -> str:
    """The process that starts a rank does not import what loads it, and torch with it."""
    return f"{load.__module__}:{load.__qualname__}"


def start_rank(
    config: EngineConfig, context: RankContext, load: str, driver: DriverFds | None = None
) -> PythonProcess:
    """A new interpreter, not a fork, which ends with this process.

    Args:
        config: its ``threads`` are the rank's.
        load: ``name_of`` a RankLoader.
        driver: None for one on another node (``context.remote``).
    Raises: OSError if it cannot be created.
    """
    inherited = (context.state.fd, context.memory_fd, context.store_fd, context.previous_fd, *(driver or ()))
    process = PythonProcess(
        f"backfill-rank{context.rank}",
        run_rank,
        (config, context, load, driver, logging.getLogger().getEffectiveLevel()),
        pass_fds=[fd for fd in inherited if fd is not None],
    )
    process.start()
    return process


def end_ranks(processes: Sequence[PythonProcess]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join(_REAP_S)


def how_it_ended(process: PythonProcess, rank: int, num_ranks: int) -> str:
    process.join(_REAP_S)  # its descriptors close a moment before it can be reaped
    how = "has closed its socket" if process.is_alive() else process.how_it_ended()
    return f"The process of rank {rank} of {num_ranks} {how}."


def run_rank(
    config: EngineConfig, context: RankContext, load: str, driver: DriverFds | None, log_level: int
) -> None:
    """Entry point of the process, which ends with the driver."""
    logging.basicConfig(level=log_level, format=log_format(f"rank {context.rank}"))
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # writes stacks, also of a rank that hangs
    name_process(f"backfill-rank{context.rank}")
    link: Driver
    if driver is None:
        assert context.remote is not None
        try:
            link = RemoteDriver(context, context.remote)
        except OSError as error:
            host, port = context.remote.driver
            sys.exit(f"Rank {context.rank} cannot reach the driver at {host}:{port}: {error}")
        context = replace(context, clock_ahead_s=link.clock_ahead_s)
    else:
        link = LocalDriver(context, driver)
    with suppress(DriverClosed, OSError):
        executor = _load(config, context, load, link)
        if executor is None:
            link.next_plan()  # until the driver has read why, and closes
        else:
            _run_plans(executor, context, link)


def _load(config: EngineConfig, context: RankContext, name: str, driver: Driver) -> RankExecutor | None:
    try:
        load: RankLoader = pkgutil.resolve_name(name)
        executor = load(config, context)
    except BackfillError as error:
        driver.report(LoadFailed(str(error)))
    except Exception as error:
        logger.exception("the rank could not start")
        message = f"Rank {context.rank} could not start: {type(error).__name__}: {error}"
        driver.report(LoadFailed(message))
    else:
        freeze_heap()
        driver.report(Loaded(executor.info))
        return executor
    return None


def _run_plans(executor: RankExecutor, context: RankContext, driver: Driver) -> None:
    decoder, progress = PlanDecoder(), context.progress
    while True:
        plan, sampled = decoder.decode(driver.next_plan())
        progress.begin_step(plan.step)
        report: Report
        try:
            report = step_done(plan.step, executor.run(plan, sampled))
        except Exception as error:
            logger.exception("step %d failed", plan.step)
            report = StepRaised(plan.step, f"{type(error).__name__}: {error}")
        driver.report(report)
        del plan, sampled  # it takes a while, for which nobody waits now


class Driver(ABC):
    """The driver, as a rank has it. One that has ended is noticed by ``next_plan``."""

    @abstractmethod
    def next_plan(self) -> bytes:
        """Blocks until it is there. Raises: DriverClosed."""

    @abstractmethod
    def report(self, report: Report) -> None:
        """Raises: OSError if the driver has ended."""


class LocalDriver(Driver):
    """One that has started this rank. The socket closes when it ends."""

    def __init__(self, context: RankContext, fds: DriverFds) -> None:
        self._socket = socket.socket(fileno=fds.socket_fd)
        num_ranks, rank = len(context.local_ranks), context.local_rank
        self._ring = RingReader(fds.ring_fd, num_ranks, rank, self._check_open)

    def next_plan(self) -> bytes:
        return self._ring.read()

    def report(self, report: Report) -> None:
        self._socket.sendall(encode_frame(report))

    def _check_open(self) -> None:
        """It sends nothing to the socket."""
        if select.select([self._socket], (), (), 0.0)[0]:
            raise DriverClosed


class RemoteDriver(Driver):
    """One on another node, to which this connects. The process ends with the connection.

    Attributes:
        clock_ahead_s: see ``RankContext``. Reports are on the driver's clock.

    Raises: OSError if the driver cannot be reached.
    """

    def __init__(self, context: RankContext, stage: RemoteStage) -> None:
        self._connection = connection = connect_to(stage.driver, stage.key, _CONNECT_S)
        connection.sendall(HELLO.pack(context.rank, os.getpid()))
        self.clock_ahead_s = _clock_ahead_s(connection)
        self._stops, self._progress = context.state.stops, context.progress
        self._sending = threading.Lock()
        self._plans: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._receive, name="driver-listener", daemon=True).start()

    def next_plan(self) -> bytes:
        return self._plans.get()

    def report(self, report: Report) -> None:
        if isinstance(report, StepDone) and report.others and report.others.stopped_at_s is not None:
            stopped_at_s = report.others.stopped_at_s + self.clock_ahead_s
            report = msgspec.structs.replace(report, others=replace(report.others, stopped_at_s=stopped_at_s))
        with self._sending:
            self._connection.sendall(encode_frame(report))

    def _receive(self) -> None:
        try:
            self._pass_on()
        except BadMessage as error:
            logger.error("the driver has sent no message: %s", error)
        finally:
            os._exit(1)  # also if a step hangs

    def _pass_on(self) -> None:
        """Until the driver has closed."""
        frames: FrameReader[ToRank] = FrameReader(self._connection, ToRank)
        arrives = select.poll()
        arrives.register(self._connection, select.POLLIN)
        shown_at_s, shown = 0.0, b""
        while (messages := frames.take()) is not None:
            for message in messages:
                if isinstance(message, RunPlan):
                    self._plans.put(message.plan)
                else:
                    self._stops.request(message.step)
            now_s, data = time.monotonic(), self._progress.data()
            if now_s >= shown_at_s + _PROGRESS_S and data != shown and self._may_send(Moved(data)):
                shown_at_s, shown = now_s, data
            arrives.poll(_PROGRESS_S * 1000)

    def _may_send(self, message: Moved) -> bool:
        """Send it, unless that may take a while: who receives must not wait for a driver that sends."""
        if not self._sending.acquire(blocking=False):
            return False
        try:
            if not select.select((), [self._connection], (), 0.0)[1]:
                return False
            with suppress(OSError):  # the next look notices it
                self._connection.sendall(encode_frame(message))
            return True
        finally:
            self._sending.release()


def _clock_ahead_s(connection: socket.socket) -> float:
    """The driver's monotonic clock less this node's, by the quickest of some answers. Raises: OSError."""
    readings: list[tuple[float, float]] = []
    for _ in range(NUM_CLOCK_READINGS):
        asked_s = time.monotonic()
        connection.sendall(b"?")
        (driver_s,) = CLOCK.unpack(receive_exactly(connection, CLOCK.size))
        answered_s = time.monotonic()
        readings.append((answered_s - asked_s, driver_s - (asked_s + answered_s) / 2))
    _, ahead_s = min(readings)
    return ahead_s
