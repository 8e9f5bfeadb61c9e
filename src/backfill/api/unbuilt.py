"""Endpoints of OpenAI's API that this server does not have: 501, where 404 would blame the client's URL."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from backfill.protocol.responses import error_body

UNBUILT = (
    "assistants",
    "audio",
    "containers",
    "conversations",
    "embeddings",
    "evals",
    "fine_tuning",
    "images",
    "moderations",
    "realtime",
    "responses",
    "threads",
    "uploads",
    "vector_stores",
    "videos",
)


def build_unbuilt_router() -> APIRouter:
    router = APIRouter(include_in_schema=False)

    async def refuse(request: Request) -> JSONResponse:
        body = error_body(f"{request.url.path} is not supported by this server.", "server_error")
        return JSONResponse(body, 501, {"x-should-retry": "false"})

    for name in UNBUILT:
        for path in (f"/v1/{name}", f"/v1/{name}/{{rest:path}}"):
            router.add_api_route(path, refuse, methods=["GET", "POST", "DELETE"])
    return router
