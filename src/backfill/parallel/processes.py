"""The processes of the ranks: started together, and ended together as soon as one of them ends."""

from __future__ import annotations

import logging
import os
import select
import socket
from contextlib import ExitStack
from dataclasses import dataclass, replace

from backfill.core.config import EngineConfig
from backfill.ipc.python_process import PythonProcess
from backfill.parallel.frames import FrameReader
from backfill.parallel.messages import FromRank
from backfill.parallel.rank import RankContext, RankLoader, StagePlace, ranks_of_stage
from backfill.parallel.ranks import Ranks
from backfill.parallel.ring import RingWriter, create_ring
from backfill.parallel.shared_memory import Barrier, StopWords, create_memory
from backfill.parallel.worker import WorkerSetup, run_worker

_RING_BYTES = 1 << 20
_REAP_S = 5.0


@dataclass(frozen=True, slots=True)
class _Shared:
    """What all ranks inherit: file descriptors, and the port of ``store_fd``."""

    ring_fd: int
    memory_fd: int
    store_fd: int | None
    store_port: int


class RankProcesses(Ranks):
    """See ``Ranks``. A process for each rank, a ring of messages to all of them, and a socket from each.

    They are new interpreters, not forks, and end with this process. Nothing that they share has a name:
    memory and sockets are inherited, and gone when the last process that has them ends.

    Args:
        threads: of each rank.
        place: None for all ranks, else of those of one stage.
    Attributes:
        barrier: of all ranks of the engine.
    Raises: OSError if a process cannot be created.
    """

    def __init__(
        self, config: EngineConfig, threads: int, load: RankLoader, place: StagePlace | None = None
    ) -> None:
        self._place, num_ranks = place, config.num_ranks
        size = config.tensor_parallel_size
        super().__init__(range(num_ranks) if place is None else ranks_of_stage(place.stage, size), num_ranks)
        self._stop, self.barrier = StopWords(), Barrier(num_ranks)
        self._config, self._load = replace(config, threads=threads), load
        self._processes: list[PythonProcess] = []
        self._links: list[socket.socket] = []
        self._readers: list[FrameReader[FromRank]] = []
        self._place_of: dict[int, int] = {}
        with ExitStack() as on_error:
            on_error.callback(self.close)
            self._ring = self._start()
            on_error.pop_all()

    def _start(self) -> RingWriter:
        num_ranks, place = len(self.ranks), self._place
        with ExitStack() as until_started:
            ring_fd, memory_fd = create_ring(_RING_BYTES, num_ranks), create_memory(0)
            for fd in (ring_fd, memory_fd):
                until_started.callback(os.close, fd)
            store_fd: int | None
            if place is None:
                listener = until_started.enter_context(socket.create_server(("127.0.0.1", 0)))
                store_fd, store_port = listener.fileno(), listener.getsockname()[1]
            else:
                store_fd, store_port = place.store_fd, 0 if place.store is None else place.store.port
            shared = _Shared(ring_fd, memory_fd, store_fd, store_port)
            for rank in self.ranks:
                self._start_rank(rank, shared)
            return RingWriter(ring_fd, num_ranks, self.check)

    def _start_rank(self, rank: int, shared: _Shared) -> None:
        config, place = self._config, self._place
        ours, theirs = socket.socketpair()
        self._place_of[ours.fileno()] = len(self._links)
        self._links.append(ours)
        self._readers.append(FrameReader(ours, FromRank))
        self._poll.register(ours, select.POLLIN)
        context = RankContext(
            rank,
            config.tensor_parallel_size,
            config.pipeline_parallel_size,
            self._stop,
            shared.store_port,
            shared.store_fd if rank == 0 else None,
            shared.memory_fd,
            self.barrier,
            place,
            self.progress,
        )
        with theirs:
            level = logging.getLogger().getEffectiveLevel()
            worker = WorkerSetup(config, context, self._load, shared.ring_fd, theirs.fileno(), level)
            inherited = [shared.ring_fd, shared.memory_fd, self._stop.fd, self.barrier.fd, theirs.fileno()]
            inherited.append(self.progress.fd)
            if context.store_fd is not None:
                inherited.append(context.store_fd)
            if place is not None and place.previous_fds:
                inherited.append(place.previous_fds[context.tensor_rank])
            process = PythonProcess(f"backfill-rank{rank}", run_worker, (worker,), pass_fds=inherited)
            process.start()
            self._processes.append(process)

    @property
    def num_ranks(self) -> int:
        """Of the engine, also those that were started elsewhere."""
        return self._config.num_ranks

    @property
    def stop(self) -> StopWords:
        return self._stop

    @property
    def pids(self) -> list[int | None]:
        return [process.pid for process in self._processes]

    def watch(self, other: socket.socket) -> None:
        """``receive`` also returns when this socket can be read, from now on."""
        self._poll.register(other, select.POLLIN)

    def _send(self, message: bytes) -> None:
        self._ring.write(message)

    def _receive(self, timeout_s: float | None) -> None:
        for fd, _ in self._poll.poll(None if timeout_s is None else timeout_s * 1000):
            place = self._place_of.get(fd)
            if self._take_wake(fd) or place is None:
                continue
            reports = self._readers[place].take()
            if reports is None:
                self.fail(self._how_it_ended(place))
            self.reports[place].extend(reports)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(_REAP_S)
        for link in self._links:
            link.close()
        self._stop.close()
        self.barrier.close()
        super().close()

    def _how_it_ended(self, place: int) -> str:
        process = self._processes[place]
        process.join(_REAP_S)  # its sockets close a moment before it can be reaped
        how = "has closed its socket" if process.is_alive() else process.how_it_ended()
        return f"The process of rank {self.ranks[place]} of {self._config.num_ranks} {how}."
