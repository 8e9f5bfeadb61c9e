"""Exceptions to HTTP answers in OpenAI's shape. No message names a file of this machine or a traceback."""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from backfill.api.state import Overloaded, Unavailable
from backfill.core.errors import BackfillError
from backfill.jobs.errors import Busy, Conflict, NotFound, TooLarge
from backfill.protocol.responses import error_body, error_of

logger = logging.getLogger(__name__)

_RETRY_AFTER_UNAVAILABLE_S = "2"


class BodyTooLarge(Exception):
    """The request's body is over the limit."""


class InvalidApiKey(Exception):
    """No key, or one the server does not know."""


def answer(error: Exception) -> JSONResponse:
    """The response for any exception a route may raise."""
    match error:
        case Overloaded():
            body = error_body(str(error), "rate_limit_error", code="rate_limit_exceeded")
            return JSONResponse(body, 429, {"Retry-After": str(error.retry_after_s)})
        case Unavailable() | Busy():
            body = error_body(str(error), "service_unavailable_error", code="server_is_overloaded")
            return JSONResponse(body, 503, {"Retry-After": _RETRY_AFTER_UNAVAILABLE_S})
        case NotFound():
            return JSONResponse(error_body(str(error), "invalid_request_error"), 404)
        case Conflict():
            # The official client repeats a bare 409; this one stays as it is.
            body = error_body(str(error), "invalid_request_error")
            return JSONResponse(body, 409, {"x-should-retry": "false"})
        case BodyTooLarge() | TooLarge():
            return JSONResponse(error_body(str(error), "invalid_request_error"), 413)
        case InvalidApiKey():
            body = error_body(str(error), "invalid_request_error", code="invalid_api_key")
            return JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})
        case BackfillError():
            status, body = error_of(error)
            headers = {"Retry-After": _RETRY_AFTER_UNAVAILABLE_S} if status == 503 else None
            return JSONResponse(body, status, headers)
        case ClientDisconnect():
            return JSONResponse(None, 499)  # nobody reads it
        case HTTPException():
            return JSONResponse(error_body(str(error.detail), "invalid_request_error"), error.status_code)
        case _:
            logger.error("a request failed", exc_info=error)
            return JSONResponse(error_body("The server had an error.", "server_error"), 500)


def install_error_handlers(app: FastAPI) -> None:
    async def handle(request: Request, error: Exception) -> JSONResponse:
        return answer(error)

    for kind in (
        ClientDisconnect,
        Overloaded,
        Unavailable,
        BodyTooLarge,
        InvalidApiKey,
        BackfillError,
        HTTPException,
        Exception,
    ):
        app.add_exception_handler(kind, handle)
