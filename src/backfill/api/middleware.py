"""What every request passes through: an id, counting, answers to errors, a key check.

Plain ASGI, so that streams are not buffered.
"""

from __future__ import annotations

import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from backfill.api.errors import InvalidApiKey, answer, answered_id
from backfill.api.keys import ApiKeys
from backfill.api.state import ServerState

_MAX_REQUEST_ID_CHARS = 128
# A browser sends no key with a page that it opens, and ``/docs`` shows nothing of any client.
_OPEN_PATHS = frozenset(
    {"/docs", "/health", "/health/live", "/metrics", "/openapi.json", "/ping", "/version"}
)
_UNCOUNTED_PATHS = frozenset({"/health", "/health/live", "/ping", "/metrics"})


class RequestIdMiddleware:
    """Gives every response an ``x-request-id``: the client's own where it is printable, else a new one.

    Routes find in ``scope["state"]``: ``answered_id``, the header's value; ``request_id``, the client's own
    or None; ``arrived_at_s``, when the request's head had been read, on the monotonic clock.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope).get("x-request-id", "")
        if not (asked.isascii() and asked.isprintable() and 0 < len(asked) <= _MAX_REQUEST_ID_CHARS):
            asked = ""
        request_id = asked or f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {}).update(
            request_id=asked or None, answered_id=request_id, arrived_at_s=time.monotonic()
        )

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class ErrorMiddleware:
    """Answers exceptions that nobody else does, so that the answer passes through the middleware around it.

    Starlette's own such answer passes through none. An answer that has begun is cut off.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = False

        async def send_and_note(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except Exception as error:
            if has_begun:
                raise
            await answer(error, answered_id(scope))(scope, receive, send)


class ApiKeyMiddleware:
    """Refuses requests without one of the keys, except on the open paths.

    Routes find whose key it was in ``scope["state"]["owner"]``.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        owner = self._keys.owner_of(key.strip()) if scheme.lower() == "bearer" else None
        if owner is None:
            refusal = InvalidApiKey("Incorrect or missing API key. Send it as 'Authorization: Bearer KEY'.")
            await answer(refusal)(scope, receive, send)
            return
        scope.setdefault("state", {})["owner"] = owner
        await self._app(scope, receive, send)


class CountingMiddleware:
    """Counts HTTP requests and their duration by route."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _UNCOUNTED_PATHS:
            await self._app(scope, receive, send)
            return
        status = 499  # the client left before the answer began
        started_at_s = time.monotonic()

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            metrics = self._state.metrics
            if metrics is not None:
                route = scope.get("route")
                handler = getattr(route, "path", "none")  # unknown paths share a label
                metrics.http.on_request(scope["method"], handler, status, time.monotonic() - started_at_s)
