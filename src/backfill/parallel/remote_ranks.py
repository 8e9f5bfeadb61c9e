"""The ranks of an engine whose stages were started apart from each other, perhaps on several nodes."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Protocol

from backfill.core.config import EngineConfig
from backfill.core.errors import ExecutorDead
from backfill.ipc.python_process import PythonProcess
from backfill.parallel.messages import RunPlan, StopStep, encode_frame
from backfill.parallel.rank import RankContext, RemoteStage, ranks_of_stage
from backfill.parallel.ranks import Ranks
from backfill.parallel.shared_memory import create_memory
from backfill.parallel.shared_state import SharedState
from backfill.parallel.sockets import Acceptor, listen, receive_exactly
from backfill.parallel.worker import CLOCK, HELLO, NUM_CLOCK_READINGS, end_ranks, how_it_ended, start_rank

logger = logging.getLogger(__name__)

_CONNECT_S = 300.0
_HELLO_S = 5.0
# Connections tell of the end of a process within seconds. The launcher may know more, of a node.
_CHECK_S = 1.0
_FULL_WAIT_S = 0.01


class StageLauncher(Protocol):
    """What has started the stages."""

    def check(self) -> None:
        """Raises: ExecutorDead if a stage is known to have ended."""

    def how_it_ended(self, stage: int) -> str:
        """Of a stage with a rank that has closed its connection, for messages."""

    def name_of(self, stage: int) -> str:
        """Where the stage is, for messages."""

    def close(self) -> None:
        """End all stages. May be called again."""


class RemoteRanks(Ranks):
    """See ``Ranks``. Each rank connects to the driver over TCP.

    Args:
        listener: where ranks connect.
        launcher: belongs to this from now on.
    Raises: ExecutorDead if a stage ends, OSError if a rank does not connect.
    """

    def __init__(
        self, config: EngineConfig, listener: socket.socket, key: bytes, launcher: StageLauncher
    ) -> None:
        super().__init__(config.num_ranks)
        self._size, self._launcher = config.tensor_parallel_size, launcher
        self._sending = threading.Lock()
        self._checks_at_s = 0.0
        with ExitStack() as on_error:
            on_error.callback(self.close)
            with Acceptor(listener, key) as acceptor:
                while len(self._links) < config.num_ranks:
                    self._greet(acceptor.accept(_CONNECT_S, launcher.check))
            on_error.pop_all()
        for stage in range(config.pipeline_parallel_size):
            pids = ", ".join(str(self.pids[rank]) for rank in ranks_of_stage(stage, self._size))
            logger.info("stage %d runs in %s, in processes %s", stage, launcher.name_of(stage), pids)

    def _greet(self, connection: socket.socket) -> None:
        """Learn which rank it is, and let it compare clocks. Raises: OSError."""
        connection.settimeout(_HELLO_S)
        rank, pid = HELLO.unpack(receive_exactly(connection, HELLO.size))
        for _ in range(NUM_CLOCK_READINGS):
            receive_exactly(connection, 1)
            connection.sendall(CLOCK.pack(time.monotonic()))
        connection.settimeout(None)
        self._add(rank, connection)
        self.pids[rank] = pid

    def stop(self, step: int) -> None:
        frame = encode_frame(StopStep(step))
        with self._sending:
            for link in self._links.values():
                with suppress(OSError):  # ``receive`` notices it
                    link.sendall(frame)

    def receive(self, timeout_s: float) -> None:
        num_reports = sum(map(len, self.reports))
        super().receive(min(timeout_s, _CHECK_S))
        now_s = time.monotonic()
        # What a rank has reported before its stage ended says why.
        if sum(map(len, self.reports)) == num_reports and now_s >= self._checks_at_s:
            self._checks_at_s = now_s + _CHECK_S
            try:
                self._launcher.check()
            except ExecutorDead as error:
                self.fail(str(error))

    def where(self, rank: int) -> str:
        return f"In {self._launcher.name_of(rank // self._size)}: "

    def close(self) -> None:
        super().close()
        self._launcher.close()

    def _send(self, plan: bytes) -> None:
        frame = encode_frame(RunPlan(plan))
        with self._sending:
            for link in self._links.values():
                self._send_frame(link, memoryview(frame))

    def _send_frame(self, link: socket.socket, rest: memoryview) -> None:
        """Raises: ExecutorDead if a rank ends meanwhile."""
        while rest:
            try:
                rest = rest[link.send(rest, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                self.receive(_FULL_WAIT_S)  # a rank may wait until what it has sent is read
            except OSError:
                return  # ``receive`` notices it

    def _how_it_ended(self, rank: int) -> str:
        return self._launcher.how_it_ended(rank // self._size)


@dataclass(frozen=True, slots=True)
class StageListeners:
    """What the ranks of a stage listen on: opened before they are started, since others need the addresses.

    Attributes:
        links: for the stage before, by tensor rank; none on the first stage.
        store: for the store of torch.distributed, of rank 0; None where none is needed.
    """

    links: tuple[socket.socket, ...]
    store: socket.socket | None = None

    @classmethod
    def open(cls, host: str, stage: int, num_ranks: int, *, serves_store: bool) -> StageListeners:
        """On this address of the node. Raises: OSError."""
        links = tuple(listen(host) for _ in range(num_ranks if stage else 0))
        return cls(links, listen(host) if serves_store else None)

    def close(self) -> None:
        for each in (*self.links, self.store):
            if each is not None:
                each.close()


def run_stage(listeners: StageListeners, config: EngineConfig, load: str, stage: RemoteStage) -> str:
    """Run the ranks of a stage on this node, until one of them ends.

    Args:
        config: of the engine, with its model where this node has it; ``threads`` are those of a rank.
    Returns: why it ended. No process is left then, and ``listeners`` are closed.
    Raises: OSError if a process cannot be started.
    """
    size, processes = config.tensor_parallel_size, dict[int, PythonProcess]()
    with ExitStack() as stack:
        stack.callback(listeners.close)
        state, memory_fd = SharedState(config.num_ranks), create_memory(0)
        stack.callback(state.close)
        stack.callback(os.close, memory_fd)
        context = RankContext(
            0, size, config.pipeline_parallel_size, state, memory_fd, stage.store, remote=stage
        )
        stack.callback(lambda: end_ranks(list(processes.values())))
        for rank in ranks_of_stage(stage.stage, size):
            context = replace(
                context,
                rank=rank,
                store_fd=None if rank or listeners.store is None else listeners.store.fileno(),
                previous_fd=listeners.links[rank % size].fileno() if listeners.links else None,
            )
            processes[rank] = start_rank(config, context, load)
        listeners.close()  # the ranks have them
        sentinels = {process.sentinel: rank for rank, process in processes.items()}
        ended = sentinels[select.select(list(sentinels), (), ())[0][0]]
        return how_it_ended(processes[ended], ended, config.num_ranks)
