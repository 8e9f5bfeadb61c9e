"""``--executor ray``: servers of one model in actors of Ray, on the nodes of a cluster."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from backfill.core.errors import BackfillError, ConfigError
from backfill.ray.replica_actor import ReplicaActor
from backfill.router.replicas import ReplicaFailed, ReplicaPlace, until_one_fails

try:
    import ray
    from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayError
    from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as missing:
    raise BackfillError(f"Ray cannot be imported ({missing}): pip install 'backfill[ray]'.") from None

logger = logging.getLogger(__name__)

ADDRESS_VARIABLE = "RAY_ADDRESS"
_REACH_S = 5.0
_CONNECT_S = 20.0
_PLACE_S = 20.0
_START_S = 120.0
_END_S = 20.0  # above what a server has to end in
_RETRY_S = 0.5
_OBJECT_STORE_BYTES = 80 << 20  # about the least that Ray takes: replicas exchange nothing through it


@dataclass(frozen=True, slots=True)
class ReplicaShare:
    """What one replica has of its node.

    Attributes:
        threads: of all its ranks, the processes that hold a part of the model each.
        num_gpus: one for each rank; 0 on CPU.
    """

    threads: int
    num_gpus: int

    @property
    def bundle(self) -> dict[str, float]:
        """As Ray names resources."""
        cpus = {"CPU": float(self.threads)}
        return {**cpus, "GPU": float(self.num_gpus)} if self.num_gpus else cpus


@dataclass(slots=True, eq=False)
class _Replica:
    """An actor; ``url`` is None while it is down."""

    number: int
    actor: Any
    url: str | None


class RayReplicas:
    """Replicas in a placement group, a bundle each. The thread that starts it owns it.

    Args:
        num_replicas, num_ranks: replicas, and processes of each, which are all on one node.
        threads: of a replica. None: as many as let all replicas be placed.
        uses_gpus: None: if the cluster has enough.
        target_of: what an actor runs in a process of its own; pickled by name.
    """

    def __init__(
        self,
        num_replicas: int,
        threads: int | None,
        uses_gpus: bool | None,
        target_of: Callable[[ReplicaShare], Callable[[ReplicaPlace], None]],
        num_ranks: int = 1,
    ) -> None:
        self._num_replicas = num_replicas
        self._threads = threads
        self._uses_gpus = uses_gpus
        self._target_of = target_of
        self._num_ranks = num_ranks
        self._group: PlacementGroup | None = None
        self._bundle: dict[str, float] = {}
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
        try:
            with _own_sigterm_handler():
                _connect(os.environ.get(ADDRESS_VARIABLE, ""))
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            share = share_of(nodes, self._num_replicas, self._num_ranks, self._threads, self._uses_gpus)
            self._bundle = share.bundle
            self._target = self._target_of(share)
            self._group = _reserve(share.bundle, self._num_replicas)
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
            num_cpus=self._bundle["CPU"],
            num_gpus=self._bundle.get("GPU", 0.0),
            max_restarts=-1,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
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


def share_of(
    nodes: list[dict[str, float]],
    num_replicas: int,
    num_ranks: int,
    threads: int | None,
    uses_gpus: bool | None,
) -> ReplicaShare:
    """What each replica gets of a cluster.

    Args:
        nodes: resources of each, as Ray names them.
        threads: of a replica; None: as many as let all replicas be placed.
        uses_gpus: None: if there are enough.
    Raises: ConfigError where the cluster can never hold all.
    """
    with_gpus = {None: (True, False), True: (True,), False: (False,)}[uses_gpus]
    most = int(max((node.get("CPU", 0.0) for node in nodes), default=0.0))
    for has_gpus in with_gpus:
        for each in [threads] if threads else range(max(most, num_ranks), num_ranks - 1, -1):
            share = ReplicaShare(each, num_ranks if has_gpus else 0)
            if sum(_num_bundles(node, share.bundle) for node in nodes) >= num_replicas:
                return share
    there = "; ".join(map(_shown, nodes)) or "none"
    raise ConfigError(
        f"{num_replicas} with `executor` ray needs {num_replicas} times {_shown(share.bundle)}, each on one "
        f"node, and the nodes of the cluster have: {there}.",
        field="data_parallel_size",
    )


def _num_bundles(node: dict[str, float], bundle: dict[str, float]) -> int:
    return min(int(node.get(name, 0.0) // amount) for name, amount in bundle.items())


def _shown(resources: dict[str, float]) -> str:
    """Such as "4 CPU, 1 GPU"."""
    return ", ".join(f"{resources.get(name, 0.0):g} {name}" for name in ("CPU", "GPU") if name in resources)


def _connect(address: str) -> None:
    """Raises: ConfigError."""
    if not address or address == "local":
        ray.init(address="local", object_store_memory=_OBJECT_STORE_BYTES)
        return
    problem = f"{ADDRESS_VARIABLE} {address}: no Ray cluster can be reached there"
    if "://" in address:
        raise ConfigError(f"{ADDRESS_VARIABLE} must be HOST:PORT of a Ray cluster or auto, got {address}.")
    if address != "auto":
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(
                f"{ADDRESS_VARIABLE} must be HOST:PORT of a Ray cluster or auto, got {address}."
            )
        try:
            socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
        except (OSError, OverflowError) as error:
            raise ConfigError(f"{problem} ({getattr(error, 'strerror', None) or error}).") from None
    try:
        with _exit_unless_within(_CONNECT_S, f"{problem} (no answer in {_CONNECT_S:g} s)."):
            ray.init(address=address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{problem} ({str(error).strip().splitlines()[0]}).") from None


@contextmanager
def _own_sigterm_handler() -> Iterator[None]:
    """Ray sets one that ends the process with another status."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit:
        if not callable(handler):
            raise
        handler(signal.SIGTERM, None)
    finally:
        signal.signal(signal.SIGTERM, handler)


@contextmanager
def _exit_unless_within(timeout_s: float, message: str) -> Iterator[None]:
    """End the process with the message if the block takes longer: Ray itself tries for minutes."""

    def end() -> None:
        os.write(2, f"backfill: {message}\n".encode())
        os._exit(1)

    timer = threading.Timer(timeout_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _reserve(bundle: dict[str, float], num_replicas: int) -> PlacementGroup:
    """Raises: ConfigError if others use what is needed."""
    group = placement_group([bundle] * num_replicas, strategy="SPREAD", name="backfill")
    if not group.wait(_PLACE_S):
        free = _shown(ray.available_resources())
        remove_placement_group(group)
        raise ConfigError(
            f"{num_replicas} with `executor` ray needs {num_replicas} times {_shown(bundle)}, and others use "
            f"the cluster: {free or 'nothing'} is free.",
            field="data_parallel_size",
        )
    return group


def _first_url(replica: _Replica) -> str:
    """Raises: ReplicaFailed."""
    try:
        url: str = ray.get(replica.actor.start.remote(), timeout=_START_S)
        return url
    except GetTimeoutError:
        raise ReplicaFailed(f"The actor of replica {replica.number} did not start.") from None
    except RayError as error:
        raise ReplicaFailed(f"The actor of replica {replica.number} cannot start: {error}") from None
