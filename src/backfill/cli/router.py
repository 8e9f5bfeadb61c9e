"""``backfill router``: one address for several servers of one model."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING

from backfill.cli.command import ADDRESS_SECTION, BATCHES_SECTION, VARIABLES, command
from backfill.cli.interrupts import LOADING, interruptible
from backfill.cli.startup import (
    announce,
    check_storage,
    configure_logging,
    counted,
    jobs_of,
    listen,
    run_server,
)
from backfill.http.config import ServerConfig
from backfill.jobs.config import JobsConfig
from backfill.router.config import RouterConfig

if TYPE_CHECKING:
    from backfill.router.engines import Engines


def router(
    config: RouterConfig,
    server: ServerConfig = ServerConfig(port=8080),  # noqa: B008  # frozen
    jobs: JobsConfig = JobsConfig(data_dir=Path("~/.local/share/backfill-router")),  # noqa: B008  # frozen
) -> None:
    """Divide requests and batches among ENGINES, which are Backfill servers of one model.

    Exit status: 0 ended by a signal; 1 it cannot serve, or a second signal ended it at once; 130 or 143 ended
    by SIGINT or SIGTERM before the engines had joined.
    """
    configure_logging(server.log_level, "router")
    config.check_door(server)
    from backfill.router.server import RouterServer

    jobs = jobs_of(server, jobs).for_several_servers()
    address = listen(server)
    if jobs.batch_api:
        with interruptible(LOADING):
            check_storage(jobs, address.url)  # engines may be waited for

    def on_ready(engines: Engines) -> None:
        names = ", ".join(engines.model.models) if engines.model is not None else ""
        num_up = sum(engine.is_up for engine in engines.all)
        max_model_len = 0 if engines.model is None else engines.model.max_model_len
        where = f"{address.place} to {counted(len(engines.all), 'engine')}, {num_up} ready"
        announce(f"Backfill routes {names} on {where}", address, max_model_len)

    async def run() -> signal.Signals | None:
        routing = RouterServer(
            server,
            config,
            url=address.url,
            api_keys=address.keys,
            jobs_config=jobs if jobs.batch_api else None,
            on_ready=on_ready,
        )
        return await routing.run(address.listener)

    run_server(run())


app = command(
    router,
    {
        "Engines": "engines policy engine_api_key admin_key poll_interval engine_timeout retry_timeout",
        "Address": ADDRESS_SECTION,
        "Server": "data_dir api_key api_key_file offline_header shutdown_timeout log_level",
        "Limits": "max_body_bytes max_inflight_body_bytes max_connections head_timeout body_timeout "
        "write_timeout",
        "Batches": BATCHES_SECTION,
    },
    variables=VARIABLES,
    many="engines",
)
