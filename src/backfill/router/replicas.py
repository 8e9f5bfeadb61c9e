"""``--data-parallel-size``: servers of one model as child processes, kept running."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from backfill.core.errors import BackfillError
from backfill.ipc.python_process import PythonProcess
from backfill.ipc.restarts import Restarts

_RESTART_DELAY_S = 1.0
_LONGEST_DELAY_S = 30.0
_QUICK_DEATH_S = 30.0
_END_S = 15.0


class ReplicaFailed(BackfillError):
    """A replica ended before it had served."""


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """Which server of all, and where it listens."""

    number: int
    host: str
    port: int


@dataclass(slots=True, eq=False)
class ReplicaProcess:
    """One server, started again on the same port when it ends.

    Attributes:
        number: among all.
        target: serves at a place, in a new process; pickled. If it cannot serve, its last words say why.
        environment: added to this process's.
        host: address on which it listens.
        port: of its own: no other program can have it, not between two of its processes either.
    """

    number: int
    target: Callable[[ReplicaPlace], None]
    environment: Mapping[str, str] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = field(init=False)
    process: PythonProcess = field(init=False)
    _reserved: socket.socket = field(init=False)  # never listens, so that nobody waits for an answer of it

    def __post_init__(self) -> None:
        self._reserved = socket.socket(_family(self.host))
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._reserved.bind((self.host, 0))
        self.port = self._reserved.getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def start(self) -> None:
        """Raises: OSError."""
        place = ReplicaPlace(self.number, self.host, self.port)
        name = f"backfill-replica-{self.number}"
        self.process = PythonProcess(name, self.target, (place,), self.environment)
        self.process.start()

    async def run(self, may_restart: asyncio.Event) -> None:
        """Keep it running until cancelled. Raises: ReplicaFailed if it ends before ``may_restart``."""
        restarts = Restarts(f"replica {self.number}", _RESTART_DELAY_S, _LONGEST_DELAY_S)
        while True:
            started_at_s = time.monotonic()
            await self.process.wait()
            reason = self.process.last_words or f"Its process {self.process.how_it_ended()}."
            if not may_restart.is_set():
                raise ReplicaFailed(f"Replica {self.number}: {reason}")
            restarts.on_death(is_quick=time.monotonic() - started_at_s < _QUICK_DEATH_S)
            await restarts.wait(reason)
            self.start()

    async def end(self) -> None:
        """End it, by force if it does not end in time."""
        await self.process.end(_END_S)


class Replicas:
    """Several of them. One event loop owns it."""

    def __init__(self, processes: Sequence[ReplicaProcess]) -> None:
        self._processes = processes
        self._may_restart = asyncio.Event()

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(process.url for process in self._processes)

    def start(self) -> None:
        """Raises: OSError."""
        for process in self._processes:
            process.start()

    def has_served(self) -> None:
        """From now on a replica that ends is started again."""
        self._may_restart.set()

    async def run(self, on_move: Callable[[str, str], Awaitable[None]] | None = None) -> None:
        """Keep all running until cancelled.

        Args:
            on_move: never called: each keeps its URL.
        Raises: ReplicaFailed.
        """
        await until_one_fails(process.run(self._may_restart) for process in self._processes)

    async def end(self) -> None:
        await asyncio.gather(*(process.end() for process in self._processes))

    def kill(self) -> None:
        """End all at once."""
        for process in self._processes:
            process.process.kill()


async def until_one_fails(works: Iterable[Coroutine[None, None, None]]) -> None:
    """Run all until one fails, or until cancelled; all have ended then. Raises: what it has raised."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket(_family(host)) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
