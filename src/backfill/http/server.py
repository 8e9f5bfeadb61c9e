"""Uvicorn with our connections, and how many of them there may be."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from functools import partial

import uvicorn

from backfill.core.clock import Clock
from backfill.http.config import ServerConfig
from backfill.http.connection import ConnectionLimits, LimitedHttpProtocol

MAX_CONNECTIONS = 8192
_MAX_OPEN_FILES = 1 << 20  # where the system sets no limit
_CLOSE_CONNECTIONS_S = 2
_WHOLE_BODY_FACTOR = 10  # of the time that a body may pause


class HttpServer(uvicorn.Server):
    """Uvicorn with connection limits and without its signal handlers: ``Server`` closes the connections."""

    def __init__(self, app: object, limits: ConnectionLimits, clock: Clock | None = None) -> None:
        super().__init__(
            uvicorn.Config(
                app,  # type: ignore[arg-type]
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
