"""Endpoints of OpenAI's API that this server does not support: 501, since a 404 suggests a wrong URL."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from backfill.protocol.responses import error_body

UNSUPPORTED = (
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


def build_unsupported_router() -> APIRouter:
    router = APIRouter(include_in_schema=False)

    async def refuse(request: Request) -> JSONResponse:
        body = error_body(f"{request.url.path} is not supported by this server.", "server_error")
        return JSONResponse(body, 501, {"x-should-retry": "false"})

    for name in UNSUPPORTED:
        for path in (f"/v1/{name}", f"/v1/{name}/{{rest:path}}"):
            router.add_api_route(path, refuse, methods=["GET", "POST", "DELETE"])
    return router
