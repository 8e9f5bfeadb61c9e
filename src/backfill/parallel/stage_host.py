"""The process that has the ranks of one stage on its node, and passes on what they and the driver send.

    driver ◄── TCP ──► run_stage ── ring in shared memory ──► ranks of the stage, processes of this node
                           ▲───────── sockets ────────────────────┘

To the ranks it is the driver: their ring, their stop words and their sockets are those of ``RankProcesses``.
"""

from __future__ import annotations

import importlib
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import msgspec

from backfill.core.config import EngineConfig
from backfill.core.errors import ExecutorDead
from backfill.parallel.frames import FrameReader, encode_frame
from backfill.parallel.messages import (
    AtBarrier,
    FromRank,
    RankReport,
    RunPlan,
    StageProgress,
    Started,
    StepDone,
    StopStep,
    ToStage,
)
from backfill.parallel.processes import RankProcesses
from backfill.parallel.rank import RankContext, RankExecutor, RankLoader, StagePlace
from backfill.parallel.sockets import Address, address_of, connect_to, listen, receive_exactly

HELLO = struct.Struct("<I")  # the stage
CLOCK = struct.Struct("<d")
NUM_CLOCK_READINGS = 5
_CONNECT_S = 60.0
_BARRIER_POLL_S = 0.05
_PROGRESS_S = 0.25


@dataclass(frozen=True, slots=True)
class StageAddresses:
    """Where a host listens for its ranks.

    Attributes:
        links: for the stage before, by tensor rank; none on the first stage.
        store: for the store of torch.distributed; None where none is needed.
    """

    links: tuple[Address, ...]
    store: Address | None


@dataclass(frozen=True, slots=True)
class NamedLoader:
    """A ``RankLoader`` by its name: the host passes it on without importing it, and torch with it."""

    module: str
    name: str

    @classmethod
    def of(cls, load: RankLoader) -> NamedLoader:
        return cls(load.__module__, load.__name__)

    def __call__(self, config: EngineConfig, context: RankContext) -> RankExecutor:
        load: RankLoader = getattr(importlib.import_module(self.module), self.name)
        return load(config, context)


@dataclass(frozen=True, slots=True)
class StageOrder:
    """What a host is to run.

    Attributes:
        config: of the engine, with its model where this node has it.
        threads: of each rank.
        driver: where the driver listens.
        place: without what only the host knows: descriptors of its sockets, and its clock.
    """

    config: EngineConfig
    threads: int
    load: NamedLoader
    driver: Address
    place: StagePlace


class StageSockets:
    """What the ranks of a stage inherit: listening sockets for others, opened before those are started.

    Args:
        links: see ``StageAddresses``.
    """

    def __init__(self, links: Sequence[socket.socket], store: socket.socket | None = None) -> None:
        self.links = links
        self.store = store

    @classmethod
    def open(cls, host: str, stage: int, num_ranks: int, *, serves_store: bool) -> StageSockets:
        """On this address of the node. Raises: OSError."""
        links = [listen(host) for _ in range(num_ranks)] if stage else []
        return cls(links, listen(host) if serves_store else None)

    @property
    def addresses(self) -> StageAddresses:
        store = None if self.store is None else address_of(self.store)
        return StageAddresses(tuple(map(address_of, self.links)), store)

    def close(self) -> None:
        for each in (*self.links, self.store):
            if each is not None:
                each.close()


def run_stage(sockets: StageSockets, order: StageOrder) -> str:
    """Run the ranks of a stage until the driver closes its connection or a rank ends.

    Returns: why it ended. No process is left then, and ``sockets`` are closed.
    Raises: OSError if the driver cannot be reached, or a process not be started.
    """
    with ExitStack() as stack:
        stack.callback(sockets.close)
        link = stack.enter_context(connect_to(order.driver, order.place.key, _CONNECT_S))
        link.sendall(HELLO.pack(order.place.stage))
        place = replace(
            order.place,
            store_fd=None if sockets.store is None else sockets.store.fileno(),
            previous_fds=tuple(each.fileno() for each in sockets.links),
            clock_ahead_s=_clock_ahead_s(link),
        )
        ranks = RankProcesses(order.config, order.threads, order.load, place)
        stack.callback(ranks.close)
        sockets.close()  # the ranks have them
        try:
            _Relay(ranks, link, place.clock_ahead_s).run()
        except ExecutorDead as error:
            return str(error)
        except OSError:
            pass
        return "The driver has closed its connection."


class _Relay:
    """Between the driver and the ranks of a stage, until one of them ends."""

    def __init__(self, ranks: RankProcesses, link: socket.socket, clock_ahead_s: float) -> None:
        self._ranks = ranks
        self._link = link
        self._frames: FrameReader[ToStage] = FrameReader(link, ToStage)
        self._clock_ahead_s = clock_ahead_s
        self._progress = b""
        self._progress_at_s = 0.0
        ranks.watch(link)

    def run(self) -> None:
        """Raises: ExecutorDead with the reason if a rank has ended, OSError if the driver has."""
        ranks = self._ranks
        self._link.sendall(encode_frame(Started(tuple(pid or 0 for pid in ranks.pids))))
        while not all(map(ranks.barrier.has_come, ranks.ranks)):
            self._pass_on(_BARRIER_POLL_S)
        self._link.sendall(encode_frame(AtBarrier()))
        while True:
            self._pass_on(_PROGRESS_S)
            self._send_progress()

    def _pass_on(self, timeout_s: float | None) -> None:
        ranks = self._ranks
        try:
            ranks.receive(timeout_s)
        finally:  # what was reported before a rank ended may say why
            self._send_reports()
        messages = self._frames.take()
        if messages is None:
            raise ConnectionAbortedError
        for message in messages:
            if isinstance(message, RunPlan):
                ranks.send(message.plan)
            elif isinstance(message, StopStep):
                ranks.stop.request(message.step)
            else:
                for rank in range(ranks.num_ranks):
                    ranks.barrier.arrive(rank)

    def _send_reports(self) -> None:
        for rank, reports in zip(self._ranks.ranks, self._ranks.reports, strict=True):
            while reports:
                report = self._on_drivers_clock(reports.popleft())
                self._link.sendall(encode_frame(RankReport(rank, report)))

    def _send_progress(self) -> None:
        """At most every ``_PROGRESS_S``, and nothing of an idle stage."""
        now_s = time.monotonic()
        if now_s < self._progress_at_s + _PROGRESS_S:
            return
        self._progress_at_s = now_s
        part = self._ranks.progress.part(self._ranks.ranks)
        if part != self._progress:
            self._progress = part
            self._link.sendall(encode_frame(StageProgress(part)))

    def _on_drivers_clock(self, report: FromRank) -> FromRank:
        if not isinstance(report, StepDone) or report.others is None or report.others.stopped_at_s is None:
            return report
        stopped_at_s = report.others.stopped_at_s + self._clock_ahead_s
        return msgspec.structs.replace(report, others=replace(report.others, stopped_at_s=stopped_at_s))


def _clock_ahead_s(link: socket.socket) -> float:
    """The driver's monotonic clock less this node's, by the quickest of some answers. Raises: OSError."""
    readings: list[tuple[float, float]] = []
    for _ in range(NUM_CLOCK_READINGS):
        asked_s = time.monotonic()
        link.sendall(b"?")
        answer = bytearray(CLOCK.size)
        receive_exactly(link, memoryview(answer))
        answered_s = time.monotonic()
        (driver_s,) = CLOCK.unpack(answer)
        readings.append((answered_s - asked_s, driver_s - (asked_s + answered_s) / 2))
    _, ahead_s = min(readings)
    return ahead_s
