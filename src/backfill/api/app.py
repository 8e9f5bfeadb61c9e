"""The ASGI application of a server."""

from __future__ import annotations

import time
from dataclasses import dataclass

from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send

from backfill.api.routes import build_routers
from backfill.api.state import ServerState
from backfill.http.app import add_checks, new_app
from backfill.http.middleware import HttpMiddleware, RequestIdMiddleware

_UNCOUNTED_PATHS = frozenset({"/health", "/health/live", "/ping", "/metrics"})


def create_app(state: ServerState) -> FastAPI:
    """All routes and middleware around ``state``. The caller starts the engine."""
    app = new_app("Backfill", build_routers(state), state)
    add_checks(app, state.server_config, state.api_keys)
    app.add_middleware(CountingMiddleware, state=state)
    app.add_middleware(RequestIdMiddleware, clock=state.clock)
    return app


@dataclass
class CountingMiddleware(HttpMiddleware):
    """Counts HTTP requests and their duration by route."""

    excluded_paths = _UNCOUNTED_PATHS
    state: ServerState

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 499  # the client left before the response began
        started_at_s = time.monotonic()

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_and_note)
        finally:
            if self.state.metrics is not None:
                handler = getattr(scope.get("route"), "path", "none")  # unknown paths share a label
                duration_s = time.monotonic() - started_at_s
                self.state.metrics.http.on_request(scope["method"], handler, status, duration_s)
