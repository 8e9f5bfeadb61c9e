"""Uvicorn with our connections; what a server's process and a router's do from their start to their end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from backfill.core.clock import Clock
from backfill.http.config import ServerConfig
from backfill.http.connection import ConnectionLimits, LimitedHttpProtocol
from backfill.http.keys import ApiKeys

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 8192
_MAX_OPEN_FILES = 1 << 20  # where the system sets no limit
_CLOSE_CONNECTIONS_S = 2
_WHOLE_BODY_FACTOR = 10  # of the time that a body may pause
_DRAIN_POLL_S = 0.05


class HttpServer(uvicorn.Server):
    """Uvicorn with connection limits and without its signal handlers: ``serving`` closes the connections."""

    def __init__(
        self,
        app: object,
        limits: ConnectionLimits,
        clock: Clock | None = None,
        *,
        certificate: tuple[Path, Path | None] | None = None,
    ) -> None:
        certfile, keyfile = certificate or (None, None)
        super().__init__(
            uvicorn.Config(
                app,  # type: ignore[arg-type]
                ssl_certfile=certfile,
                ssl_keyfile=keyfile,
                http=partial(LimitedHttpProtocol, limits=limits, clock=clock),  # type: ignore[arg-type]
                ws="none",
                access_log=False,
                log_config=None,
                log_level="warning",
                timeout_graceful_shutdown=_CLOSE_CONNECTIONS_S,
                server_header=False,
                lifespan="off",
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serving(
    app: ASGIApp, config: ServerConfig, listener: socket.socket, clock: Clock, api_keys: ApiKeys | None
) -> AsyncGenerator[asyncio.Task[None], None]:
    """Answer requests until the block is left, and read the file of keys again when it changes.

    Yields: a task, which ends within the block only if the HTTP server does.
    """
    limits = connection_limits(config, raise_open_files_limit())
    http = HttpServer(app, limits, clock, certificate=config.certificate)
    task = asyncio.create_task(http.serve(sockets=[listener]))
    with contextlib.nullcontext() if api_keys is None else api_keys.watched():
        try:
            yield task
        finally:
            http.should_exit = True
            await task


class StopSignals:
    """The first SIGINT or SIGTERM asks the process to stop, a second one ends it at once.

    Attributes:
        asked: set by the first signal, or by whoever else wants a stop.
        first: the first signal.

    Args:
        before_exit: called before the process ends at once.
    """

    def __init__(self, before_exit: Callable[[], None]) -> None:
        self.asked = asyncio.Event()
        self.first: signal.Signals | None = None
        self._before_exit = before_exit

    def catch(self) -> None:
        """From now on, in the running event loop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)

    async def wait(self, *others: asyncio.Future[Any]) -> None:
        """Return when a stop is asked for, or one of the others has ended."""
        asked = asyncio.ensure_future(self.asked.wait())
        try:
            await asyncio.wait({asked, *others}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()

    def _on_signal(self, number: signal.Signals) -> None:
        if self.asked.is_set():
            logger.warning("stopping now")
            self._before_exit()
            os._exit(1)
        self.first = number
        self.asked.set()


async def until_none_is_open(num_open: Callable[[], int], timeout_s: float) -> None:
    """Wait until requests that run have ended, at most ``timeout_s``."""
    deadline_at_s = time.monotonic() + timeout_s
    while num_open() > 0 and time.monotonic() < deadline_at_s:
        await asyncio.sleep(_DRAIN_POLL_S)


def connection_limits(config: ServerConfig, num_open_files: int) -> ConnectionLimits:
    return ConnectionLimits(
        max_connections=config.max_connections or default_max_connections(num_open_files),
        head_timeout_s=config.head_timeout,
        body_timeout_s=config.body_timeout,
        whole_body_timeout_s=_WHOLE_BODY_FACTOR * config.body_timeout,
        write_timeout_s=config.write_timeout,
    )


def raise_open_files_limit() -> int:
    """Raise the soft limit of open files to the hard limit; returns the limit in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    asked = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < asked:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (asked, hard))
        except (OSError, ValueError):  # some systems allow less than the hard limit
            return soft
    return asked


def default_max_connections(num_open_files: int) -> int:
    """Three quarters of the descriptors, at most 8192; files, uploads and the engine need the rest."""
    return max(1, min(MAX_CONNECTIONS, num_open_files * 3 // 4))
