"""The ASGI application."""

from __future__ import annotations

from fastapi import FastAPI

from backfill import __version__
from backfill.api.batches import build_batches_router
from backfill.api.errors import install_error_handlers
from backfill.api.files import build_files_router
from backfill.api.middleware import ApiKeyMiddleware, CountingMiddleware, RequestIdMiddleware
from backfill.api.openapi import openapi_document
from backfill.api.request_head import RequestHeadMiddleware
from backfill.api.routes import build_router
from backfill.api.state import ServerState
from backfill.api.unbuilt import build_unbuilt_router


def create_app(state: ServerState) -> FastAPI:
    """All routes and middleware around ``state``. Starting the engine is the caller's business."""
    app = FastAPI(title="Backfill", version=__version__)
    install_error_handlers(app)
    app.include_router(build_router(state))
    if state.jobs is not None:
        app.include_router(build_files_router(state))
        app.include_router(build_batches_router(state))
    app.include_router(build_unbuilt_router())
    app.openapi = lambda: openapi_document(app)  # type: ignore[method-assign]
    if state.api_keys is not None:
        app.add_middleware(ApiKeyMiddleware, keys=state.api_keys)
    app.add_middleware(RequestHeadMiddleware, config=state.server_config)
    app.add_middleware(CountingMiddleware, state=state)
    app.add_middleware(RequestIdMiddleware)
    return app
