"""``--executor ray``: servers of one model in actors of Ray, on the nodes of a cluster."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from backfill.parallel.ray_cluster import (
    ADDRESS_VARIABLE,
    Bundle,
    bundle_of,
    connect,
    reserve,
    resources_of_nodes,
)
from backfill.router.replicas import ReplicaFailed, ReplicaPlace, ReplicaProcess, until_one_fails

logger = logging.getLogger(__name__)

_START_S = 120.0
_END_S = 20.0  # above what a server has to end in
_RETRY_S = 0.5


class ReplicaActor:
    """One server, a process of the actor's, which ends with it.

    Args:
        number: among all replicas.
        target: serves at a place, in a new process; pickled.
    """

    def __init__(self, number: int, target: Callable[[ReplicaPlace], None]) -> None:
        # For an engine whose stages are actors of the same cluster.
        environment = {ADDRESS_VARIABLE: ray.get_runtime_context().gcs_address}
        self._process = ReplicaProcess(number, target, environment, ray.util.get_node_ip_address())
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


@dataclass(slots=True, eq=False)
class _Replica:
    """An actor; ``url`` is None while it is down."""

    number: int
    actor: Any
    url: str | None


class RayReplicas:
    """Replicas as actors. The thread that starts it owns it.

    A replica of one stage has a bundle of a placement group. One of several stages has none: its engine
    reserves a bundle for each stage when it starts (``parallel/ray_stages.py``).

    Args:
        num_ranks: of a stage; they are on one node.
        num_stages: of a replica.
        threads: of a replica. None: as many as let all replicas be placed.
        uses_gpus: None: if the cluster has enough.
        target_of: what an actor runs in a process of its own, given what each stage has of its node; pickled
            by name.
    """

    def __init__(
        self,
        num_replicas: int,
        threads: int | None,
        uses_gpus: bool | None,
        target_of: Callable[[Bundle], Callable[[ReplicaPlace], None]],
        num_ranks: int = 1,
        num_stages: int = 1,
    ) -> None:
        self._num_replicas = num_replicas
        self._threads = threads
        self._uses_gpus = uses_gpus
        self._target_of = target_of
        self._num_ranks = num_ranks
        self._num_stages = num_stages
        self._group: PlacementGroup | None = None
        self._resources: dict[str, float] = {}
        self._target: Callable[[ReplicaPlace], None] | None = None
        self._replicas: list[_Replica] = []
        self._has_served = False

    @property
    def urls(self) -> tuple[str, ...]:
        """Of those that run."""
        return tuple(each.url for each in self._replicas if each.url is not None)

    def start(self) -> None:
        """Connect to the cluster or start one, reserve what the replicas need, and start them.

        Raises: ConfigError for a cluster that cannot be reached or is too small; ReplicaFailed.
        """
        num_stages = self._num_stages
        what = f"`data_parallel_size` {self._num_replicas} with `executor` ray"
        if num_stages > 1:
            what = f"{what} and `pipeline_parallel_size` {num_stages}"
        try:
            connect(os.environ.get(ADDRESS_VARIABLE, ""))
            bundle = bundle_of(
                resources_of_nodes(),
                self._num_replicas * num_stages,
                self._num_ranks,
                None if self._threads is None else self._threads // num_stages,
                self._uses_gpus,
                what,
            )
            self._target = self._target_of(bundle)
            if num_stages == 1:
                self._resources = bundle.resources
                self._group = reserve(bundle, self._num_replicas, "SPREAD", what)
            self._replicas = [
                _Replica(number, self._create(number), None) for number in range(self._num_replicas)
            ]
            for replica in self._replicas:
                replica.url = _first_url(replica)
        except BaseException:
            self.kill()
            raise

    def has_served(self) -> None:
        """From now on a replica that ends is started again."""
        self._has_served = True
        for replica in self._replicas:
            replica.actor.has_served.remote()

    async def run(self, on_move: Callable[[str, str], Awaitable[None]]) -> None:
        """Keep all running until cancelled.

        Args:
            on_move: called with the old URL and the new one when Ray has started an actor again.
        Raises: ReplicaFailed.
        """
        await until_one_fails(self._keep(replica, on_move) for replica in self._replicas)

    async def end(self) -> None:
        """End the servers, then all that was started."""
        if not ray.is_initialized():
            return
        ends = [replica.actor.end.remote() for replica in self._replicas if replica.url is not None]
        with suppress(RayError, TimeoutError):
            async with asyncio.timeout(_END_S):
                await asyncio.gather(*ends)
        self.kill()

    def kill(self) -> None:
        """End all at once."""
        if ray.is_initialized():
            with suppress(RayError):
                for replica in self._replicas:
                    ray.kill(replica.actor)
                if self._group is not None:
                    remove_placement_group(self._group)
        ray.shutdown()  # also of what is half started

    def _create(self, number: int) -> Any:
        name = f"backfill-replica-{number}"
        options = ray.remote(ReplicaActor).options(
            name=name,
            num_cpus=self._resources.get("CPU", 0.0),
            num_gpus=self._resources.get("GPU", 0.0),
            max_restarts=-1,
            scheduling_strategy="SPREAD"
            if self._group is None
            else PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=number
            ),
        )
        return options.remote(number, self._target)

    async def _keep(self, replica: _Replica, on_move: Callable[[str, str], Awaitable[None]]) -> None:
        while True:
            try:
                failure = await replica.actor.run.remote()
            except RayActorError as error:
                if not self._has_served:
                    raise ReplicaFailed(
                        f"The actor of replica {replica.number} ended before it was ready: {error}"
                    ) from None
                logger.error("the actor of replica %d is lost: Ray starts it again", replica.number)
            else:
                raise ReplicaFailed(failure)
            old, replica.url = replica.url, None
            url = replica.url = await self._url_of(replica)
            logger.warning("replica %d is started again on %s", replica.number, url)
            if old is not None and old != url:
                await on_move(old, url)

    async def _url_of(self, replica: _Replica) -> str:
        """Of an actor that is started again, once it is."""
        while True:
            try:
                url: str = await replica.actor.start.remote()
                await replica.actor.has_served.remote()
                return url
            except ActorDiedError:  # someone has ended it for good
                replica.actor = self._create(replica.number)
            except RayActorError:
                pass
            await asyncio.sleep(_RETRY_S)


def _first_url(replica: _Replica) -> str:
    """Raises: ReplicaFailed."""
    try:
        url: str = ray.get(replica.actor.start.remote(), timeout=_START_S)
        return url
    except GetTimeoutError:
        raise ReplicaFailed(f"The actor of replica {replica.number} did not start.") from None
    except RayError as error:
        raise ReplicaFailed(f"The actor of replica {replica.number} cannot start: {error}") from None
