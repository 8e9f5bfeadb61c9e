"""What routes read from a request: its JSON body within a budget of memory, its query, its key's owner."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from fastapi import Request

from backfill.core.errors import RequestError
from backfill.http.errors import BodyTooLarge, OfflineUnavailable, Unavailable, UnsupportedEncoding
from backfill.http.limits import EvenParts

_JSON_TYPE = re.compile(r"application/([\w.+-]+\+)?json\s*(;|$)", re.IGNORECASE)
# Bodies up to this size may use the reserved part of the budget.
SMALL_BODY_BYTES = 64 << 10
_RESERVED_PART = 16  # of the budget, for small bodies
_OFFLINE_PART = 4  # of the budget, for offline ones


@dataclass(slots=True)
class HeldBody:
    """A body and its part of the budget.

    Attributes:
        raw: all of it, once it has been read.
    """

    _budget: BodyBudget
    _owner: str
    raw: bytes = b""
    num_bytes: int = 0
    is_offline: bool = False

    def add(self, num_bytes: int) -> None:
        """Raises, adding nothing: Unavailable."""
        is_small = self.num_bytes + num_bytes <= SMALL_BODY_BYTES
        if self._budget.all.num_excess(self._owner, num_bytes, self._budget.limit_of(is_small=is_small)):
            raise Unavailable("The server holds too many request bodies. Please retry.")
        self._budget.all.add(self._owner, num_bytes)
        self.num_bytes += num_bytes

    def release(self) -> None:
        """Hold nothing any more, before the block is left."""
        self._budget.all.add(self._owner, -self.num_bytes)
        if self.is_offline:
            self._budget.offline.add(self._owner, -self.num_bytes)
        self.raw, self.num_bytes = b"", 0

    def mark_offline(self) -> None:
        """Count the body as offline. Raises, changing nothing: OfflineUnavailable."""
        if self._budget.offline.num_excess(self._owner, self.num_bytes, self._budget.max_offline_bytes):
            raise OfflineUnavailable("The server holds too many bodies of flex requests. Please retry.")
        self._budget.offline.add(self._owner, self.num_bytes)
        self.is_offline = True


class BodyBudget:
    """Counts the bytes of bodies that are being read or prepared.

    The bytes that have arrived count, not the Content-Length: a client that announces a large body and sends
    nothing holds nothing. Offline bodies may hold a quarter of the budget. A sixteenth is reserved for small
    bodies, so that large bodies that arrive slowly do not block all other requests. Owners get even parts.

    Attributes: all, offline: bytes of bodies by owner.

    Args:
        max_bytes: limit of all bodies together.
        max_body_bytes: limit of one body. One such body of either class always fits when there are no others.
    """

    def __init__(self, max_bytes: int, max_body_bytes: int) -> None:
        self.all = EvenParts()
        self.offline = EvenParts()
        self.max_offline_bytes = max(max_body_bytes, max_bytes // _OFFLINE_PART)
        self._max_bytes = max_bytes
        self._max_large_bytes = max(max_body_bytes, max_bytes - max_bytes // _RESERVED_PART)

    def limit_of(self, *, is_small: bool) -> int:
        """The total of bytes, over all bodies, up to which a small or large body may grow."""
        return self._max_bytes if is_small else self._max_large_bytes

    @contextmanager
    def hold(self, owner: str) -> Iterator[HeldBody]:
        """Count one body until the block is left."""
        held = HeldBody(self, owner)
        try:
            yield held
        finally:
            held.release()


@asynccontextmanager
async def json_body(request: Request, budget: BodyBudget, max_bytes: int) -> AsyncGenerator[HeldBody, None]:
    """The request's body, counted in the budget until the block is left.

    Raises: BodyTooLarge, UnsupportedEncoding, RequestError for another Content-Type, Unavailable.
    """
    _check_content_type(request)
    check_announced_size(request, max_bytes)
    with budget.hold(owner_of(request)) as body:
        body.raw = await _read(request, body, max_bytes)
        yield body


async def _read(request: Request, body: HeldBody, max_bytes: int) -> bytes:
    parts = []
    async for part in request.stream():
        if body.num_bytes + len(part) > max_bytes:
            raise _too_large(max_bytes)
        body.add(len(part))
        parts.append(part)
    return b"".join(parts)


def check_announced_size(request: Request, max_bytes: int) -> None:
    """Raise BodyTooLarge if Content-Length is over the limit, before the body is read."""
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced[:20]) > max_bytes:
        raise _too_large(max_bytes)


def query_limit(request: Request, *, default: int, maximum: int) -> int:
    """The query parameter ``limit``. Raises: RequestError if it is not between 1 and ``maximum``."""
    text = request.query_params.get("limit")
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= maximum):
        raise RequestError(f"limit must be between 1 and {maximum}, got {text[:40]!r}.", param="limit")
    return int(text)


def owner_of(request: Request) -> str:
    """The owner of the request's API key (``http.keys``); empty if the server asks for no key."""
    owner: str = request.scope["state"].get("owner", "")
    return owner


def is_routed(request: Request) -> bool:
    """Whether a router speaks for the owner."""
    return bool(request.scope["state"].get("is_routed"))


def _check_content_type(request: Request) -> None:
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise UnsupportedEncoding(
            f"Bodies must not be compressed: send them without Content-Encoding, got {encoding[:40]!r}."
        )
    content_type = request.headers.get("content-type")
    if content_type is None:
        raise RequestError("The Content-Type must be application/json, got none.")
    if not _JSON_TYPE.match(content_type.strip()):
        raise RequestError(f"The Content-Type must be application/json, got {content_type[:80]!r}.")


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is over the limit of {max_bytes} bytes.")
