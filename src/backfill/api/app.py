"""The application of a server: the routes of generation, models, tokens and status, and its middleware."""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from backfill.api.open_request import open_request
from backfill.api.state import Phase, ServerState
from backfill.core.errors import RequestError
from backfill.http.app import add_checks, build_status_router, new_app, unhealthy
from backfill.http.bodies import is_routed, json_body, owner_of
from backfill.http.errors import RateLimited, Unavailable
from backfill.http.middleware import HttpMiddleware, RequestIdMiddleware
from backfill.http.openapi import answers, takes_json
from backfill.http.page import build_page_router
from backfill.http.streaming import EventStream, WholeResponse
from backfill.protocol.chat import ChatCompletionRequest, DetokenizeRequest, TokenizeRequest
from backfill.protocol.generation import CompletionRequest, GenerationEndpoint
from backfill.protocol.preparer import RequestPreparer, TextEndpoint
from backfill.protocol.shapes import Json

_UNCOUNTED_PATHS = frozenset({"/health", "/health/live", "/ping", "/metrics"})


def create_app(state: ServerState) -> FastAPI:
    """All routes and middleware around ``state``. The caller starts the engine."""
    router = APIRouter()
    _add_model_routes(router, state)
    _add_load_routes(router, state)
    status = build_status_router(
        lambda: _health(state), lambda: None if state.metrics is None else state.metrics.registry
    )
    routers = (router, status, build_page_router())
    app = new_app("Backfill", routers, state, state.server_config.root_path)
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


def _add_model_routes(router: APIRouter, state: ServerState) -> None:
    generates = answers("application/json", "text/event-stream")

    @router.post("/v1/chat/completions", openapi_extra=takes_json(ChatCompletionRequest), responses=generates)
    async def chat_completions(request: Request) -> Response:
        """Generate the next message of a chat."""
        return await _generate(request, state, "/v1/chat/completions")

    @router.post("/v1/completions", openapi_extra=takes_json(CompletionRequest), responses=generates)
    async def completions(request: Request) -> Response:
        """Continue a prompt."""
        return await _generate(request, state, "/v1/completions")

    @router.get("/v1/models")
    async def models() -> Json:
        """List the names of the served model."""
        preparer = state.ready_preparer()
        return {"object": "list", "data": [_model_card(preparer, name) for name in preparer.model.names]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Json:
        """Retrieve the model by one of its names."""
        preparer = state.ready_preparer()
        preparer.check_model(name)
        return _model_card(preparer, name)

    @router.post("/tokenize", openapi_extra=takes_json(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """Turn a prompt or a chat into token ids."""
        return await _answer_text(request, state, "/tokenize")

    @router.post("/detokenize", openapi_extra=takes_json(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """Turn token ids into text."""
        return await _answer_text(request, state, "/detokenize")


def _add_load_routes(router: APIRouter, state: ServerState) -> None:
    @router.get("/state")
    async def replica_state() -> Response:
        """What a router wants to know: limits, load, and which model is served."""
        return Response(msgspec.json.encode(state.replica_state()), media_type="application/json")

    @router.get("/load")
    async def load() -> Json:
        """The number of open choices, running or waiting."""
        return {"server_load": state.admission.num_open}


def _health(state: ServerState) -> Response:
    if state.phase is not Phase.READY:
        return unhealthy(state.phase.value)
    if state.admission.is_offline_suspended:
        return JSONResponse({"status": "offline work is suspended: the engine kept dying"})
    return Response(status_code=200)


async def _generate(request: Request, state: ServerState, endpoint: GenerationEndpoint) -> Response:
    service = state.ready_service()
    try:
        opened = await open_request(state, endpoint, request)
    except (RateLimited, RequestError, Unavailable) as error:
        if isinstance(error, RateLimited) and state.metrics is not None:
            state.metrics.requests.on_rejected(error.service_class, error.reason)
        # A router asks another engine at once.
        if state.api_keys is not None and not is_routed(request):
            await state.limiter.delay(owner_of(request), error)
        raise
    generation = opened.generation
    arguments = generation, opened.arrived_at_s, opened
    if generation.streams:
        return EventStream(
            service.run_stream(*arguments, stalled_s=request.state.client_stalls.total_s),
            opened.close,
            keep_alive_s=state.server_config.sse_keep_alive_interval,
            warning=generation.warning,
        )
    return WholeResponse(service.run_whole(*arguments), opened.close, warning=generation.warning)


async def _answer_text(request: Request, state: ServerState, endpoint: TextEndpoint) -> Response:
    state.ready_service()
    async with json_body(request, state.bodies, state.server_config.max_body_bytes) as body:
        text = await state.answer_text(endpoint, body.raw, owner_of(request), request.receive)
        return Response(text, media_type="application/json")


def _model_card(preparer: RequestPreparer, name: str) -> Json:
    return {
        "id": name,
        "object": "model",
        "created": preparer.model.created,
        "owned_by": "backfill",
        "root": preparer.model.root,
        "parent": None,
        "max_model_len": preparer.engine_facts.info.max_model_len,
    }
