"""An actor of Ray that keeps one server running on its node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from backfill.parallel.ray_cluster import ADDRESS_VARIABLE
from backfill.router.replicas import ReplicaFailed, ReplicaPlace, ReplicaProcess


class ReplicaActor:
    """One server, a process of the actor's, which ends with it.

    Args:
        number: among all replicas.
        target: serves at a place, in a new process; pickled.
    """

    def __init__(self, number: int, target: Callable[[ReplicaPlace], None]) -> None:
        from ray import get_runtime_context
        from ray.util import get_node_ip_address

        # For an engine whose stages are actors of the same cluster.
        environment = {ADDRESS_VARIABLE: get_runtime_context().gcs_address}
        self._process = ReplicaProcess(number, target, environment, get_node_ip_address())
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
            return str(error)
        raise AssertionError("it runs until it fails")

    async def end(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
        if self._is_started:
            await self._process.end()
