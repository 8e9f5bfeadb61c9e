"""``--data-parallel-size``: servers of one model as child processes, kept running."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from backfill.core.errors import BackfillError
from backfill.ipc.python_process import PythonProcess

logger = logging.getLogger(__name__)

_RESTART_DELAY_S = 1.0
_LONGEST_DELAY_S = 30.0
_QUICK_DEATH_S = 30.0
_END_S = 15.0
_END_POLL_S = 0.02


class ReplicaFailed(BackfillError):
    """A replica ended before it had served."""


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """Which server of all, where it listens, and the file in which it leaves why it cannot serve."""

    number: int
    host: str
    port: int
    failure: Path

    def write_failure(self, message: str) -> None:
        with suppress(OSError):
            self.failure.unlink(missing_ok=True)
            with os.fdopen(os.open(self.failure, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(message)


@dataclass(slots=True, eq=False)
class ReplicaProcess:
    """One server, started again on the same port when it ends.

    Attributes:
        number: among all.
        target: serves at a place, in a new process; pickled.
        environment: added to this process's.
        host: address on which it listens.
    """

    number: int
    target: Callable[[ReplicaPlace], None]
    environment: Mapping[str, str] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = field(init=False)
    process: PythonProcess = field(init=False)
    _failure: Path = field(init=False)

    def __post_init__(self) -> None:
        self.port = free_port(self.host)
        self._failure = Path(tempfile.gettempdir()) / f"backfill-replica-{uuid.uuid4().hex}"

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def start(self) -> None:
        """Raises: OSError."""
        place = ReplicaPlace(self.number, self.host, self.port, self._failure)
        name = f"backfill-replica-{self.number}"
        self.process = PythonProcess(name, self.target, (place,), self.environment)
        self.process.start()

    async def run(self, may_restart: asyncio.Event) -> None:
        """Keep it running until cancelled. Raises: ReplicaFailed if it ends before ``may_restart``."""
        num_quick = 0
        while True:
            started_at_s = time.monotonic()
            await self._until_ended()
            reason = self._why_it_ended()
            if not may_restart.is_set():
                raise ReplicaFailed(f"Replica {self.number}: {reason}")
            num_quick = num_quick + 1 if time.monotonic() - started_at_s < _QUICK_DEATH_S else 1
            delay_s = min(_RESTART_DELAY_S * 2.0 ** (num_quick - 1), _LONGEST_DELAY_S)
            logger.error("replica %d is started again in %g s: %s", self.number, delay_s, reason)
            await asyncio.sleep(delay_s)
            self.start()

    async def end(self) -> None:
        """End it, by force if it does not end in time."""
        deadline_at_s = time.monotonic() + _END_S
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGTERM)
        while self.process.is_alive() and time.monotonic() < deadline_at_s:
            await asyncio.sleep(_END_POLL_S)
        self.process.kill()
        self.process.join(_END_S)
        self._failure.unlink(missing_ok=True)

    def _why_it_ended(self) -> str:
        try:
            reason = self._failure.read_text()
            self._failure.unlink()
            return reason
        except OSError:
            status = self.process.exitcode or 0
            how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
            return f"Its process {how}."

    async def _until_ended(self) -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        sentinel = self.process.sentinel
        loop.add_reader(sentinel, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(sentinel)
        self.process.join(_END_S)


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
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
