"""The processes of the ranks: started together, and ended together as soon as one of them ends."""

from __future__ import annotations

import logging
import os
import select
import socket
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import NoReturn, Protocol

from backfill.core.config import EngineConfig
from backfill.core.errors import ExecutorDead
from backfill.ipc.python_process import PythonProcess
from backfill.parallel.messages import FromRank
from backfill.parallel.progress import Progress
from backfill.parallel.rank import RankContext, RankLoader, StagePlace, ranks_of_stage
from backfill.parallel.reports import ReportReader
from backfill.parallel.ring import RingWriter, create_ring
from backfill.parallel.shared_memory import Barrier, StopWords, create_memory
from backfill.parallel.sockets import Address
from backfill.parallel.waker import Waker
from backfill.parallel.worker import WorkerSetup, run_worker

_RING_BYTES = 1 << 20
_REAP_S = 5.0


class StopRequests(Protocol):
    def request(self, step: int) -> None:
        """Stop the step at its next safepoint; from any thread, at any time."""


class Ranks(Protocol):
    """All ranks of an engine, as its driver has them.

    Attributes:
        reports: received and not taken yet, by rank.
        progress: how far each rank is.
        waker: lets ``receive`` return, also without reports.
    """

    reports: list[deque[FromRank]]
    progress: Progress
    waker: Waker

    @property
    def stop(self) -> StopRequests: ...

    @property
    def pids(self) -> list[int | None]:
        """By rank; on their nodes."""

    def send(self, message: bytes) -> None:
        """To all ranks. Raises: ExecutorDead if they are known to have ended; ``receive`` notices it."""

    def receive(self, timeout_s: float | None) -> None:
        """Wait for reports, at most for so long, and put them into ``reports``.

        Raises: ExecutorDead if a rank has ended. All others are ended then.
        """

    def check(self) -> None:
        """Raises: ExecutorDead if a rank has ended."""

    def fail(self, message: str) -> NoReturn:
        """End all ranks. Raises: ExecutorDead with the message, now and in every later call."""

    def close(self) -> None:
        """End all ranks and release what they share. May be called again."""


# Starts the ranks of a configuration, with so many threads each. Raises: BackfillError, OSError.
RankStarter = Callable[[EngineConfig, int, RankLoader], Ranks]


@dataclass(frozen=True, slots=True)
class StageSetup:
    """What the ranks of one stage are started with where each stage is started apart.

    Attributes:
        store: where rank 0 serves the store of torch.distributed, and its socket on rank 0; None on CPU.
        previous_fds: listening sockets for the stage before, by tensor rank; none on the first stage.
        following: where the next stage listens, by tensor rank; none on the last.
        node_ranks, key, clock_ahead_s: see ``StagePlace``.
    """

    stage: int
    node_ranks: tuple[int, ...]
    store: Address | None
    store_fd: int | None
    previous_fds: tuple[int, ...]
    following: tuple[Address, ...]
    key: bytes
    clock_ahead_s: float

    def place_of(self, tensor_rank: int) -> StagePlace:
        return StagePlace(
            self.node_ranks,
            "" if self.store is None else self.store.host,
            self.previous_fds[tensor_rank] if self.previous_fds else None,
            self.following[tensor_rank] if self.following else None,
            self.key,
            self.clock_ahead_s,
        )


@dataclass(frozen=True, slots=True)
class _Shared:
    """What all ranks inherit: file descriptors, and the port of ``store_fd``."""

    ring_fd: int
    memory_fd: int
    store_fd: int | None
    store_port: int


class RankProcesses:
    """See ``Ranks``. A process for each rank, a ring of messages to all of them, and a socket from each.

    They are new interpreters, not forks, and end with this process. Nothing that they share has a name:
    memory and sockets are inherited, and gone when the last process that has them ends.

    Args:
        threads: of each rank.
        setup: None for all ranks, else for those of one stage.
    Attributes:
        ranks: those that are started. All lists by rank begin with the first of them.
        stop: stop requests that the ranks read.
        barrier: of all ranks of the engine.
        progress: how far each rank is.
        waker: lets ``receive`` return.
    Raises: OSError if a process cannot be created.
    """

    def __init__(
        self, config: EngineConfig, threads: int, load: RankLoader, setup: StageSetup | None = None
    ) -> None:
        self._setup = setup
        self.ranks = range(config.num_ranks)
        if setup is not None:
            self.ranks = ranks_of_stage(setup.stage, config.tensor_parallel_size)
        self.reports: list[deque[FromRank]] = [deque() for _ in self.ranks]
        self.stop = StopWords()
        self.barrier = Barrier(config.num_ranks)
        self.progress = Progress.of(config.num_ranks)
        self._config, self._load = replace(config, threads=threads), load
        self._processes: list[PythonProcess] = []
        self._links: list[socket.socket] = []
        self._readers: list[ReportReader] = []
        self._place_of: dict[int, int] = {}
        self._poll = select.poll()
        self.waker = Waker(self._poll)
        self._error: ExecutorDead | None = None
        with ExitStack() as on_error:
            on_error.callback(self.close)
            self._ring = self._start()
            on_error.pop_all()

    def _start(self) -> RingWriter:
        num_ranks, setup = len(self.ranks), self._setup
        with ExitStack() as until_started:
            ring_fd, memory_fd = create_ring(_RING_BYTES, num_ranks), create_memory(0)
            for fd in (ring_fd, memory_fd):
                until_started.callback(os.close, fd)
            store_fd: int | None
            if setup is None:
                listener = until_started.enter_context(socket.create_server(("127.0.0.1", 0)))
                store_fd, store_port = listener.fileno(), listener.getsockname()[1]
            else:
                store_fd, store_port = setup.store_fd, 0 if setup.store is None else setup.store.port
            shared = _Shared(ring_fd, memory_fd, store_fd, store_port)
            for rank in self.ranks:
                self._start_rank(rank, shared)
            return RingWriter(ring_fd, num_ranks, self.check)

    def _start_rank(self, rank: int, shared: _Shared) -> None:
        config, setup = self._config, self._setup
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._place_of[ours.fileno()] = len(self._links)
        self._links.append(ours)
        self._readers.append(ReportReader(ours))
        self._poll.register(ours, select.POLLIN)
        context = RankContext(
            rank,
            config.tensor_parallel_size,
            config.pipeline_parallel_size,
            self.stop,
            shared.store_port,
            shared.store_fd if rank == 0 else None,
            shared.memory_fd,
            self.barrier,
            None if setup is None else setup.place_of(rank - self.ranks.start),
            self.progress,
        )
        with theirs:
            level = logging.getLogger().getEffectiveLevel()
            worker = WorkerSetup(config, context, self._load, shared.ring_fd, theirs.fileno(), level)
            inherited = [shared.ring_fd, shared.memory_fd, self.stop.fd, self.barrier.fd, theirs.fileno()]
            inherited.append(self.progress.fd)
            for fd in (context.store_fd, None if context.place is None else context.place.previous_fd):
                if fd is not None:
                    inherited.append(fd)
            process = PythonProcess(f"backfill-rank{rank}", run_worker, (worker,), pass_fds=inherited)
            process.start()
            self._processes.append(process)

    @property
    def num_ranks(self) -> int:
        """Of the engine, also those that were started elsewhere."""
        return self._config.num_ranks

    def watch(self, other: socket.socket) -> None:
        """``receive`` also returns when this socket can be read, from now on."""
        self._poll.register(other, select.POLLIN)

    @property
    def pids(self) -> list[int | None]:
        """By rank."""
        return [process.pid for process in self._processes]

    def send(self, message: bytes) -> None:
        """To all ranks. Raises: ExecutorDead if they are known to have ended; ``receive`` notices it."""
        if self._error is not None:
            raise self._error
        self._ring.write(message)

    def receive(self, timeout_s: float | None) -> None:
        """Wait for reports, at most for so long, and put them into ``reports``.

        Raises: ExecutorDead if a rank has ended. All others are ended then.
        """
        if self._error is not None:
            raise self._error
        for fd, _ in self._poll.poll(None if timeout_s is None else timeout_s * 1000):
            if self.waker.is_at(fd):
                self.waker.take()
                continue
            place = self._place_of.get(fd)
            if place is None:
                continue
            reports = self._readers[place].take()
            if reports is None:
                self.fail(self._how_it_ended(place))
            self.reports[place].extend(reports)

    def check(self) -> None:
        """Raises: ExecutorDead if a rank has ended."""
        self.receive(0)

    def fail(self, message: str) -> NoReturn:
        """End all ranks. Raises: ExecutorDead with the message, now and in every later call."""
        self.close()
        self._error = ExecutorDead(message)
        raise self._error

    def close(self) -> None:
        """End all ranks and release what they share. May be called again."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(_REAP_S)
        for link in self._links:
            link.close()
        self.waker.close()
        self.stop.close()
        self.barrier.close()
        self.progress.close()

    def _how_it_ended(self, place: int) -> str:
        process = self._processes[place]
        process.join(_REAP_S)  # its sockets close a moment before it can be reaped
        how = "has closed its socket" if process.is_alive() else process.how_it_ended()
        return f"The process of rank {self.ranks[place]} of {self._config.num_ranks} {how}."
