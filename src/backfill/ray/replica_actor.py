"""An actor of Ray that keeps one server running on its node."""

from __future__ import annotations

import asyncio
import os
import tempfile
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from backfill.parallel.ray_cluster import ADDRESS_VARIABLE
from backfill.router.replicas import ReplicaFailed, ReplicaProcess


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """Which server of all, where it listens, and the file in which it leaves why it cannot serve."""

    number: int
    host: str
    port: int
    failure: Path


class ReplicaActor:
    """One server, a process of the actor's, which ends with it.

    Args:
        number: among all replicas.
        target: serves at a place, in a new process; pickled.
    """

    def __init__(self, number: int, target: Callable[[ReplicaPlace], None]) -> None:
        from ray import get_runtime_context
        from ray.util import get_node_ip_address

        host = get_node_ip_address()
        self._failure = Path(tempfile.gettempdir()) / f"backfill-replica-{uuid.uuid4().hex}"
        self._process = ReplicaProcess(
            number,
            target,
            lambda port: ReplicaPlace(number, host, port, self._failure),
            # For an engine whose stages are actors of the same cluster.
            {ADDRESS_VARIABLE: get_runtime_context().gcs_address},
            host,
        )
        self._may_restart = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None
        self._is_started = False

    def __repr__(self) -> str:
        return f"backfill-replica-{self._process.number}"  # before each line that Ray passes on

    async def start(self) -> str:
        """Start the server, unless it was. Returns: its URL, at which it will answer once it has loaded."""
        if not self._is_started:
            self._process.start()
            self._is_started = True
        return self._process.url

    async def has_served(self) -> None:
        """From now on a server that ends is started again."""
        self._may_restart.set()

    async def run(self) -> str:
        """Keep the server running. Returns: why it ended before ``has_served``."""
        self._keeping = asyncio.create_task(self._process.run(self._may_restart))
        try:
            await self._keeping
        except ReplicaFailed as error:
            with suppress(OSError):
                return f"Replica {self._process.number}: {self._failure.read_text()}"
            return str(error)
        raise AssertionError("it runs until it fails")

    async def end(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
        if self._is_started:
            await self._process.end()
        self._failure.unlink(missing_ok=True)


def write_failure(path: Path, message: str) -> None:
    """Leave why the server cannot serve where its actor finds it."""
    with suppress(OSError):
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(message)
