"""ASGI middleware of every request: an id, error responses, the key check.

Not Starlette's BaseHTTPMiddleware, which buffers streams.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from backfill.core.clock import Clock
from backfill.http.connection import ClientStalls
from backfill.http.error_responses import error_response, response_id_of
from backfill.http.errors import InvalidApiKey
from backfill.http.keys import ROUTER_OWNER, ApiKeys, sent_key
from backfill.http.page import PAGE_PATHS

OWNER_HEADER = "x-backfill-owner"
# A router's line that is to run with no other offline request beside it.
ALONE_HEADER = "x-backfill-alone"
ADMIN_PATH = "/router/engines"
_MAX_REQUEST_ID_CHARS = 128
# Browsers send no key when they open a page, and these paths show no data of clients.
_PUBLIC_PATHS = PAGE_PATHS | {
    "/docs",
    "/health",
    "/health/live",
    "/metrics",
    "/openapi.json",
    "/ping",
    "/version",
}


@dataclass
class HttpMiddleware(ABC):
    """Handles HTTP requests; other ASGI scopes and excluded paths go straight to the app."""

    excluded_paths: ClassVar[frozenset[str]] = frozenset()
    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self.excluded_paths:
            await self.app(scope, receive, send)
        else:
            await self._handle(scope, receive, send)

    @abstractmethod
    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None: ...


@dataclass
class RequestIdMiddleware(HttpMiddleware):
    """Gives every response an ``x-request-id``: the client's own if it is printable, else a new one.

    And what ``answer_headers`` in ``scope["state"]`` returns when the response begins.

    ``scope["state"]`` gets ``response_id``, the header's value; ``request_id``, the client's own id or None;
    ``arrived_at_s``, when the request's first byte was received; ``client_stalls``, the connection's
    ``ClientStalls``. Where the ASGI server tells neither, the request arrives here, and its client never
    stalls.
    """

    clock: Clock

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = Headers(scope=scope).get("x-request-id", "")
        if not (asked.isascii() and asked.isprintable() and 0 < len(asked) <= _MAX_REQUEST_ID_CHARS):
            asked = ""
        response_id = asked or f"req_{uuid.uuid4().hex}"
        state = scope.setdefault("state", {})
        state.update(request_id=asked or None, response_id=response_id)
        state["arrived_at_s"] = state.get("received_at_s", self.clock.now_s())
        state.setdefault("client_stalls", ClientStalls(self.clock))
        state["answer_headers"] = dict  # none, unless a limit counts the request

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = response_id
                for name, value in state["answer_headers"]().items():
                    headers.setdefault(name, value)
            await send(message)

        await self.app(scope, receive, send_with_id)


class ErrorMiddleware(HttpMiddleware):
    """Responds to exceptions of other middleware and to those that no handler caught.

    A response that has begun is cut off. Starlette's own response to such exceptions skips all middleware, so
    it has no request id and is not counted.
    """

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def send_and_note(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self.app(scope, receive, send_and_note)
        except Exception as error:
            if has_begun:
                raise
            await error_response(error, response_id_of(scope))(scope, receive, send)


@dataclass
class ApiKeyMiddleware(HttpMiddleware):
    """Raises InvalidApiKey for requests without a valid key, except on public paths.

    A router's administration is excluded too: it checks a key of its own.

    ``scope["state"]`` gets ``owner``, the owner of the key, and ``is_routed`` if a router speaks for it.
    """

    excluded_paths = _PUBLIC_PATHS | {ADMIN_PATH}
    keys: ApiKeys

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = sent_key(Headers(scope=scope))
        owner = None if key is None else self.keys.owner_of(key)
        if owner is None:
            raise InvalidApiKey("Incorrect or missing API key. Send it as 'Authorization: Bearer KEY'.")
        state = scope.setdefault("state", {})
        if owner == ROUTER_OWNER:
            state["is_routed"] = True
            owner = Headers(scope=scope).get(OWNER_HEADER, owner)
        state["owner"] = owner
        await self.app(scope, receive, send)
