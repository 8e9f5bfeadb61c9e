"""The server's client of the preparation processes."""

from __future__ import annotations

import asyncio
import math

import msgspec

from backfill.blending.requests import PLANNED_BY_LENGTH
from backfill.core.request import ServiceClass
from backfill.engine.messages import StepReport
from backfill.engine.tasks import TaskWatch
from backfill.preparation.messages import (
    AnswerBody,
    CheckInput,
    Configure,
    InputLimits,
    InputReport,
    KVRoom,
    LineSelection,
    OnlineTraffic,
    PreparationSetup,
    PrepareBody,
)
from backfill.preparation.readers import LineReaders, PreparedLines
from backfill.preparation.supervisor import PreparationSupervisor
from backfill.preparation.turns import OwnerTurns
from backfill.protocol.generation import Generation, GenerationEndpoint
from backfill.protocol.preparer import EngineFacts, RequestContext, TextEndpoint

# Bodies of a class in the process at once. More wait here, where a client that disconnects frees its body.
_MAX_ONLINE_BODIES = 4
_MAX_OFFLINE_BODIES = 1
_ROOM_EVERY_S = 1.0  # seconds between two messages of the KV that lines may have


class PreparationClient:
    """Has bodies of requests prepared in one process, and input files of batches in another.

    A plan of many lines holds the interpreter's lock of its process; bodies do not wait for it. The second
    process is launched when a file is first uploaded, checked or opened. Jobs may be submitted before a
    process is up. One event loop owns the client.

    Attributes:
        bodies, files: the two processes.
    """

    def __init__(self, setup: PreparationSetup, tasks: TaskWatch | None = None) -> None:
        self.setup = setup
        self._tasks = tasks or TaskWatch()
        self.bodies = PreparationSupervisor("bodies", setup, self._tasks, on_launch=self._configure_bodies)
        self.files = PreparationSupervisor("files", setup, self._tasks, on_launch=self._configure_files)
        self._readers = LineReaders(self.files)
        self._indexing: asyncio.Task[None] | None = None
        self._facts: EngineFacts | None = None
        self._room_told_at_s = -math.inf
        self._body_turns = {
            ServiceClass.ONLINE: OwnerTurns(_MAX_ONLINE_BODIES),
            ServiceClass.OFFLINE: OwnerTurns(_MAX_OFFLINE_BODIES),
        }

    @property
    def is_up(self) -> bool:
        """The process for bodies is ready, and so is that for files once there has been one to prepare."""
        return self.bodies.is_up and (self.files.is_up or not self.files.is_needed)

    @property
    def num_deaths(self) -> int:
        """Processes that ended by themselves."""
        return self.bodies.num_deaths + self.files.num_deaths

    def start(self, *, bodies_within_s: float | None = None) -> None:
        """Launch each process at its first job, that for bodies after ``bodies_within_s`` s if earlier."""
        self.bodies.start(within_s=bodies_within_s)
        self.files.start()
        self._indexing = self._tasks.start(self._readers.run(), "preparation-indexing")

    async def stop(self) -> None:
        """End the processes and cancel the jobs that have no result."""
        if self._indexing is not None:
            self._indexing.cancel()
            await asyncio.gather(self._indexing, return_exceptions=True)
        await asyncio.gather(self.bodies.stop(), self.files.stop())

    def configure(self, facts: EngineFacts) -> None:
        """Send the engine's limits. Called before the first body or line is prepared."""
        self._facts = facts
        for process in (self.bodies, self.files):
            process.send(Configure(facts))
        self._readers.allow()

    def note_online(self, traffic: OnlineTraffic) -> None:
        """Tell what online requests take of the engine; nothing where there is no process for files."""
        self.files.send(traffic)

    def on_report(self, report: StepReport, now_s: float) -> None:
        """Tell how much KV requests may have, where the order of lines asks for it.

        It changes while the engine runs: the pool with the memory of the weights, and what is kept of the
        prefix cache with online requests.
        """
        if self.setup.order != "blend" or self._facts is None or now_s < self._room_told_at_s + _ROOM_EVERY_S:
            return
        self._room_told_at_s = now_s
        stats, block_size = report.stats, self._facts.info.block_size
        num_online = stats.device_blocks.online + stats.num_protected_blocks
        self.files.send(KVRoom(stats.num_blocks * block_size, num_online * block_size))

    async def prepare(
        self,
        endpoint: GenerationEndpoint,
        body: bytes,
        context: RequestContext,
        service_class: ServiceClass = ServiceClass.ONLINE,
    ) -> Generation:
        """Prepare a body. Bodies of the two classes do not wait for each other, and owners take turns.

        Raises: RequestError; NotReady while no process can be started; PreparationDied.
        """
        async with self._body_turns[service_class].turn(context.owner):
            return await self.bodies.ask(PrepareBody(endpoint, body, context), Generation)

    async def answer(self, endpoint: TextEndpoint, body: bytes, owner: str) -> bytes:
        """The JSON answer of ``/tokenize`` or ``/detokenize``. Raises: as ``prepare``."""
        async with self._body_turns[ServiceClass.ONLINE].turn(owner):
            return await self.bodies.ask(AnswerBody(endpoint, body), bytes)

    async def check_input(self, path: str, limits: InputLimits) -> InputReport:
        """Check an input file. Cancelling stops the reading. Raises: OSError, PreparationDied."""
        return await self.files.ask(CheckInput(path, limits), InputReport)

    def open_lines(self, selection: LineSelection) -> PreparedLines:
        """The lines of a file, prepared, in the order of ``setup``. Close it after use."""
        self.files.launch()
        if self.setup.order not in PLANNED_BY_LENGTH:
            selection = msgspec.structs.replace(selection, observed={})
        return self._readers.open(selection)

    def _configure_bodies(self) -> None:
        if self._facts is not None:
            self.bodies.send(Configure(self._facts))

    def _configure_files(self) -> None:
        if self._facts is not None:
            self.files.send(Configure(self._facts))
        self._readers.restart()
