"""The HTTP routes: parse, hand to the service, answer."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from backfill import __version__
from backfill.api.bodies import json_body, peek
from backfill.api.openapi import answers, takes_json
from backfill.api.state import Phase, ServerState
from backfill.api.streaming import EventStream, WholeResponse
from backfill.core.request import ServiceClass
from backfill.protocol.chat import ChatCompletionRequest
from backfill.protocol.completion import CompletionRequest
from backfill.protocol.generation_fields import REQUEST_HEADERS
from backfill.protocol.preparer import RequestContext, RequestPreparer, TextEndpoint
from backfill.protocol.requests import GenerationEndpoint
from backfill.protocol.responses import Json
from backfill.protocol.tokenization import DetokenizeRequest, TokenizeRequest


def build_router(state: ServerState) -> APIRouter:
    """All routes of a server, bound to its state."""
    router = APIRouter()

    generates = answers("application/json", "text/event-stream")

    @router.post("/v1/chat/completions", openapi_extra=takes_json(ChatCompletionRequest), responses=generates)
    async def chat_completions(request: Request) -> Response:
        return await _generate(request, state, "/v1/chat/completions")

    @router.post("/v1/completions", openapi_extra=takes_json(CompletionRequest), responses=generates)
    async def completions(request: Request) -> Response:
        return await _generate(request, state, "/v1/completions")

    @router.get("/v1/models")
    async def models() -> Json:
        preparer = state.ready_preparer()
        return {"object": "list", "data": [_model_card(preparer, name) for name in preparer.model.names]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Json:
        preparer = state.ready_preparer()
        preparer.check_model(name)
        return _model_card(preparer, name)

    @router.post("/tokenize", openapi_extra=takes_json(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        return await _answer_text(request, state, "/tokenize")

    @router.post("/detokenize", openapi_extra=takes_json(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        return await _answer_text(request, state, "/detokenize")

    @router.get("/health", response_class=Response)
    async def health() -> Response:
        if state.phase is Phase.READY:
            if state.admission.is_offline_suspended:
                return JSONResponse({"status": "offline work is suspended: the engine kept dying"})
            return Response(status_code=200)
        return JSONResponse({"status": state.phase.value}, 503, {"Retry-After": "2"})

    @router.get("/ping", response_class=Response)
    async def ping() -> Response:
        return await health()

    @router.get("/health/live", response_class=Response)
    async def live() -> Response:
        return Response(status_code=200)

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        body = b"" if state.metrics is None else state.metrics.expose()
        return PlainTextResponse(body, media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.get("/version")
    async def version() -> Json:
        return {"version": __version__}

    @router.get("/load")
    async def load() -> Json:
        return {"server_load": state.admission.num_open}

    return router


async def _generate(request: Request, state: ServerState, endpoint: GenerationEndpoint) -> Response:
    """Take a place, prepare, run. What finds no room is refused before it costs anything."""
    service = state.ready_service()
    state.admission.check_room()
    async with json_body(request, state.bodies, state.server_config.max_body_bytes) as body:
        service_class, num_choices = peek(body.raw)
        place = state.admission.take(service_class, num_choices)
        try:
            if service_class is ServiceClass.OFFLINE:
                body.held.become_offline()
            generation = await state.prepare(
                endpoint, body.raw, _context_of(request), service_class, request.receive
            )
            place.resize(generation.request.num_choices, generation.request.service_class)
            arrived_at_s: float = request.state.arrived_at_s
            waiting = state.shed_or_wait(generation, arrived_at_s)
        except BaseException:
            place.release()
            raise
    if state.metrics is not None:
        state.metrics.requests.on_accepted(generation.request.service_class, generation.request.num_choices)
    state.num_unanswered += 1
    if generation.warning is not None:
        state.field_warnings.add(generation.warning)

    def on_end() -> None:
        place.release()
        if waiting is not None:
            waiting.release()
        state.num_unanswered -= 1

    on_first_token = None if waiting is None else waiting.on_first_token
    arguments = generation, arrived_at_s, place.release_choice, on_first_token
    if generation.streams:
        return EventStream(
            service.run_stream(*arguments),
            on_end,
            keep_alive_s=state.server_config.keep_alive_interval_s,
            warning=generation.warning,
        )
    return WholeResponse(service.run_whole(*arguments), on_end, warning=generation.warning)


def _context_of(request: Request) -> RequestContext:
    headers = {name: request.headers[name] for name in REQUEST_HEADERS if name in request.headers}
    return RequestContext(request_id=request.state.request_id, headers=headers)


async def _answer_text(request: Request, state: ServerState, endpoint: TextEndpoint) -> Response:
    state.ready_service()
    async with json_body(request, state.bodies, state.server_config.max_body_bytes) as body:
        text = await state.answer_text(endpoint, body.raw, request.receive)
        return Response(text, media_type="application/json")


def _model_card(preparer: RequestPreparer, name: str) -> Json:
    return {
        "id": name,
        "object": "model",
        "created": preparer.model.created,
        "owned_by": "backfill",
        "root": preparer.model.root,
        "parent": None,
        "max_model_len": preparer.engine.info.max_model_len,
    }
