"""What routes read of a request: its JSON body, its query, whose key sent it."""

from __future__ import annotations

import asyncio
import re
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel

from backfill.api.errors import BodyTooLarge
from backfill.core.errors import RequestError
from backfill.protocol.requests import parse_body

Body = TypeVar("Body", bound=BaseModel)

# Parsing and tokenizing more than this would hold up other clients' streams; it is done in a thread.
LARGE_BODY_BYTES = 32 << 10

_JSON_TYPE = re.compile(r"application/([\w.+-]+\+)?json\b", re.IGNORECASE)


async def read_json(request: Request, kind: type[Body], max_bytes: int) -> Body:
    """The request's JSON body; its size is left in ``request.state.body_bytes``.

    Raises: BodyTooLarge, RequestError.
    """
    content_type = request.headers.get("content-type", "application/json")
    if not _JSON_TYPE.match(content_type):
        raise RequestError(f"The Content-Type must be application/json, got {content_type[:80]!r}.")
    check_announced_size(request, max_bytes)
    raw = bytearray()
    async for part in request.stream():
        raw += part
        if len(raw) > max_bytes:
            raise _too_large(max_bytes)
    request.state.body_bytes = len(raw)
    if len(raw) > LARGE_BODY_BYTES:
        return await asyncio.to_thread(parse_body, kind, bytes(raw))
    return parse_body(kind, bytes(raw))


def check_announced_size(request: Request, max_bytes: int) -> None:
    """Raise BodyTooLarge where the client itself says so, before anything is read."""
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced[:20]) > max_bytes:
        raise _too_large(max_bytes)


def query_limit(request: Request, *, default: int, most: int) -> int:
    """The query parameter ``limit``. Raises: RequestError."""
    text = request.query_params.get("limit")
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= most):
        raise RequestError(f"limit must be between 1 and {most}, got {text[:40]!r}.", param="limit")
    return int(text)


def owner_of(request: Request) -> str:
    """Digest of the API key that sent the request; empty where the server asks for none."""
    owner: str = request.scope["state"].get("owner", "")
    return owner


def body_schema(kind: type[BaseModel]) -> dict[str, Any]:
    """The body's schema for the OpenAPI page; the body itself is parsed by ``read_json``."""
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": kind.model_json_schema()}},
        }
    }


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is over the limit of {max_bytes} bytes.")
