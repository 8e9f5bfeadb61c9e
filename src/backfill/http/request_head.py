"""Checks of a request's head: no repeated or misspelt headers, an allowed Host, an allowed Origin.

On loopback without an API key, local programs may use the server, but web pages may not. The Host header
shows a page whose own name resolves to 127.0.0.1 (DNS rebinding). The Origin header shows a page that sends
a form, which browsers allow without a preflight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from backfill.core.errors import RequestError
from backfill.http.config import ServerConfig
from backfill.http.errors import Forbidden
from backfill.http.middleware import HttpMiddleware
from backfill.protocol.request_headers import SLO_HEADERS, TIER_HEADER, TRACE_HEADER

_TIER = TIER_HEADER.encode()
_SLO_NAMES = frozenset(SLO_HEADERS.values())
_SLO_PREFIX = "x-slo-"
_SINGLE_HEADERS = frozenset(
    {
        "authorization",
        "content-encoding",
        "content-length",
        "content-type",
        "host",
        "origin",
        TIER_HEADER,
        TRACE_HEADER,
        "transfer-encoding",
        "x-request-id",
        "x-vllm-priority",
        *_SLO_NAMES,
    }
)
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_ANY = "*"
_READING_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


def check_headers(headers: Headers) -> None:
    """Raise RequestError if a header that must be unique is repeated, or an objective's is misspelt."""
    for name, count in Counter(headers.keys()).items():
        if name.startswith(_SLO_PREFIX) and name not in _SLO_NAMES:
            raise RequestError(
                f"There is no header {name[:80]}; objectives are {' and '.join(sorted(_SLO_NAMES))}, "
                "in milliseconds.",
                param=name[:80],
            )
        if count > 1 and name in _SINGLE_HEADERS:
            raise RequestError(f"The header {name} must be sent once, got it {count} times.", param=name)


def allowed_hosts(config: ServerConfig) -> frozenset[str] | None:
    """The names that a Host header may have; None if it may have any."""
    if _ANY in config.allowed_hosts or not config.is_on_loopback or config.asks_for_keys:
        return None
    return _LOOPBACK_NAMES | {config.host.lower(), *(_name_of(host) for host in config.allowed_hosts)}


def check_host(
    method: str, headers: Headers, allowed: frozenset[str], allowed_origins: Collection[str] = ()
) -> None:
    """Raise Forbidden if the Host is not in ``allowed``, or if a writing request has an unknown Origin.

    An Origin is known if its host is in ``allowed``, or if it is in ``allowed_origins``.
    """
    host = headers.get("host")
    if host is not None and _name_of(host) not in allowed:
        raise Forbidden(
            f"This server does not answer for the Host {host[:80]!r}. "
            "If it should, start it with --allowed-hosts NAME, or with --api-key."
        )
    origin = headers.get("origin")
    if origin in allowed_origins or _ANY in allowed_origins:
        return
    if origin is not None and method not in _READING_METHODS and _host_of_origin(origin) not in allowed:
        raise Forbidden(
            f"Requests from web pages of {origin[:80]!r} are not accepted. "
            "If they should be, start the server with --allowed-origins ORIGIN, or with --api-key."
        )


class RequestHeadMiddleware(HttpMiddleware):
    """Raises RequestError or Forbidden for requests whose head fails a check."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        super().__init__(app)
        self._allowed_hosts = allowed_hosts(config)
        self._allowed_origins = frozenset(config.known_origins)
        self._offline_headers = config.offline_headers

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        check_headers(headers)
        if self._allowed_hosts is not None:
            check_host(scope["method"], headers, self._allowed_hosts, self._allowed_origins)
        if self._offline_headers and not self._offline_headers.isdisjoint(map(tuple, scope["headers"])):
            others = [header for header in scope["headers"] if header[0] != _TIER]
            scope["headers"] = [*others, (_TIER, b"flex")]
        await self.app(scope, receive, send)


def _name_of(host: str) -> str:
    """A Host header or an option without port and brackets, in lower case."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, _, port = host.rpartition(":")
    # More than one colon is an IPv6 address without brackets, as --host takes it.
    return name if name and ":" not in name and port.isdigit() else host.rstrip(".")


def _host_of_origin(origin: str) -> str:
    try:
        return urlsplit(origin).hostname or ""
    except ValueError:
        return ""
