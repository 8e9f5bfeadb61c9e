"""A cluster of Ray: how it is reached, and how much of a node each part of Backfill gets."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from backfill.core.errors import ConfigError

ADDRESS_VARIABLE = "RAY_ADDRESS"
_REACH_S = 5.0
_CONNECT_S = 20.0
_PLACE_S = 20.0
_OBJECT_STORE_BYTES = 80 << 20  # about the least that Ray takes: nothing goes through it


@dataclass(frozen=True, slots=True)
class Bundle:
    """What of a node a replica has, or a stage of one.

    Attributes:
        threads: of all its ranks, the processes that hold a part of the model each.
        num_gpus: one for each rank; 0 on CPU.
    """

    threads: int
    num_gpus: int

    @property
    def resources(self) -> dict[str, float]:
        """As Ray names them."""
        cpus = {"CPU": float(self.threads)}
        return {**cpus, "GPU": float(self.num_gpus)} if self.num_gpus else cpus


def connect(address: str, log_level: str = "INFO") -> None:
    """Connect to the cluster at this address; without one start a cluster that ends with this process.

    Args:
        address: HOST:PORT, auto, or empty.
    Raises: ConfigError. If the cluster does not answer, a thread stays that waits for it.
    """
    if not address or address == "local":
        with _own_sigterm_handler():
            ray.init(address="local", object_store_memory=_OBJECT_STORE_BYTES, logging_level=log_level)
        return
    host, _, port = address.rpartition(":")
    if address != "auto" and ("://" in address or not host or not port.isdigit()):
        raise ConfigError(f"{ADDRESS_VARIABLE} must be HOST:PORT of a Ray cluster or auto, got {address}.")
    connected: Future[None] = Future()
    # Ray says so in any thread but the main one.
    logging.getLogger("ray._private.worker").addFilter(lambda record: "SIGTERM" not in record.getMessage())

    def run() -> None:
        try:
            if address != "auto":
                socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
            ray.init(address=address, logging_level=log_level)
        except BaseException as error:
            connected.set_exception(error)
        else:
            connected.set_result(None)

    threading.Thread(target=run, name="connect-to-ray", daemon=True).start()
    try:
        connected.result(_CONNECT_S)
    except TimeoutError:
        reason = f"no answer in {_CONNECT_S:g} s; one with tokens needs RAY_AUTH_MODE=token here too"
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error).strip().splitlines()[0]
    else:
        return
    raise ConfigError(f"{ADDRESS_VARIABLE} {address}: no Ray cluster can be reached there ({reason}).")


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


def resources_of_nodes() -> list[dict[str, float]]:
    """Of each node that runs, as Ray names them."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def bundle_of(
    nodes: list[dict[str, float]],
    num_bundles: int,
    num_ranks: int,
    threads: int | None,
    uses_gpus: bool | None,
    what: str,
) -> Bundle:
    """What each replica, or each stage, gets of a cluster.

    Args:
        nodes: resources of each.
        num_ranks: of a bundle.
        threads: of a bundle; None: as many as let all be placed.
        uses_gpus: None: if there are enough.
        what: needs them, for the message.
    Raises: ConfigError where the cluster can never hold all.
    """
    with_gpus = {None: (True, False), True: (True,), False: (False,)}[uses_gpus]
    most = int(max((node.get("CPU", 0.0) for node in nodes), default=0.0))
    for has_gpus in with_gpus:
        for each in [threads] if threads else range(max(most, num_ranks), num_ranks - 1, -1):
            bundle = Bundle(each // num_ranks * num_ranks, num_ranks if has_gpus else 0)
            if _num_placed(nodes, bundle) >= num_bundles:
                return bundle
    raise _too_small(nodes, bundle, num_bundles, what)


def most_on_a_node(nodes: list[dict[str, float]], bundle: Bundle) -> int:
    """Bundles that one node may hold, at least one; see ``bundle_of``."""
    return max([1, *(_num_on(node, bundle) for node in nodes)])


def reserve(bundle: Bundle, num_bundles: int, strategy: str, what: str) -> PlacementGroup:
    """A placement group. Raises: ConfigError if others use what is needed."""
    group = placement_group([bundle.resources] * num_bundles, strategy=strategy, name="backfill")
    if not group.wait(_PLACE_S):
        free, nodes = _shown(ray.available_resources()), resources_of_nodes()
        remove_placement_group(group)
        if _num_placed(nodes, bundle) < num_bundles:  # a node has left
            raise _too_small(nodes, bundle, num_bundles, what)
        raise ConfigError(
            f"{what} needs {num_bundles} times {_shown(bundle.resources)}, and others use "
            f"the cluster: {free or 'nothing'} is free."
        )
    return group


def _too_small(nodes: list[dict[str, float]], bundle: Bundle, num_bundles: int, what: str) -> ConfigError:
    there = "; ".join(map(_shown, nodes)) or "none"
    num_placed = _num_placed(nodes, bundle)
    fit = f"there is room for {num_placed}" if num_placed else "no node is big enough for one"
    return ConfigError(
        f"{what} needs {num_bundles} times {_shown(bundle.resources)}, each on one node, and {fit}: "
        f"the nodes of the cluster have: {there}."
    )


def _num_placed(nodes: list[dict[str, float]], bundle: Bundle) -> int:
    """Bundles that empty nodes hold."""
    return sum(_num_on(node, bundle) for node in nodes)


def _num_on(node: dict[str, float], bundle: Bundle) -> int:
    return min(int(node.get(name, 0.0) // amount) for name, amount in bundle.resources.items())


def _shown(resources: dict[str, float]) -> str:
    """Such as "4 CPU, 1 GPU"."""
    return ", ".join(f"{resources.get(name, 0.0):g} {name}" for name in ("CPU", "GPU") if name in resources)
