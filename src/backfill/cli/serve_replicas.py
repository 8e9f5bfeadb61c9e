"""``backfill serve --data-parallel-size N``: a router in front of N servers, which it starts and ends."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from backfill.api.config import ServerConfig
from backfill.cli.interrupts import LOADING, exit_at_once, interruptible, take_from_loop
from backfill.cli.startup import bind, find_folder, run_in_loop
from backfill.core.config import EngineConfig
from backfill.core.errors import ConfigError
from backfill.engine.options import ModelOptions
from backfill.jobs.config import JobsConfig
from backfill.jobs.private_files import make_folder

if TYPE_CHECKING:
    from backfill.router.replicas import Replicas
    from backfill.router.server import RouterServer

_LOAD_S = 3600.0  # a replica that cannot load ends by itself
_READY_POLL_S = 0.05
_FOLDER = "replicas"


def serve_replicas(
    model: ModelOptions, server: ServerConfig, jobs: JobsConfig, engine: EngineConfig, num_replicas: int
) -> None:
    """As ``serve``, with ``num_replicas`` servers of the same options behind ``server``'s address."""
    from backfill.api.keys import ApiKeys
    from backfill.router.config import RouterConfig
    from backfill.router.server import RouterServer

    started_at_s = time.monotonic()
    keys = ApiKeys(server.api_key, server.api_key_file) if server.asks_for_keys else None
    listener = bind(server.host, server.port)
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    engine_key = None if keys is None else secrets.token_urlsafe(32)
    replicas = _replicas(engine, jobs.data_dir / _FOLDER, num_replicas, engine_key)
    with interruptible(LOADING):
        find_folder(model)  # once, before all of them do

    async def run() -> signal.Signals | None:
        routing = RouterServer(
            server,
            RouterConfig(engines=replicas.urls, engine_api_key=engine_key, join_timeout=_LOAD_S),
            url=url,
            api_keys=keys,
            jobs_config=jobs if jobs.batch_api else None,
            on_second_signal=replicas.kill,
        )
        try:
            return await _serve(routing, replicas, listener, url, started_at_s)
        finally:
            await replicas.end()
            take_from_loop(asyncio.get_running_loop())

    stopped_by = run_in_loop(run())
    if stopped_by is not None:
        print(f"backfill: {LOADING}", file=sys.stderr)
        raise SystemExit(128 + stopped_by)


async def _serve(
    routing: RouterServer, replicas: Replicas, listener: socket.socket, url: str, started_at_s: float
) -> signal.Signals | None:
    """Serve until a signal. Returns: it, if it came before all were ready. Raises: ReplicaFailed."""

    async def announce() -> None:
        while not (
            routing.engines and routing.engines.all and all(each.is_up for each in routing.engines.all)
        ):
            await asyncio.sleep(_READY_POLL_S)
        replicas.has_served()
        took_s = time.monotonic() - started_at_s
        names = ", ".join(routing.engines.model.models) if routing.engines.model else ""
        num = len(replicas.urls)
        print(
            f"\nBackfill serves {names} on {url} with {num} replicas  (ready in {took_s:.1f} s)", flush=True
        )

    replicas.start()
    keeping = asyncio.create_task(replicas.run())
    serving = asyncio.create_task(routing.run(listener))
    announcing = asyncio.create_task(announce())
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


def _replicas(engine: EngineConfig, folder: Path, num_replicas: int, engine_key: str | None) -> Replicas:
    """Servers with this command line's options, but for what differs between them. Raises: ConfigError."""
    from backfill.execution.machine import available_processors
    from backfill.router.replicas import ReplicaProcess, Replicas

    gpus = _gpus(engine.device, num_replicas)
    threads = max(1, (engine.threads or available_processors()) // num_replicas)
    key_options = [] if engine_key is None else ["--api-key-file", str(_write_key(folder, engine_key))]

    def arguments(number: int, port: int) -> list[str]:
        own = f"--data-parallel-size 1 --host 127.0.0.1 --port {port} --threads {threads} --no-batch-api"
        data_dir = str(folder / str(number))
        return [*sys.argv[1:], *own.split(), "--data-dir", data_dir, *key_options]

    return Replicas(
        [
            ReplicaProcess(number, run_replica, partial(arguments, number), gpus[number] if gpus else {})
            for number in range(num_replicas)
        ]
    )


def run_replica(arguments: list[str]) -> None:
    """Entry point of a replica's process, which ends with the router's."""
    from backfill.cli.main import main

    os.setsid()  # Ctrl-C is for the router, which ends its replicas itself
    signal.signal(signal.SIGTERM, exit_at_once)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # the router says what is served where
    sys.argv = ["backfill", *arguments]
    main()


def _gpus(device: str, num_replicas: int) -> list[Mapping[str, str]]:
    """Variables that give each replica a GPU; none on a machine without one. Raises: ConfigError."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        drivers = Path("/proc/driver/nvidia/gpus")
        names = [str(number) for number, _ in enumerate(drivers.iterdir())] if drivers.is_dir() else []
    else:
        names = [name for name in visible.split(",") if name.strip()]
    if device == "cpu" or not names:
        return []
    if len(names) < num_replicas:
        raise ConfigError(
            f"{num_replicas} needs as many GPUs, and {len(names)} are visible.", field="data_parallel_size"
        )
    return [{"CUDA_VISIBLE_DEVICES": name} for name in names[:num_replicas]]


def _write_key(folder: Path, key: str) -> Path:
    """The file of the key with which the router speaks for its clients. Raises: ConfigError."""
    path = folder / "router-key"
    try:
        make_folder(folder)
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"router={key}\n")
    except OSError as error:
        raise ConfigError(f"`data_dir` {folder} cannot be written: {error.strerror or error}.") from error
    return path
