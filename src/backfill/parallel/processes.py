"""The processes of the ranks: started together, and ended together as soon as one of them ends."""

from __future__ import annotations

import logging
import os
import select
import socket
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import NoReturn

from backfill.core.config import EngineConfig
from backfill.core.errors import ExecutorDead
from backfill.ipc.python_process import PythonProcess
from backfill.parallel.memory import create_memory
from backfill.parallel.messages import FromRank
from backfill.parallel.progress import Progress
from backfill.parallel.rank import RankContext, RankLoader
from backfill.parallel.reports import ReportReader
from backfill.parallel.ring import RingMemory, RingWriter
from backfill.parallel.shared_words import Barrier, StopWords
from backfill.parallel.worker import WorkerSetup, run_worker

_RING_BYTES = 1 << 20
_REAP_S = 5.0
_WAKES = 4096  # bytes that are read at once, one for each


@dataclass(frozen=True, slots=True)
class _Shared:
    """What all ranks inherit: file descriptors, and the port of ``store_fd``."""

    ring_fd: int
    memory_fd: int
    store_fd: int
    store_port: int


class RankProcesses:
    """One process for each rank, a ring of messages to all of them, and a socket from each.

    They are new interpreters, not forks, and end with this process. Nothing that they share has a name:
    memory and sockets are inherited, and gone when the last process that has them ends.

    Args:
        threads: of each rank.
    Attributes:
        reports: received and not taken yet, by rank.
        stop: stop requests that the ranks read.
        progress: how far each rank is.
        was_woken: ``wake`` was called; whoever waited for that clears it.
    Raises: OSError if a process cannot be created.
    """

    def __init__(self, config: EngineConfig, threads: int, load: RankLoader) -> None:
        self.reports: list[deque[FromRank]] = [deque() for _ in range(config.num_ranks)]
        self.stop = StopWords()
        self._barrier = Barrier(config.num_ranks)
        self.progress = Progress.of(config.num_ranks)
        self._config, self._load = replace(config, threads=threads), load
        self._processes: list[PythonProcess] = []
        self._links: list[socket.socket] = []
        self._readers: list[ReportReader] = []
        self._rank_of: dict[int, int] = {}
        self._poll = select.poll()
        self.was_woken = False
        self._woken, self._waking = socket.socketpair()
        for end in (self._woken, self._waking):
            end.setblocking(False)
        self._poll.register(self._woken, select.POLLIN)
        self._error: ExecutorDead | None = None
        with ExitStack() as on_error:
            on_error.callback(self.close)
            self._ring = self._start()
            on_error.pop_all()

    def _start(self) -> RingWriter:
        num_ranks = self._config.num_ranks
        with ExitStack() as until_started, socket.create_server(("127.0.0.1", 0)) as store:
            ring_fd, memory_fd = RingMemory.create(_RING_BYTES, num_ranks), create_memory(0)
            for fd in (ring_fd, memory_fd):
                until_started.callback(os.close, fd)
            shared = _Shared(ring_fd, memory_fd, store.fileno(), store.getsockname()[1])
            for rank in range(num_ranks):
                self._start_rank(rank, shared)
            return RingWriter(RingMemory(ring_fd, num_ranks), self.check)

    def _start_rank(self, rank: int, shared: _Shared) -> None:
        config = self._config
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._links.append(ours)
        self._readers.append(ReportReader(ours))
        self._poll.register(ours, select.POLLIN)
        self._rank_of[ours.fileno()] = rank
        context = RankContext(
            rank,
            config.tensor_parallel_size,
            config.pipeline_parallel_size,
            self.stop,
            shared.store_port,
            shared.store_fd if rank == 0 else None,
            shared.memory_fd,
            self._barrier,
            progress=self.progress,
        )
        with theirs:
            level = logging.getLogger().getEffectiveLevel()
            setup = WorkerSetup(config, context, self._load, shared.ring_fd, theirs.fileno(), level)
            inherited = [shared.ring_fd, shared.memory_fd, self.stop.fd, self._barrier.fd, theirs.fileno()]
            inherited.append(self.progress.fd)
            if context.store_fd is not None:
                inherited.append(context.store_fd)
            process = PythonProcess(f"backfill-rank{rank}", run_worker, (setup,), pass_fds=inherited)
            process.start()
            self._processes.append(process)

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
            if fd == self._woken.fileno():
                self._woken.recv(_WAKES)
                self.was_woken = True
                continue
            rank = self._rank_of[fd]
            reports = self._readers[rank].take()
            if reports is None:
                self.fail(self._how_it_ended(rank))
            self.reports[rank].extend(reports)

    def wake(self) -> None:
        """Let ``receive`` return. From any thread."""
        with suppress(OSError):  # it is closed, or woken often enough
            self._waking.send(b"!")

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
        for link in (*self._links, self._woken, self._waking):
            link.close()
        self.stop.close()
        self._barrier.close()
        self.progress.close()

    def _how_it_ended(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(_REAP_S)  # its sockets close a moment before it can be reaped
        code, name = process.exitcode, f"rank {rank} of {len(self._processes)}"
        if code is None:
            return f"The process of {name} has closed its socket."
        if code < 0:
            return f"The process of {name} was killed by signal {-code}."
        return f"The process of {name} ended with exit code {code}."
