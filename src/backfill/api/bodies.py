"""What routes read from a request: its JSON body, its query, the owner of its key."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import msgspec
from fastapi import Request

from backfill.api.body_budget import BodyBudget, HeldBytes
from backfill.api.errors import BodyTooLarge, UnsupportedEncoding
from backfill.core.errors import RequestError
from backfill.core.request import ServiceClass
from backfill.jobs.manager import JobManager
from backfill.protocol.generation_fields import MAX_CHOICES

_JSON_TYPE = re.compile(r"application/([\w.+-]+\+)?json\s*(;|$)", re.IGNORECASE)
_FLEX = b'"flex"'


class _AdmissionFields(msgspec.Struct):
    service_tier: msgspec.Raw = msgspec.Raw()
    n: msgspec.Raw = msgspec.Raw()


_ADMISSION_NAMES = (b'"service_tier"', b'"n"')
_admission_decoder = msgspec.json.Decoder(_AdmissionFields)


@dataclass(frozen=True, slots=True)
class Body:
    """A body and its share of the budget."""

    raw: bytes
    held: HeldBytes


class HasJobs(Protocol):
    """What the routes of files and batches need: a server's state, or a router's."""

    @property
    def bodies(self) -> BodyBudget: ...
    @property
    def jobs(self) -> JobManager | None:
        """None if the Batch API is switched off."""
        ...

    def ready_jobs(self) -> JobManager:
        """Raises: Unavailable."""
        ...


@asynccontextmanager
async def json_body(request: Request, budget: BodyBudget, max_bytes: int) -> AsyncGenerator[Body, None]:
    """The request's body, counted in the budget until the block is left.

    Raises: BodyTooLarge, UnsupportedEncoding, RequestError for another Content-Type, Unavailable.
    """
    _check_content_type(request)
    check_announced_size(request, max_bytes)
    with budget.hold() as held:
        yield Body(await _read(request, held, max_bytes), held)


def peek(raw: bytes) -> tuple[ServiceClass, int]:
    """The service class and number of choices of a request, by a cheap look at its body.

    A body that cannot be read counts as one online choice; preparing it finds the error or the real values.
    """
    if not any(name in raw for name in _ADMISSION_NAMES):  # a search takes a tenth of the time of decoding
        return ServiceClass.ONLINE, 1
    try:
        fields = _admission_decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return ServiceClass.ONLINE, 1
    service_class = ServiceClass.OFFLINE if bytes(fields.service_tier) == _FLEX else ServiceClass.ONLINE
    n = bytes(fields.n)[:4]
    return service_class, min(MAX_CHOICES, max(1, int(n))) if n.isdigit() else 1


async def _read(request: Request, held: HeldBytes, max_bytes: int) -> bytes:
    parts = []
    async for part in request.stream():
        if held.num_bytes + len(part) > max_bytes:
            raise _too_large(max_bytes)
        held.add(len(part))
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
    """The owner of the request's API key (``api.keys``); empty if the server asks for no key."""
    owner: str = request.scope["state"].get("owner", "")
    return owner


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
