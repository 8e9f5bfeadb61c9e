"""``--executor ray``: each stage of an engine is an actor of Ray, on a node that Ray chooses."""

from __future__ import annotations

import os
import re
import secrets
import sys
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from backfill import __version__
from backfill.core.config import EngineConfig
from backfill.core.errors import ConfigError, ExecutorDead
from backfill.parallel.rank import RemoteStage, ranks_of_stage
from backfill.parallel.ranks import Ranks
from backfill.parallel.ray_cluster import (
    ADDRESS_VARIABLE,
    Bundle,
    bundle_of,
    connect,
    reserve,
    resources_of_nodes,
)
from backfill.parallel.remote_ranks import RemoteRanks, StageListeners, run_stage
from backfill.parallel.sockets import KEY_BYTES, Address, address_of, listen

_START_S = 120.0
_REASON_S = 5.0
# What the engine's process is started with and its ranks need as well.
_PASSED_ON = ("GLIBC_TUNABLES", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "BACKFILL_CPU_ISA")
# Ray's workers have these. In a driver that one of them has started they would be another process's.
_OF_WORKERS = ("RAY_JOB_ID", "RAY_RAYLET_PID")
# What nodes send each other is not versioned, and has numbers as the machine has them.
BUILD = f"{__version__}, {sys.byteorder}-endian"


@dataclass(frozen=True, slots=True)
class StageNode:
    """Where an actor is, what it listens on (see ``StageListeners``), and the build of Backfill there."""

    node_id: str
    host: str
    links: tuple[Address, ...]
    store: Address | None
    build: str


class StageActor:
    """The ranks of one stage, processes of the actor's, which end with it."""

    def __init__(self, stage: int) -> None:
        self._stage = stage

    def __repr__(self) -> str:
        return f"backfill-stage-{self._stage}"  # before each line that Ray passes on

    def listen(self, num_ranks: int, *, serves_store: bool) -> StageNode:
        host = ray.util.get_node_ip_address()
        self._listeners = mine = StageListeners.open(host, self._stage, num_ranks, serves_store=serves_store)
        node_id = ray.get_runtime_context().get_node_id()
        store = None if mine.store is None else address_of(mine.store)
        return StageNode(node_id, host, tuple(map(address_of, mine.links)), store, BUILD)

    def run(self, config: EngineConfig, load: str, stage: RemoteStage, environment: dict[str, str]) -> str:
        """See ``run_stage``."""
        os.environ.update(environment)
        return run_stage(self._listeners, config, load, stage)


class RayStages:
    """See ``StageLauncher``. A placement group with a bundle for each stage, and an actor in each bundle.

    Args:
        bundle: of a stage.
    """

    def __init__(self, config: EngineConfig, bundle: Bundle) -> None:
        self._config, self._bundle = config, bundle
        self._size, self._num_stages = config.tensor_parallel_size, config.pipeline_parallel_size
        self._runs: list[Any] = []
        self._actors: list[Any] = []
        self._group: PlacementGroup | None = None
        self._nodes: list[StageNode] = []

    def start(self, load: str) -> RemoteRanks:
        """Place the actors, and start the ranks there.

        Raises: ConfigError, ExecutorDead, OSError; ``close`` then ends what was started.
        """
        self._group = reserve(self._bundle, self._num_stages, "PACK", _what(self._size, self._num_stages))
        self._actors = [self._create(stage) for stage in range(self._num_stages)]
        needs_store = self._config.device == "cuda"
        listening = [
            actor.listen.remote(self._size, serves_store=needs_store and stage == 0)
            for stage, actor in enumerate(self._actors)
        ]
        try:
            self._nodes = ray.get(listening, timeout=_START_S)
        except RayError as error:
            raise ExecutorDead(f"The actors of the stages cannot start: {_reason(error)}") from None
        check_builds(self._nodes)
        listener, key = listen(ray.util.get_node_ip_address()), secrets.token_bytes(KEY_BYTES)
        with listener:
            self._run(load, address_of(listener), key)
            return RemoteRanks(self._config, listener, key, self)

    def _run(self, load: str, driver: Address, key: bytes) -> None:
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        nodes = self._nodes
        following = [*(node.links for node in nodes[1:]), ()]
        for stage, (actor, node) in enumerate(zip(self._actors, nodes, strict=True)):
            beside = [other for other, each in enumerate(nodes) if each.node_id == node.node_id]
            node_ranks = tuple(rank for other in beside for rank in ranks_of_stage(other, self._size))
            remote = RemoteStage(stage, node_ranks, driver, following[stage], nodes[0].store, key)
            self._runs.append(actor.run.remote(self._config, load, remote, environment))

    def check(self) -> None:
        ended, _ = ray.wait(self._runs, num_returns=len(self._runs), timeout=0, fetch_local=False)
        for run in ended:
            raise ExecutorDead(self.how_it_ended(self._runs.index(run)))

    def how_it_ended(self, stage: int) -> str:
        try:
            reason = ray.get(self._runs[stage], timeout=_REASON_S)
        except GetTimeoutError:
            reason = "Its connection has ended."
        except RayError as error:
            reason = _reason(error)
        return f"{self.name_of(stage)} has ended: {reason}"

    def name_of(self, stage: int) -> str:
        return f"actor backfill-stage-{stage} on node {self._nodes[stage].host}"

    def close(self) -> None:
        for actor in self._actors:
            with suppress(RayError):  # the others are ended all the same
                ray.kill(actor)
        if self._group is not None:
            with suppress(RayError):
                remove_placement_group(self._group)
        self._actors, self._group = [], None

    def _create(self, stage: int) -> Any:
        options = ray.remote(StageActor).options(
            name=f"backfill-stage-{stage}",
            num_cpus=self._bundle.resources["CPU"],
            num_gpus=self._bundle.resources.get("GPU", 0.0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=stage
            ),
        )
        return options.remote(stage)


def plan_stages(config: EngineConfig) -> Bundle:
    """Connect to Ray, if this process is not, and choose what each stage gets.

    Raises: ConfigError if the cluster cannot be reached, or can never hold all stages.
    """
    if not ray.is_initialized():
        for name in _OF_WORKERS:
            os.environ.pop(name, None)
        connect(os.environ.get(ADDRESS_VARIABLE, ""), "ERROR")
    size, num_stages = config.tensor_parallel_size, config.pipeline_parallel_size
    return bundle_of(
        resources_of_nodes(),
        num_stages,
        size,
        None if config.threads is None else max(1, config.threads // config.num_ranks) * size,
        None if config.device == "auto" else config.device == "cuda",
        _what(size, num_stages),
    )


def check_builds(nodes: Iterable[StageNode]) -> None:
    """Raises: ConfigError if a node has another build than this process."""
    for node in nodes:
        if node.build != BUILD:
            raise ConfigError(
                f"`executor` ray needs the same Backfill on all nodes: {node.host} has {node.build}, and the "
                f"engine {BUILD}."
            )


def start_stages(bundle: Bundle, config: EngineConfig, load: str) -> Ranks:
    """See ``RankStarter``: as actors, with this bundle for each stage."""
    # Workers of Ray have another working folder.
    stages = RayStages(replace(config, model_dir=str(Path(config.model_dir).absolute())), bundle)
    with ExitStack() as on_error:
        on_error.callback(stages.close)
        ranks = stages.start(load)
        on_error.pop_all()
    return ranks


def _what(size: int, num_stages: int) -> str:
    return f"`tensor_parallel_size` {size} with `pipeline_parallel_size` {num_stages} and `executor` ray"


def _reason(error: RayError) -> str:
    """The cause, which is in the last line of what Ray says, without its guesses."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = lines[-1] if lines else type(error).__name__
    return re.split(" Worker exit type:|: RpcError", cause)[0]
