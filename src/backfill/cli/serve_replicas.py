"""``backfill serve --data-parallel-size N``: a router in front of N servers, which it starts and ends."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from backfill.cli.interrupts import LOADING, SIGNALS, exit_at_once, interruptible
from backfill.cli.startup import (
    announce,
    check_storage,
    counted,
    find_folder,
    listen,
    process_age_s,
    run_server,
)
from backfill.core.config import EngineConfig
from backfill.core.errors import ConfigError
from backfill.engine.options import ModelOptions, check_engine
from backfill.http.config import ServerConfig
from backfill.jobs.config import JobsConfig
from backfill.protocol.options import read_template

if TYPE_CHECKING:
    from backfill.cli.startup import Address
    from backfill.parallel.ray_cluster import Bundle
    from backfill.ray.replicas import RayReplicas
    from backfill.router.replicas import ReplicaPlace, Replicas
    from backfill.router.server import RouterServer

logger = logging.getLogger(__name__)

_LOAD_S = 3600.0  # a replica that cannot load ends by itself
_READY_POLL_S = 0.05
_REJOIN_S = 0.5
_FOLDER = "replicas"

# Of an engine's options and the router's key.
_ServerOf = Callable[[EngineConfig, str | None], Callable[["ReplicaPlace"], None]]
# What runs in a replica's process.
RunReplica = Callable[[ModelOptions, ServerConfig, JobsConfig, EngineConfig, "ReplicaPlace"], None]


def serve_replicas(
    model: ModelOptions,
    server: ServerConfig,
    jobs: JobsConfig,
    engine: EngineConfig,
    num_replicas: int,
    run_replica: RunReplica,
) -> None:
    """Serve with servers of the same options behind ``server``'s address."""
    from backfill.router.config import RouterConfig
    from backfill.router.server import RouterServer

    address = listen(server)
    is_on_ray = engine.executor == "ray"
    # Nodes share no folder that is known: without a store that is named, the router sends lines to replicas.
    shares_store = not is_on_ray or jobs.is_shared
    jobs = jobs.for_several_servers()
    if jobs.batch_api:
        with interruptible(LOADING):
            check_storage(jobs, address.url)
    # Actors listen beyond loopback, so they ask for a key in any case.
    engine_key = None if address.keys is None and not is_on_ray else secrets.token_urlsafe(32)
    own_jobs = jobs if shares_store else dataclasses.replace(jobs, batch_api=False)
    server_of = partial(_server_of, run_replica, model, server, own_jobs, is_on_ray)
    replicas: Replicas | RayReplicas
    if is_on_ray:
        assert engine_key is not None
        for number in SIGNALS:
            signal.signal(number, exit_at_once)  # what Ray has started ends with this process
        replicas = _actors(server_of, engine, num_replicas, engine_key)
        replicas.start()
    else:
        with interruptible(LOADING):
            read_template(server.chat_template)
            # Found, and perhaps fetched, once before all of them look for it.
            check_engine(dataclasses.replace(engine, model_dir=str(find_folder(model))))
            replicas = _processes(server_of, engine, num_replicas, engine_key)
            replicas.start()
    logger.info(
        "starting on %s with %s; /health answers 503 until one of them has loaded %s",
        address.url,
        counted(num_replicas, "replica"),
        model.model,
    )

    async def run() -> signal.Signals | None:
        routing = RouterServer(
            server,
            RouterConfig(engines=replicas.urls, engine_api_key=engine_key, join_timeout=_LOAD_S),
            url=address.url,
            api_keys=address.keys,
            jobs_config=jobs if jobs.batch_api else None,
            on_second_signal=replicas.kill,
        )
        try:
            return await _serve(routing, replicas, address)
        finally:
            await replicas.end()

    run_server(run())


def _server_of(
    run_replica: RunReplica,
    model: ModelOptions,
    server: ServerConfig,
    jobs: JobsConfig,
    on_ray: bool,
    engine: EngineConfig,
    key: str | None,
) -> Callable[[ReplicaPlace], None]:
    """What a replica runs: a server with these options, for the router alone.

    Args:
        engine: of this replica.
        key: with which the router speaks for its clients.
    """
    if Path(model.model).exists():  # workers of Ray have another working folder
        model = dataclasses.replace(model, model=str(Path(model.model).absolute()))
    server = dataclasses.replace(
        server,
        api_key=() if key is None else (f"router={key}",),
        # For the weights of owners. What is on this machine is not known on the nodes of Ray.
        api_key_file=None if on_ray or server.api_key_file is None else server.api_key_file.absolute(),
        uds=None,
        ssl_certfile=None,
        ssl_keyfile=None,
        root_path="",
        chat_template=None if server.chat_template is None else server.chat_template.absolute(),
    )
    jobs = dataclasses.replace(jobs, data_dir=(jobs.data_dir / _FOLDER).absolute())
    return partial(run_replica, model, server, jobs, engine)


async def _serve(
    routing: RouterServer, replicas: Replicas | RayReplicas, address: Address
) -> signal.Signals | None:
    """Serve until a signal. Returns: it, if it came before all were ready. Raises: ReplicaFailed."""
    from backfill.router.looks import EngineRefused

    async def announce_ready() -> None:
        while not (
            routing.engines and routing.engines.all and all(each.is_up for each in routing.engines.all)
        ):
            await asyncio.sleep(_READY_POLL_S)
        replicas.has_served()
        model = routing.engines.model
        assert model is not None, "an engine is up"
        where = f"{address.place} with {counted(len(replicas.urls), 'replica')}"
        place = f"{where}  (ready in {process_age_s():.1f} s)"
        what = f"Backfill serves {', '.join(model.models)} on {place}"
        announce(what, address, model.max_model_len)

    async def follow(old: str, new: str) -> None:
        """Let a replica that runs elsewhere join, once it answers."""
        while routing.engines is not None:
            try:
                await routing.engines.join(new)
                break
            except EngineRefused:
                await asyncio.sleep(_REJOIN_S)
        if routing.engines is not None:
            routing.engines.leave(old)

    keeping = asyncio.create_task(replicas.run(follow))
    serving = asyncio.create_task(routing.run(address.listener))
    announcing = asyncio.create_task(announce_ready())
    try:
        await asyncio.wait({keeping, serving}, return_when=asyncio.FIRST_COMPLETED)
        routing.stop()
        if keeping.done():
            keeping.result()
        stopped_by = await serving
        return stopped_by or (None if announcing.done() else signal.SIGTERM)
    finally:
        for task in (announcing, keeping):
            task.cancel()
        await asyncio.gather(announcing, keeping, serving, return_exceptions=True)


def _processes(
    server_of: _ServerOf, engine: EngineConfig, num_replicas: int, engine_key: str | None
) -> Replicas:
    """On this machine, whose devices and threads they divide. Raises: ConfigError."""
    from backfill.execution.machine import available_processors
    from backfill.router.replicas import ReplicaProcess, Replicas

    gpus = _gpus(engine.device, num_replicas, engine.num_ranks)
    threads = max(engine.num_ranks, (engine.threads or available_processors()) // num_replicas)
    target = server_of(dataclasses.replace(engine, threads=threads), engine_key)
    return Replicas(
        [ReplicaProcess(number, target, gpus[number] if gpus else {}) for number in range(num_replicas)]
    )


def _actors(server_of: _ServerOf, engine: EngineConfig, num_replicas: int, engine_key: str) -> RayReplicas:
    """On the nodes that Ray chooses. Raises: BackfillError without Ray."""
    if not sys.stderr.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # Ray colours the names of actors in a file, too
    # Lines of replicas differ by the number alone, and Ray would show one of them.
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    from backfill.parallel import require_ray

    require_ray()
    from backfill.ray.replicas import RayReplicas

    profile = None if engine.profile_path is None else Path(engine.profile_path).absolute()

    num_stages = engine.pipeline_parallel_size

    def target_of(bundle: Bundle) -> Callable[[ReplicaPlace], None]:
        own = dataclasses.replace(
            engine,
            threads=bundle.threads * num_stages,
            device="cuda" if bundle.num_gpus else "cpu",
            profile=profile,
            # Ranks of one stage are on the replica's own node.
            executor="ray" if num_stages > 1 else "process",
        )
        return server_of(own, engine_key)

    uses_gpus = None if engine.device == "auto" else engine.device == "cuda"
    return RayReplicas(
        num_replicas, engine.threads, uses_gpus, target_of, engine.tensor_parallel_size, num_stages
    )


def _gpus(device: str, num_replicas: int, num_ranks: int) -> list[Mapping[str, str]]:
    """Variables that give each replica a GPU a rank; none on a machine without any. Raises: ConfigError."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        drivers = Path("/proc/driver/nvidia/gpus")
        names = [str(number) for number, _ in enumerate(drivers.iterdir())] if drivers.is_dir() else []
    else:
        names = [name for name in visible.split(",") if name.strip()]
    if device == "cpu" or not names:
        return []
    num_needed = num_replicas * num_ranks
    if len(names) < num_needed:
        raise ConfigError(
            f"{num_replicas} needs {num_needed} GPUs, and {len(names)} are visible.",
            field="data_parallel_size",
        )
    return [
        {"CUDA_VISIBLE_DEVICES": ",".join(names[first : first + num_ranks])}
        for first in range(0, num_needed, num_ranks)
    ]
