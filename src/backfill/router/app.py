"""The router's ASGI application: engines' routes are passed on, the others are its own."""

from __future__ import annotations

import hmac
from contextlib import suppress
from dataclasses import dataclass

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from backfill.core.clock import Clock
from backfill.core.errors import ConfigError, RequestError
from backfill.http.app import add_checks, build_status_router, new_app, unhealthy
from backfill.http.bodies import BodyBudget, json_body
from backfill.http.config import ServerConfig
from backfill.http.errors import Forbidden, InvalidApiKey, Unavailable
from backfill.http.keys import ApiKeys, sent_key
from backfill.http.middleware import ADMIN_PATH, HttpMiddleware, RequestIdMiddleware
from backfill.jobs.errors import Conflict, NotFound
from backfill.jobs.manager import JobManager
from backfill.protocol.parsing import parse_body
from backfill.protocol.shapes import Json
from backfill.router.config import RouterConfig, engine_url
from backfill.router.engine import Engine
from backfill.router.engines import Engines
from backfill.router.looks import EngineRefused
from backfill.router.metrics import RouterMetrics
from backfill.router.proxy import NO_ENGINES, Proxy

_GENERATION_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})
_FORWARDED_PATHS = frozenset({"/v1/models", "/tokenize", "/detokenize"})
_MODEL_PREFIX = "/v1/models/"
_DOTS = frozenset({".", ".."})  # a client or proxy on the way to the engine would make another path of them
_MAX_ADMIN_BYTES = 64 << 10


class _JoinRequest(BaseModel):
    url: str


@dataclass(slots=True)
class RouterState:
    """Shared by all routes. Its event loop owns it."""

    server_config: ServerConfig
    config: RouterConfig
    engines: Engines
    proxy: Proxy
    metrics: RouterMetrics
    clock: Clock
    bodies: BodyBudget
    api_keys: ApiKeys | None = None  # None if requests need no key
    jobs: JobManager | None = None  # None if the Batch API is switched off
    is_draining: bool = False

    def ready_jobs(self) -> JobManager:
        """Raises: Unavailable."""
        if self.is_draining or self.jobs is None:
            raise Unavailable("The router is shutting down. Please retry.")
        return self.jobs


@dataclass
class ProxyMiddleware(HttpMiddleware):
    """Passes on the requests that engines answer."""

    state: RouterState

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        proxy = self.state.proxy
        if path in _GENERATION_PATHS and scope["method"] == "POST":
            handle = proxy.generate
        elif path in _FORWARDED_PATHS or _is_of_model(path):
            handle = proxy.forward
        else:
            await self.app(scope, receive, send)
            return
        if self.state.is_draining:
            raise Unavailable("The router is shutting down. Please retry.")
        with suppress(ClientDisconnect, OSError):
            await handle(scope, receive, send)


def _is_of_model(path: str) -> bool:
    return path.startswith(_MODEL_PREFIX) and _DOTS.isdisjoint(path.split("/"))


def create_router_app(state: RouterState) -> ASGIApp:
    status = build_status_router(lambda: _health(state), lambda: state.metrics.registry)
    app = new_app("Backfill router", (status, _engine_routes(state)), state, state.server_config.root_path)
    app.add_middleware(ProxyMiddleware, state=state)
    add_checks(app, state.server_config, state.api_keys)
    app.add_middleware(RequestIdMiddleware, clock=state.clock)
    return app


def _health(state: RouterState) -> Response:
    """200 if an engine accepts requests, else 503."""
    if state.is_draining:
        return unhealthy("shutting down")
    if state.engines.all_have_left:
        return unhealthy(NO_ENGINES)
    if not any(engine.is_up for engine in state.engines.all):
        return unhealthy("no engine is up")
    return Response(status_code=200)


def _engine_routes(state: RouterState) -> APIRouter:
    router = APIRouter()

    @router.get("/load")
    async def load() -> Json:
        """The number of requests and lines that engines have of this router."""
        return {"server_load": sum(engine.num_in_flight for engine in state.engines.all)}

    def check_admin(request: Request) -> None:
        known, sent = state.config.admin_key, sent_key(request.headers)
        if known is not None:
            if sent is None or not hmac.compare_digest(sent.encode(), known.encode()):
                raise InvalidApiKey("Engines are shown to, and changed by, the key of --admin-key alone.")
        elif not state.config.asks_for_no_admin_key(state.server_config):
            raise Forbidden("Engines are shown and changed where the router was started with --admin-key.")

    @router.get(ADMIN_PATH)
    async def engines(request: Request) -> Json:
        """The engines, and what the router knows of each."""
        check_admin(request)
        return {"object": "list", "data": [_engine_body(state, engine) for engine in state.engines.all]}

    @router.post(ADMIN_PATH)
    async def join(request: Request) -> Json:
        """Add the engine whose ``url`` the JSON body names. It gets requests as soon as it is ready."""
        check_admin(request)
        async with json_body(request, state.bodies, _MAX_ADMIN_BYTES) as body:
            url = _checked(parse_body(_JoinRequest, body.raw).url)
        try:
            return _engine_body(state, await state.engines.join(url))
        except EngineRefused as error:
            raise Conflict(str(error)) from None

    @router.delete(ADMIN_PATH)
    async def leave(request: Request, url: str = "") -> Json:
        """Send the engine of the query parameter ``url`` no more requests; those that it has end."""
        check_admin(request)
        engine = state.engines.leave(_checked(url))
        if engine is None:
            raise NotFound(f"There is no engine {url[:200]!r}; /router/engines lists them.")
        return _engine_body(state, engine)

    return router


def _checked(url: str) -> str:
    """Raises: RequestError for what cannot be the URL of an engine."""
    try:
        engine_url(url)
    except ConfigError as error:
        raise RequestError(str(error).replace("`engines`", "url"), param="url") from None
    return url


def _engine_body(state: RouterState, engine: Engine) -> Json:
    replica = engine.replica
    return {
        "url": engine.url,
        "object": "engine",
        "status": "up" if engine.is_up else "leaving" if engine.is_leaving else "down",
        "phase": engine.state.phase,
        "models": list(engine.state.models),
        "num_in_flight": engine.num_in_flight,
        "num_lines": 0 if replica is None else replica.state.num_lines,
        "num_online": 0 if replica is None else replica.num_online,
        "predicted_wait_s": None if replica is None else replica.wait_s(state.clock.now_s()),
        "num_lost": state.engines.num_lost.get(engine.url, 0),
    }
