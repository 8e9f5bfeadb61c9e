"""The ranks of an engine whose stages are on several nodes, as the driver has them."""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Protocol

import msgspec

from backfill.core.config import EngineConfig
from backfill.core.errors import ExecutorDead
from backfill.parallel.frames import FrameReader, encode_frame
from backfill.parallel.messages import (
    AtBarrier,
    FromStage,
    GoOn,
    LoadFailed,
    RunPlan,
    StageProgress,
    Started,
    StopStep,
)
from backfill.parallel.rank import ranks_of_stage
from backfill.parallel.ranks import Ranks
from backfill.parallel.sockets import accept, receive_exactly
from backfill.parallel.stage_host import CLOCK, HELLO, NUM_CLOCK_READINGS

logger = logging.getLogger(__name__)

_CONNECT_S = 300.0
_HELLO_S = 5.0
# Connections tell of the end of a host within seconds. The launcher may know more, of a node.
_CHECK_S = 1.0
_FULL_WAIT_S = 0.01


class StageLauncher(Protocol):
    """What has started the hosts of the stages."""

    def check(self) -> None:
        """Raises: ExecutorDead if a host is known to have ended."""

    def how_it_ended(self, stage: int) -> str:
        """Of a host that has closed its connection, for messages."""

    def name_of(self, stage: int) -> str:
        """Where the stage is, for messages."""

    def close(self) -> None:
        """End all hosts. May be called again."""


class RemoteStages(Ranks):
    """See ``Ranks``. A connection to the host of each stage, over which plans go out and reports come in.

    Args:
        listener: where hosts connect. Closed once all have.
        launcher: belongs to this from now on.
    Raises: ExecutorDead if a host ends, OSError if one does not connect.
    """

    def __init__(
        self, config: EngineConfig, listener: socket.socket, key: bytes, launcher: StageLauncher
    ) -> None:
        super().__init__(range(config.num_ranks), config.num_ranks)
        self._num_stages, self._size = config.pipeline_parallel_size, config.tensor_parallel_size
        self._launcher = launcher
        self._pids: list[int | None] = [None] * config.num_ranks
        self._links: dict[int, _HostLink] = {}
        self._stage_of: dict[int, int] = {}
        self._num_at_barrier = 0
        self._checks_at_s = 0.0
        with ExitStack() as on_error:
            on_error.callback(self.close)
            with listener:
                while len(self._links) < self._num_stages:
                    self._greet(accept(listener, key, _CONNECT_S, launcher.check))
            on_error.pop_all()

    def _greet(self, connection: socket.socket) -> None:
        """Learn which stage it is, and let it compare clocks. Raises: OSError."""
        connection.settimeout(_HELLO_S)
        hello = bytearray(HELLO.size)
        receive_exactly(connection, memoryview(hello))
        (stage,) = HELLO.unpack(hello)
        for _ in range(NUM_CLOCK_READINGS):
            receive_exactly(connection, memoryview(bytearray(1)))
            connection.sendall(CLOCK.pack(time.monotonic()))
        connection.settimeout(None)
        self._links[stage] = _HostLink(connection)
        self._stage_of[connection.fileno()] = stage
        self._poll.register(connection, select.POLLIN)

    @property
    def stop(self) -> RemoteStages:
        return self

    def request(self, step: int) -> None:
        """See ``StopRequests``."""
        for link in self._links.values():
            link.send(encode_frame(StopStep(step)))

    @property
    def pids(self) -> list[int | None]:
        return self._pids

    def _send(self, message: bytes) -> None:
        command = encode_frame(RunPlan(message))
        for link in self._links.values():
            # A host that does not read may wait until what it has sent is read.
            link.send(command, partial(self._receive_once, _FULL_WAIT_S))

    def _receive(self, timeout_s: float | None) -> None:
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = _CHECK_S if until_s is None else min(_CHECK_S, max(0.0, until_s - time.monotonic()))
            if self._receive_once(left_s) or (until_s is not None and time.monotonic() >= until_s):
                return

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._launcher.close()
        super().close()

    def _receive_once(self, timeout_s: float) -> bool:
        """Take what comes first. Returns: whether there was a report, or a wake. Raises: ExecutorDead."""
        is_over = False
        for fd, _ in self._poll.poll(timeout_s * 1000):
            is_over |= self._take_wake(fd) or self._take(self._stage_of[fd])
        if not is_over:  # what a rank has reported before its host ended says why
            self._check_hosts()
        return is_over

    def _take(self, stage: int) -> bool:
        """Take what a host has sent. Returns: whether there was a report. Raises: ExecutorDead."""
        messages = self._links[stage].frames.take()
        if messages is None:
            self.fail(self._launcher.how_it_ended(stage))
        has_reports = False
        for message in messages:
            has_reports |= self._handle(stage, message)
        return has_reports

    def _handle(self, stage: int, message: FromStage) -> bool:
        """Returns: whether it was a report."""
        if isinstance(message, Started):
            ranks = ranks_of_stage(stage, self._size)
            self._pids[ranks.start : ranks.stop] = message.pids
            name, pids = self._launcher.name_of(stage), ", ".join(map(str, message.pids))
            logger.info("stage %d runs in %s, in processes %s", stage, name, pids)
            return False
        if isinstance(message, AtBarrier):
            self._num_at_barrier += 1
            if self._num_at_barrier == self._num_stages:
                for link in self._links.values():
                    link.send(encode_frame(GoOn()))
            return False
        if isinstance(message, StageProgress):
            self.progress.set_part(ranks_of_stage(stage, self._size), message.part)
            return False
        report = message.report
        if isinstance(report, LoadFailed):
            where = self._launcher.name_of(stage)
            report = msgspec.structs.replace(report, message=f"In {where}: {report.message}")
        self.reports[message.rank].append(report)
        return True

    def _check_hosts(self) -> None:
        """Raises: ExecutorDead."""
        now_s = time.monotonic()
        if now_s < self._checks_at_s:
            return
        self._checks_at_s = now_s + _CHECK_S
        try:
            self._launcher.check()
        except ExecutorDead as error:
            self.fail(str(error))


class _HostLink:
    """The connection to a host. One thread receives; any thread sends."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self.frames: FrameReader[FromStage] = FrameReader(connection, FromStage)

    def send(self, command: bytes, wait: Callable[[], object] | None = None) -> None:
        """A host that has ended gets nothing, which ``FrameReader`` notices.

        Args:
            wait: called while there is no room; may raise.
        """
        while not self._sending.acquire(timeout=_FULL_WAIT_S):
            if wait is not None:  # another thread may wait for room, which this one makes
                wait()
        try:
            with suppress(OSError):
                self._send(memoryview(command), wait)
        finally:
            self._sending.release()

    def _send(self, rest: memoryview, wait: Callable[[], object] | None) -> None:
        while rest:
            try:
                rest = rest[self._connection.send(rest, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                if wait is None:
                    select.select((), [self._connection], (), _FULL_WAIT_S)
                else:
                    wait()

    def close(self) -> None:
        self._connection.close()
