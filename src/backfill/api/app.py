"""The ASGI application."""

from __future__ import annotations

from fastapi import FastAPI

from backfill import __version__
from backfill.api.batches import build_batches_router
from backfill.api.errors import install_error_handlers
from backfill.api.files import build_files_router
from backfill.api.middleware import ApiKeyMiddleware, CountingMiddleware, RequestIdMiddleware
from backfill.api.routes import build_router
from backfill.api.state import ServerState


def create_app(state: ServerState) -> FastAPI:
    """All routes and middleware around ``state``. Starting the engine is the caller's business."""
    app = FastAPI(title="Backfill", version=__version__)
    install_error_handlers(app)
    app.include_router(build_router(state))
    if state.jobs is not None:
        app.include_router(build_files_router(state))
        app.include_router(build_batches_router(state))
    if state.server_config.api_keys:
        app.add_middleware(ApiKeyMiddleware, keys=state.server_config.api_keys)
    app.add_middleware(CountingMiddleware, state=state)
    app.add_middleware(RequestIdMiddleware)
    return app
