"""The ASGI application."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from fastapi import APIRouter, FastAPI
from fastapi.responses import HTMLResponse
from starlette.middleware.cors import CORSMiddleware

from backfill import __version__
from backfill.api.batches import build_batches_router
from backfill.api.bodies import HasJobs
from backfill.api.config import ServerConfig
from backfill.api.docs_page import HEADERS as DOCS_HEADERS
from backfill.api.docs_page import docs_page
from backfill.api.errors import install_error_handlers
from backfill.api.files import build_files_router
from backfill.api.keys import ApiKeys
from backfill.api.middleware import (
    ApiKeyMiddleware,
    CountingMiddleware,
    ErrorMiddleware,
    RequestIdMiddleware,
)
from backfill.api.openapi import openapi_document
from backfill.api.request_head import RequestHeadMiddleware
from backfill.api.routes import build_routers, build_unsupported_router
from backfill.api.state import ServerState

logger = logging.getLogger(__name__)

_ANY_PAGE = (
    "--allowed-origins * without --api-key: any web page in a browser that can reach this server may use it, "
    "and read and delete its files and batches"
)
_CORS_METHODS = ("GET", "HEAD", "POST", "DELETE")
_CORS_HEADERS = ("retry-after", "x-backfill-warning", "x-request-id", "x-should-retry")


def create_app(state: ServerState) -> FastAPI:
    """All routes and middleware around ``state``. The caller starts the engine."""
    app = new_app("Backfill", build_routers(state), state)
    add_checks(app, state.server_config, state.api_keys)
    app.add_middleware(CountingMiddleware, state=state)
    app.add_middleware(RequestIdMiddleware, clock=state.clock)
    return app


def new_app(title: str, routers: Sequence[APIRouter], state: HasJobs) -> FastAPI:
    """An application with these routes, those of files and batches where there are any, and its documents."""
    # FastAPI's own pages load scripts from another host.
    app = FastAPI(title=title, version=__version__, docs_url=None, redoc_url=None)
    install_error_handlers(app)
    for router in routers:
        app.include_router(router)
    if state.jobs is not None:
        app.include_router(build_files_router(state))
        app.include_router(build_batches_router(state))
    app.include_router(build_unsupported_router())
    app.openapi = lambda: openapi_document(app)  # type: ignore[method-assign]

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(docs_page(app.openapi()), headers=DOCS_HEADERS)

    return app


def add_checks(app: FastAPI, config: ServerConfig, api_keys: ApiKeys | None) -> None:
    """Check keys and heads of requests, and respond to what no route catches."""
    if api_keys is not None:
        app.add_middleware(ApiKeyMiddleware, keys=api_keys)
    app.add_middleware(RequestHeadMiddleware, config=config)
    app.add_middleware(ErrorMiddleware)
    if "*" in config.allowed_origins and api_keys is None:
        logger.warning(_ANY_PAGE)
    if config.allowed_origins:
        # Outside the checks: a preflight carries no key, and a page may read errors too.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.known_origins,
            allow_methods=_CORS_METHODS,
            allow_headers=("*",),
            expose_headers=_CORS_HEADERS,
            allow_private_network=True,
        )
