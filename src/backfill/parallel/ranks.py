"""The ranks of an engine, as its driver has them: plans and stop requests go out, reports come in."""

from __future__ import annotations

import os
import select
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import NoReturn

from backfill.core.config import EngineConfig
from backfill.core.errors import ExecutorDead
from backfill.ipc.python_process import PythonProcess
from backfill.parallel.messages import FrameReader, FromRank, Moved, Report
from backfill.parallel.plan_codec import BadMessage
from backfill.parallel.rank import RankContext
from backfill.parallel.shared_memory import RingWriter, create_memory, create_ring
from backfill.parallel.shared_state import SharedState
from backfill.parallel.sockets import address_of
from backfill.parallel.worker import DriverFds, end_ranks, how_it_ended, start_rank

_RING_BYTES = 1 << 20
_WAKES = 4096  # taken at once


class Ranks(ABC):
    """A connection from each rank. One thread owns it; any thread may wake it or stop a step.

    Attributes:
        reports: received and not taken yet, by rank.
        pids: of the ranks' processes, on their nodes.
        state: how far each rank is.
        was_woken: ``wake`` was called since; whoever waited for that clears it.
    """

    def __init__(self, num_ranks: int) -> None:
        self.reports: list[deque[Report]] = [deque() for _ in range(num_ranks)]
        self.pids: list[int | None] = [None] * num_ranks
        self.state = SharedState(num_ranks)
        self.was_woken = False
        self._links: dict[int, socket.socket] = {}
        self._readers: dict[int, tuple[int, FrameReader[FromRank]]] = {}  # rank and reader, by descriptor
        self._error: ExecutorDead | None = None
        self._woken, self._waking = socket.socketpair()
        for end in (self._woken, self._waking):
            end.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._woken, select.POLLIN)

    def send(self, plan: bytes) -> None:
        """To all ranks. Raises: ExecutorDead if they are known to have ended; ``receive`` notices it."""
        if self._error is not None:
            raise self._error
        self._send(plan)

    @abstractmethod
    def stop(self, step: int) -> None:
        """Stop the step at its next safepoint. From any thread, at any time."""

    def receive(self, timeout_s: float) -> None:
        """Wait for what comes first, at most for so long, and put reports into ``reports``.

        Raises: ExecutorDead if a rank has ended. All others are ended then.
        """
        if self._error is not None:
            raise self._error
        for fd, _ in self._poll.poll(timeout_s * 1000):
            if fd == self._woken.fileno():
                self._woken.recv(_WAKES)
                self.was_woken = True
                continue
            rank, reader = self._readers[fd]
            try:
                self._take(rank, reader)
            except (BadMessage, ValueError) as error:
                self.fail(f"The process of rank {rank} of {len(self.pids)} has sent no message: {error}.")

    def check(self) -> None:
        """Raises: ExecutorDead if a rank has ended."""
        self.receive(0.0)

    def where(self, rank: int) -> str:
        """Begins a message of the rank, if it does not say by itself where that is."""
        return ""

    def wake(self) -> None:
        """Let ``receive`` return. From any thread."""
        with suppress(OSError):  # it is closed, or woken often enough
            self._waking.send(b"!")

    def fail(self, message: str) -> NoReturn:
        """End all ranks. Raises: ExecutorDead with the message, now and in every later call."""
        self.close()
        self._error = ExecutorDead(message)
        raise self._error

    def close(self) -> None:
        """End all ranks and release what they share. May be called again."""
        for link in self._links.values():
            link.close()
        self.state.close()
        for end in (self._woken, self._waking):
            end.close()

    def _add(self, rank: int, link: socket.socket) -> None:
        """The connection from a rank."""
        self._links[rank] = link
        self._readers[link.fileno()] = rank, FrameReader(link, FromRank)
        self._poll.register(link, select.POLLIN)

    def _take(self, rank: int, reader: FrameReader[FromRank]) -> None:
        """Raises: BadMessage, ValueError for what no rank sends."""
        messages = reader.take()
        if messages is None:
            self.fail(self._how_it_ended(rank))
        for message in messages:
            if isinstance(message, Moved):
                self.state.of_rank(rank).set_data(message.data)
            else:
                self.reports[rank].append(message)

    @abstractmethod
    def _send(self, plan: bytes) -> None: ...

    @abstractmethod
    def _how_it_ended(self, rank: int) -> str:
        """Of a rank that has closed its connection."""


# Starts the ranks of a configuration, whose threads are those of each, and what loads their part, by name
# (``worker.name_of``). Raises: BackfillError, OSError.
RankStarter = Callable[[EngineConfig, str], Ranks]


class LocalRanks(Ranks):
    """See ``Ranks``. Processes of this machine; a ring of plans to all of them, and a socket from each.

    Nothing that they share has a name: memory and sockets are inherited, and gone when the last process that
    has them ends.

    Raises: OSError if a process cannot be created.
    """

    def __init__(self, config: EngineConfig, load: str) -> None:
        super().__init__(config.num_ranks)
        self._processes: list[PythonProcess] = []
        with ExitStack() as on_error:
            on_error.callback(self.close)
            self._ring = self._start(config, load)
            on_error.pop_all()

    def _start(self, config: EngineConfig, load: str) -> RingWriter:
        size, num_stages = config.tensor_parallel_size, config.pipeline_parallel_size
        with ExitStack() as until_started:
            ring_fd, memory_fd = create_ring(_RING_BYTES, config.num_ranks), create_memory(0)
            for fd in (ring_fd, memory_fd):
                until_started.callback(os.close, fd)
            store = until_started.enter_context(socket.create_server(("127.0.0.1", 0)))
            context = RankContext(0, size, num_stages, self.state, memory_fd, address_of(store))
            for rank in range(config.num_ranks):
                ours, theirs = socket.socketpair()
                self._add(rank, ours)
                context = replace(context, rank=rank, store_fd=None if rank else store.fileno())
                with theirs:
                    process = start_rank(config, context, load, DriverFds(ring_fd, theirs.fileno()))
                self._processes.append(process)
                self.pids[rank] = process.pid
            return RingWriter(ring_fd, config.num_ranks, self.check)

    def stop(self, step: int) -> None:
        self.state.stops.request(step)

    def close(self) -> None:
        end_ranks(self._processes)
        super().close()

    def _send(self, plan: bytes) -> None:
        self._ring.write(plan)

    def _how_it_ended(self, rank: int) -> str:
        return how_it_ended(self._processes[rank], rank, len(self._processes))
