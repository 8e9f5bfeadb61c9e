"""Exceptions of HTTP servers and clients. Responses: ``error_responses.py``."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping

from backfill.core.request import ServiceClass

# Requests that the engine lost together with this one: tells a router that this one may be the cause.
LOST_HEADER = "x-backfill-lost"
# Code of a refusal: the request is to run alone, and others are refused until it does.
TURN_KEPT = "turn_kept"
MAX_RETRY_AFTER_S = 120  # with a longer time OpenAI's client gives up


class RateLimited(Exception):
    """The server admits no such request now; a subclass says of what there is too much.

    Args:
        code: OpenAI's, for the client.
        retry_after_s: when the client may retry.
        service_class, reason: which requests are refused, and why, as a metric's labels.
        param: the field that asks for too much.
        headers: further ones of the response.
    """

    def __init__(
        self,
        message: str,
        code: str,
        retry_after_s: int,
        service_class: ServiceClass,
        reason: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s
        self.service_class = service_class
        self.reason = reason
        self.param = param
        self.headers = headers or {}


class Unavailable(Exception):
    """The server cannot take this request now; the client may retry."""


class OfflineUnavailable(Unavailable):
    """The server cannot take an offline request now; the client may retry."""


class BodyTooLarge(Exception):
    """The request's body is over the limit."""


class UnsupportedEncoding(Exception):
    """The request's body is compressed."""


class Forbidden(Exception):
    """The request's Origin or Host is not allowed."""


class InvalidApiKey(Exception):
    """The API key is missing or unknown."""


def why_not_connected(error: OSError) -> str:
    """Without the address, which asyncio adds to the system's text."""
    # Negative: of a name that is not known. Errors of TLS have numbers of their own.
    number = 0 if isinstance(error, ssl.SSLError) else error.errno or 0
    return os.strerror(number) if number > 0 else error.strerror or str(error)


def tls_hint(url: str) -> str:
    """What may be wrong with the URL of a server that closed the connection without an answer."""
    scheme, _, rest = url.partition("://")
    return f"; if it speaks TLS, its URL is https://{rest}" if scheme == "http" else ""
