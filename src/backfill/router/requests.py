"""What a router reads in a request's body: enough to choose an engine, without tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from backfill.core.prefixes import BYTES_PER_TOKEN, text_keys
from backfill.http.bodies import SMALL_BODY_BYTES
from backfill.protocol.request_headers import SLO_HEADERS, TIER_HEADER, is_flex
from backfill.router.policy import RoutedRequest

Result = TypeVar("Result")

_TTFT_HEADER = SLO_HEADERS["ttft"]
_BYTES_PER_TOKEN_ID = 6  # in JSON, with its comma


class _Fields(msgspec.Struct):
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    cache_salt: msgspec.Raw = msgspec.Raw()
    service_tier: msgspec.Raw = msgspec.Raw()
    stream: msgspec.Raw = msgspec.Raw()
    slo: msgspec.Raw = msgspec.Raw()


class _Slo(msgspec.Struct):
    ttft: float | None = None


_fields_decoder = msgspec.json.Decoder(_Fields)
_slo_decoder = msgspec.json.Decoder(_Slo)


async def apart(num_bytes: int, work: Callable[..., Result], *args: object) -> Result:
    """Do the work on a body; on a large one in a thread, so that streams do not wait for it."""
    if num_bytes <= SMALL_BODY_BYTES:
        return work(*args)
    return await asyncio.to_thread(work, *args)


def peek(raw: bytes, headers: Mapping[str, str], owner: str = "") -> RoutedRequest:
    """A request as its body shows it. One that cannot be read is for an engine to refuse.

    Args:
        headers: by lower-case name.
        owner: of the request's key; prefixes are not shared between owners.
    """
    try:
        fields = _fields_decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError):
        return RoutedRequest(len(raw) // BYTES_PER_TOKEN)
    prompt = bytes(fields.messages) or bytes(fields.prompt)
    salt = owner.encode() + b"\0" + bytes(fields.cache_salt)
    has_ids = prompt[:1] == b"[" and prompt[1:2].isdigit()
    return RoutedRequest(
        max(1, round(len(prompt) / (_BYTES_PER_TOKEN_ID if has_ids else BYTES_PER_TOKEN))),
        text_keys(prompt, salt),
        _ttft_s(fields, headers),
        streams=bytes(fields.stream) == b"true",
        is_offline=is_flex(bytes(fields.service_tier), headers.get(TIER_HEADER)),
    )


def _ttft_s(fields: _Fields, headers: Mapping[str, str]) -> float | None:
    """The request's own TTFT objective, if it can be read; the body's goes before the header's."""
    try:
        if bytes(fields.slo):
            own = _slo_decoder.decode(fields.slo).ttft
            if own is not None and own > 0:
                return own
        milliseconds = float(headers.get(_TTFT_HEADER, "nan"))
    except (msgspec.MsgspecError, ValueError):
        return None
    return milliseconds / 1e3 if milliseconds > 0 else None
