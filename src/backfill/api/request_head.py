"""What a request's head must be like before anything is done for it: headers once, and from no stranger.

On loopback without an API key, whoever can connect may use the server, but no web page may. A page whose own
name resolves to 127.0.0.1 (DNS rebinding) is known by the Host it asks for. A page that sends a form here,
which browsers allow without asking, is known by its Origin.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from backfill.api.config import ServerConfig
from backfill.api.errors import Stranger, answer
from backfill.core.errors import RequestError
from backfill.protocol.objectives import SLO_HEADERS

_SINGLE_HEADERS = frozenset(
    {
        "authorization",
        "content-encoding",
        "content-length",
        "content-type",
        "host",
        "origin",
        "transfer-encoding",
        "x-request-id",
        "x-vllm-priority",
        *SLO_HEADERS.values(),
    }
)
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_ANY = "*"
_READING_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


def check_headers_once(headers: Headers) -> None:
    """Raise RequestError naming a header that is there twice and can mean one thing only."""
    for name, count in Counter(headers.keys()).items():
        if count > 1 and name in _SINGLE_HEADERS:
            raise RequestError(f"The header {name} must be sent once, got it {count} times.", param=name)


def allowed_hosts(config: ServerConfig) -> frozenset[str] | None:
    """The names a Host header may have; None where any may be asked for."""
    is_loopback = config.host == "localhost" or _is_loopback_address(config.host)
    if _ANY in config.allowed_hosts or not is_loopback or config.asks_for_keys:
        return None
    return _LOOPBACK_NAMES | {config.host.lower(), *(_name_of(host) for host in config.allowed_hosts)}


def check_host(
    method: str, headers: Headers, allowed: frozenset[str], allowed_origins: Collection[str] = ()
) -> None:
    """Raise Stranger for a Host that is none of ``allowed``, or the Origin of more than a read.

    An Origin is known whose host is ``allowed``, or which is one of ``allowed_origins``.
    """
    host = headers.get("host")
    if host is not None and _name_of(host) not in allowed:
        raise Stranger(
            f"This server does not answer for the Host {host[:80]!r}. "
            "If it should, start it with --allowed-hosts NAME, or with --api-key."
        )
    origin = headers.get("origin")
    if origin in allowed_origins or _ANY in allowed_origins:
        return
    if origin is not None and method not in _READING_METHODS and _host_of_origin(origin) not in allowed:
        raise Stranger(
            f"Requests of web pages from {origin[:80]!r} are not accepted. "
            "If they should be, start the server with --allowed-origins ORIGIN, or with --api-key."
        )


class RequestHeadMiddleware:
    """Refuses requests whose head is not as it must be."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._allowed_hosts = allowed_hosts(config)
        self._allowed_origins = frozenset(config.known_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            try:
                check_headers_once(headers)
                if self._allowed_hosts is not None:
                    check_host(scope["method"], headers, self._allowed_hosts, self._allowed_origins)
            except (RequestError, Stranger) as error:
                await answer(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _name_of(host: str) -> str:
    """A Host header or option without its port and brackets, in lower case."""
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


def _is_loopback_address(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
