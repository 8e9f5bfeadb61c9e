"""An ASGI application with the routes and checks that a server and a router have."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CollectorRegistry
from starlette.middleware.cors import CORSMiddleware

from backfill import __version__
from backfill.http.batches import build_batches_router
from backfill.http.config import ServerConfig
from backfill.http.error_responses import install_error_handlers
from backfill.http.files import HasJobs, build_files_router
from backfill.http.keys import ApiKeys
from backfill.http.metrics import exposed
from backfill.http.middleware import ApiKeyMiddleware, ErrorMiddleware
from backfill.http.openapi import DOCS_HEADERS, ERRORS, answers, docs_page, openapi_document
from backfill.http.request_head import RequestHeadMiddleware
from backfill.protocol.responses import error_body
from backfill.protocol.shapes import Json

logger = logging.getLogger(__name__)

_ANY_PAGE = (
    "--allowed-origins * without --api-key: any web page in a browser that can reach this server may use it, "
    "and read and delete its files and batches"
)
_CORS_METHODS = ("GET", "HEAD", "POST", "DELETE")
_CORS_HEADERS = (
    "retry-after",
    "x-backfill-warning",
    "x-ratelimit-limit-requests",
    "x-ratelimit-limit-tokens",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-remaining-tokens",
    "x-ratelimit-reset-requests",
    "x-request-id",
    "x-should-retry",
)
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Endpoints of OpenAI's API that this server does not support: 501, since a 404 suggests a wrong URL.
UNSUPPORTED = (
    "assistants",
    "audio",
    "containers",
    "conversations",
    "embeddings",
    "evals",
    "fine_tuning",
    "images",
    "messages",
    "moderations",
    "realtime",
    "responses",
    "threads",
    "uploads",
    "vector_stores",
    "videos",
)
_INSTEAD = {
    **dict.fromkeys(("assistants", "messages", "responses"), "POST /v1/chat/completions"),
    "messages/batches": "POST /v1/batches",
    "messages/count_tokens": "POST /tokenize",
}
INSTEAD_OF_OLLAMA = {
    "chat": "POST /v1/chat/completions",
    "generate": "POST /v1/completions",
    "ps": "GET /v1/models",
    "show": "GET /v1/models",
    "tags": "GET /v1/models",
    "version": "GET /version",
}


def new_app(title: str, routers: Sequence[APIRouter], state: HasJobs, root_path: str = "") -> FastAPI:
    """An application with these routes, those of files and batches where there are any, and its documents."""
    # FastAPI's own pages load scripts from another host.
    servers = [{"url": root_path}] if root_path else None
    app = FastAPI(
        title=title, version=__version__, servers=servers, docs_url=None, redoc_url=None, responses=ERRORS
    )
    install_error_handlers(app)
    for router in routers:
        app.include_router(router)
    if state.jobs is not None:
        app.include_router(build_files_router(state))
        app.include_router(build_batches_router(state))
    app.include_router(_unsupported_router())
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


def build_status_router(
    health: Callable[[], Response], registry: Callable[[], CollectorRegistry | None]
) -> APIRouter:
    """Answers with what ``health`` returns, and the metrics of ``registry``; none before there is one."""
    router = APIRouter()

    @router.get("/health", response_class=Response)
    async def healthy() -> Response:
        """200 if requests are accepted, else 503."""
        return health()

    @router.get("/ping", response_class=Response)
    async def ping() -> Response:
        """The same as /health."""
        return health()

    @router.get("/health/live", response_class=Response)
    async def live() -> Response:
        """200 while the process runs."""
        return Response(status_code=200)

    @router.get("/metrics", response_class=Response, responses=answers("text/plain"))
    async def metrics(request: Request) -> Response:
        """Metrics of this process as Prometheus text; with ``name[]``, the samples of these names."""
        names, known = request.query_params.getlist("name[]"), registry()
        return Response(b"" if known is None else exposed(known, names), media_type=_METRICS_TYPE)

    @router.get("/version")
    async def version() -> Json:
        """The version of Backfill."""
        return {"version": __version__}

    return router


def unhealthy(status: str) -> JSONResponse:
    """The answer to /health of a process that accepts no requests now."""
    return JSONResponse({"status": status}, 503, {"Retry-After": "2"})


def _unsupported_router() -> APIRouter:
    router = APIRouter(include_in_schema=False)

    async def refuse(request: Request) -> JSONResponse:
        path = request.url.path
        first, *rest = path.removeprefix("/v1/").split("/")
        instead = _INSTEAD.get("/".join((first, *rest[:1]))) or _INSTEAD.get(first)
        hint = f" Use {instead}." if instead else ""
        body = error_body(f"{path} is not supported by this server.{hint}", "server_error")
        return JSONResponse(body, 501, {"x-should-retry": "false"})

    async def refuse_ollama(request: Request) -> JSONResponse:
        instead = INSTEAD_OF_OLLAMA[request.url.path.rpartition("/")[2]]
        text = f"Ollama's API is not supported by this server. Use OpenAI's: {instead}"
        return JSONResponse({"error": text}, 501)  # as Ollama's clients read errors

    for name in INSTEAD_OF_OLLAMA:
        router.add_api_route(f"/api/{name}", refuse_ollama, methods=["GET", "POST"])
    for name in UNSUPPORTED:
        for path in (f"/v1/{name}", f"/v1/{name}/{{rest:path}}"):
            router.add_api_route(path, refuse, methods=["GET", "POST", "DELETE"])
    return router
