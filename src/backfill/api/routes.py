"""The HTTP routes: parse, hand to the service, answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from backfill import __version__
from backfill.api.bodies import LARGE_BODY_BYTES, body_schema, read_json
from backfill.api.state import Phase, ServerState
from backfill.api.streaming import EventStream, WholeResponse
from backfill.core.errors import RequestError
from backfill.protocol.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationFields,
    TokenizeRequest,
)
from backfill.protocol.responses import Json
from backfill.protocol.service import CompletionService, Generation

GenerationBody = TypeVar("GenerationBody", bound=GenerationFields)


def build_router(state: ServerState) -> APIRouter:
    """All routes of a server, bound to its state."""
    router = APIRouter()
    max_body_bytes = state.server_config.max_body_bytes

    @router.post("/v1/chat/completions", openapi_extra=body_schema(ChatCompletionRequest))
    async def chat_completions(request: Request) -> Response:
        body = await read_json(request, ChatCompletionRequest, max_body_bytes)
        return await _respond(request, state, body, CompletionService.prepare_chat)

    @router.post("/v1/completions", openapi_extra=body_schema(CompletionRequest))
    async def completions(request: Request) -> Response:
        body = await read_json(request, CompletionRequest, max_body_bytes)
        return await _respond(request, state, body, CompletionService.prepare_completion)

    @router.get("/v1/models")
    async def models() -> Json:
        service = state.ready_service()
        return {"object": "list", "data": [_model_card(service, name) for name in service.model.names]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Json:
        service = state.ready_service()
        service.check_model(name)
        return _model_card(service, name)

    @router.post("/tokenize", openapi_extra=body_schema(TokenizeRequest))
    async def tokenize(request: Request) -> Json:
        body = await read_json(request, TokenizeRequest, max_body_bytes)
        service = state.ready_service()
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("Send either prompt or messages.", param="prompt")
        tokens = await asyncio.to_thread(_tokens_of, service, body)
        return {"count": len(tokens), "max_model_len": service.info.max_model_len, "tokens": tokens}

    @router.post("/detokenize", openapi_extra=body_schema(DetokenizeRequest))
    async def detokenize(request: Request) -> Json:
        body = await read_json(request, DetokenizeRequest, max_body_bytes)
        service = state.ready_service()
        service.check_model(body.model)
        vocab_size = service.info.vocab_size
        if not all(0 <= token_id < vocab_size for token_id in body.tokens):
            raise RequestError(f"tokens must be between 0 and {vocab_size - 1}.", param="tokens")
        return {"prompt": service.tokenizer.decode(body.tokens)}

    @router.get("/health")
    async def health() -> Response:
        if state.phase is Phase.READY:
            return Response(status_code=200)
        return JSONResponse({"status": state.phase.value}, 503, {"Retry-After": "2"})

    @router.get("/ping")
    async def ping() -> Response:
        return await health()

    @router.get("/health/live")
    async def live() -> Response:
        return Response(status_code=200)

    @router.get("/metrics")
    async def metrics() -> Response:
        body = b"" if state.metrics is None else state.metrics.expose()
        return PlainTextResponse(body, media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.get("/version")
    async def version() -> Json:
        return {"version": __version__}

    @router.get("/load")
    async def load() -> Json:
        return {"server_load": state.num_open}

    return router


def _tokens_of(service: CompletionService, body: TokenizeRequest) -> list[int]:
    if body.messages is not None:
        return service.encode_messages(body.messages, add_generation_prompt=body.add_generation_prompt)
    return service.tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens)


async def _respond(
    request: Request,
    state: ServerState,
    body: GenerationBody,
    prepare: Callable[[CompletionService, GenerationBody, str | None], Generation],
) -> Response:
    service = state.ready_service()
    if body.priority is None and "x-vllm-priority" in request.headers:
        body.priority = _priority_header(request.headers["x-vllm-priority"])
    body.take_slo_headers(request.headers)
    client_id = request.state.request_id
    if request.state.body_bytes > LARGE_BODY_BYTES:
        generation = await asyncio.to_thread(prepare, service, body, client_id)
    else:
        generation = prepare(service, body, client_id)
    num_choices = len(generation.requests)
    state.admit(body.service_class, num_choices)

    def on_end() -> None:
        state.release(num_choices)

    if generation.streams:
        return EventStream(
            service.run_stream(generation),
            on_end,
            keep_alive_s=state.server_config.keep_alive_interval_s,
        )
    return WholeResponse(service.run_whole(generation), on_end)


def _priority_header(value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise RequestError(
            f"X-Vllm-Priority must be an integer, got {value[:40]!r}.", param="priority"
        ) from None


def _model_card(service: CompletionService, name: str) -> Json:
    return {
        "id": name,
        "object": "model",
        "created": service.model.created,
        "owned_by": "backfill",
        "root": service.model.root,
        "parent": None,
        "max_model_len": service.info.max_model_len,
    }
