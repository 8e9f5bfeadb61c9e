"""The routes of a process's status, which a server and a router have."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from backfill import __version__
from backfill.protocol.responses import Json

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def build_status_router(health: Callable[[], Response], metrics: Callable[[], bytes]) -> APIRouter:
    """Answers with what ``health`` and ``metrics`` return."""
    router = APIRouter()

    @router.get("/health", response_class=Response)
    async def healthy() -> Response:
        """200 if requests are accepted, else 503."""
        return health()

    @router.get("/ping", response_class=Response)
    async def ping() -> Response:
        """The same as /health."""
        return health()

    @router.get("/health/live", response_class=Response)
    async def live() -> Response:
        """200 while the process runs."""
        return Response(status_code=200)

    @router.get("/metrics", response_class=PlainTextResponse)
    async def shown_metrics() -> Response:
        """Metrics of this process as Prometheus text."""
        return PlainTextResponse(metrics(), media_type=_METRICS_TYPE)

    @router.get("/version")
    async def version() -> Json:
        """The version of Backfill."""
        return {"version": __version__}

    return router


def unhealthy(status: str) -> JSONResponse:
    """The answer to /health of a process that accepts no requests now."""
    return JSONResponse({"status": status}, 503, {"Retry-After": "2"})
