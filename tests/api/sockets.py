"""A real HTTP server around a small ASGI application, and plain sockets to it."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import uvloop
from starlette.responses import Response

from backfill.cli.startup import bind
from backfill.core.clock import Clock
from backfill.http.connection import ConnectionLimits
from backfill.http.server import HttpServer
from tests.api.servers import TIMEOUT_S

App = Callable[[Any, Any, Any], Awaitable[None]]


def limits(**fields: float) -> ConnectionLimits:
    """Limits whose times only a test that names them reaches."""
    times = dict.fromkeys(("head_timeout_s", "body_timeout_s", "write_timeout_s"), TIMEOUT_S)
    return ConnectionLimits(**{"max_connections": 100, **times, **fields})  # type: ignore[arg-type]


@contextmanager
def serving(
    app: App,
    limits: ConnectionLimits,
    *,
    send_buffer_bytes: int | None = None,
    clock: Clock | None = None,
) -> Iterator[int]:
    """Serve ``app`` in another thread; yields the port.

    Args:
        send_buffer_bytes: of each connection in the kernel, which grows to megabytes by itself.
        clock: of the instants that requests get; None for the machine's.
    """
    listener = bind("127.0.0.1", 0)
    if send_buffer_bytes is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
    with running(HttpServer(app, limits, clock), listener):
        yield listener.getsockname()[1]


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Uvicorn looks every 0.1 s whether it is to end; here, every 2 ms."""
    quick = SimpleNamespace(**vars(asyncio))
    quick.sleep = lambda seconds: asyncio.sleep(seconds / 50)
    with mock.patch("uvicorn.server.asyncio", quick):
        yield


@contextmanager
def running(server: HttpServer, listener: socket.socket) -> Iterator[None]:
    """Run a server in another thread."""
    thread = threading.Thread(target=lambda: uvloop.run(server.serve(sockets=[listener])))
    with ending_at_once():
        thread.start()
        try:
            yield
        finally:
            server.should_exit = True
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()


class RawClient:
    """A connection that sends exactly the bytes of a test."""

    def __init__(self, port: int, *, receive_buffer_bytes: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_buffer_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self.socket.settimeout(TIMEOUT_S)
        self.socket.connect(("127.0.0.1", port))
        self._received = b""

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def answer(self) -> tuple[int, bytes]:
        """Status and body of the next response, which must have a Content-Length."""
        while b"\r\n\r\n" not in self._received:
            self._receive()
        head, _, rest = self._received.partition(b"\r\n\r\n")
        match = re.search(rb"content-length: (\d+)", head.lower())
        assert match is not None, head
        length = int(match[1])
        self._received = rest
        while len(self._received) < length:
            self._receive()
        body, self._received = self._received[:length], self._received[length:]
        return int(head.split(b" ")[1]), body

    def is_closed(self) -> bool:
        """Whether the server closes the connection without further data."""
        try:
            return self.socket.recv(1) == b"" and not self._received
        except ConnectionResetError:
            return True

    def _receive(self) -> None:
        data = self.socket.recv(65536)
        assert data, f"the connection ended after {self._received!r}"
        self._received += data


def request(
    method: str = "POST", path: str = "/", body: bytes = b"", headers: dict[str, str] | None = None
) -> bytes:
    fields = {"Host": "localhost", "Content-Length": str(len(body)), **(headers or {})}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + body


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the path and the request's body."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message.get("body", b"")
        more = message.get("more_body", False)
    await Response(scope["path"].encode() + b" " + body)(scope, receive, send)
