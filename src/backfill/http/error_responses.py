"""HTTP responses for exceptions, in OpenAI's shape. No message contains a local path or a traceback."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import Scope

from backfill.core.errors import BackfillError, RequestLost
from backfill.http.errors import (
    LOST_HEADER,
    MAX_RETRY_AFTER_S,
    BodyTooLarge,
    Forbidden,
    InvalidApiKey,
    OfflineUnavailable,
    RateLimited,
    Unavailable,
    UnsupportedEncoding,
)
from backfill.jobs.errors import Busy, Conflict, NotFound, StorageFull, TooLarge, TooMany, TooManyUploads
from backfill.protocol.responses import error_body, error_of

logger = logging.getLogger(__name__)

_LEAST_SIMILARITY = 0.8  # of a path to one that exists
_METHODS = ("DELETE", "GET", "HEAD", "POST")


@dataclass(frozen=True, slots=True)
class _ErrorResponse:
    """Status, OpenAI's ``type`` and ``code``, and headers, for one kind of exception."""

    status: int
    type: str = "invalid_request_error"
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


_RETRY_SOON = {"Retry-After": "2"}
_RETRY_LATE = {"Retry-After": str(MAX_RETRY_AFTER_S)}
_NO_RETRY = {"x-should-retry": "false"}
_UNAVAILABLE = _ErrorResponse(503, "service_unavailable_error", "server_is_overloaded", _RETRY_SOON)
_RESPONSES: Mapping[type[Exception], _ErrorResponse] = {
    # The limit may hold for hours: quick retries would not help.
    TooMany: _ErrorResponse(429, "rate_limit_error", "rate_limit_exceeded", _RETRY_LATE | _NO_RETRY),
    OfflineUnavailable: _ErrorResponse(429, "rate_limit_error", "resource_unavailable", _RETRY_SOON),
    TooManyUploads: _ErrorResponse(429, "rate_limit_error", "rate_limit_exceeded", _RETRY_SOON),
    Unavailable: _UNAVAILABLE,
    Busy: _UNAVAILABLE,
    NotFound: _ErrorResponse(404),
    # The official client retries a 409 without this header; a retry would get the same answer.
    Conflict: _ErrorResponse(409, headers=_NO_RETRY),
    StorageFull: _ErrorResponse(507, "server_error", headers=_NO_RETRY),
    BodyTooLarge: _ErrorResponse(413),
    TooLarge: _ErrorResponse(413),
    UnsupportedEncoding: _ErrorResponse(415),
    Forbidden: _ErrorResponse(403),
    InvalidApiKey: _ErrorResponse(401, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}),
}


def error_response(error: Exception, request_id: str = "") -> JSONResponse:
    """The response for an exception of a route. An unexpected exception is logged with the request's id."""
    known = next((row for kind, row in _RESPONSES.items() if isinstance(error, kind)), None)
    if known is not None:
        return JSONResponse(error_body(str(error), known.type, code=known.code), known.status, known.headers)
    match error:
        case RateLimited():
            body = error_body(str(error), "rate_limit_error", param=error.param, code=error.code)
            headers = {"Retry-After": str(error.retry_after_s), **error.headers}
            return JSONResponse(body, 429, headers)
        case BackfillError():
            status, body = error_of(error)
            headers = dict(_UNAVAILABLE.headers) if status == 503 else {}
            if isinstance(error, RequestLost) and error.num_lost > 0:
                headers[LOST_HEADER] = str(error.num_others)
            return JSONResponse(body, status, headers)
        case ClientDisconnect():
            return JSONResponse(None, 499)  # the client has left
        case HTTPException():
            body = error_body(str(error.detail), "invalid_request_error")
            return JSONResponse(body, error.status_code, error.headers)
        case _:
            logger.error("request %s failed", request_id or "without an id", exc_info=error)
            return JSONResponse(error_body("The server had an error.", "server_error"), 500)


def response_id_of(scope: Scope) -> str:
    """The ``x-request-id`` of the response."""
    return str(scope.get("state", {}).get("response_id", ""))


def install_error_handlers(app: FastAPI) -> None:
    async def handle(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, HTTPException) and error.status_code in (404, 405):
            error = _routing_error(request, error.status_code)
        return error_response(error, response_id_of(request.scope))

    for kind in (*_RESPONSES, RateLimited, BackfillError, ClientDisconnect, HTTPException, Exception):
        app.add_exception_handler(kind, handle)


def _routing_error(request: Request, status: int) -> HTTPException:
    """The error for an unknown path (404) or method (405); it names what exists."""
    path = request.url.path
    if status == 404:
        known = [each for each in request.app.openapi()["paths"] if "{" not in each]
        likely = difflib.get_close_matches(path.rstrip("/"), known, n=1, cutoff=_LEAST_SIMILARITY)
        meant = f" Did you mean {likely[0]}?" if likely else ""
        return HTTPException(404, f"There is no {path} on this server; /docs lists its endpoints.{meant}")
    routes = request.app.routes
    scopes = {method: {**request.scope, "method": method} for method in _METHODS}
    allowed = ", ".join(
        method
        for method, scope in scopes.items()
        if any(route.matches(scope)[0] is Match.FULL for route in routes)
    )
    message = f"{request.method} is not allowed for {path}, only {allowed}."
    return HTTPException(405, message, {"Allow": allowed})
