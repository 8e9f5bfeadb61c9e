"""HTTP/1.1 connections with limits of bytes and time, which hold before a request is authenticated.

Uvicorn's protocol reads heads of any size and waits for clients without a limit. This one answers:

==========================================  =======================================================
a URL or a head over its limit              414, 431
a head that is not complete in time         408
a body that pauses or is too slow           408
a client that stops reading its response    the connection and its request are aborted
more connections than allowed               503
==========================================  =======================================================

Errors have OpenAI's shape, and the connection is closed after each. Where the application answers before it
has a whole body, the rest is read and dropped for up to ``head_timeout_s``, also where the client asked to
close. Timeouts are checked at intervals of a quarter of the shortest one, so a client may have that much
longer.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httptools
import msgspec
import uvicorn
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from backfill.core.clock import Clock, WallClock
from backfill.core.errors import ConfigError
from backfill.protocol.responses import error_body

# Requests that one connection may send ahead of its responses.
MAX_PIPELINED = 16
# A body may arrive in chunks of one byte, each with 5 bytes of framing. More per byte is an attack.
_MAX_FRAMING_PER_BYTE = 8
# A body may take longer than the limit of a whole body if it arrives this fast, as large uploads do.
_MIN_BODY_BYTES_PER_S = 16 << 10
# A refused client's bytes are read and dropped for this long: closed at once, it would see a reset and no
# response.
_LINGER_S = 1.0


if not hasattr(HttpToolsProtocol, "_start_asgi_task"):
    # Without this hook a request with others pipelined behind it would not see a disconnect.
    raise ConfigError(f"Backfill needs uvicorn from 0.54 to below 1, not {uvicorn.__version__}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of each connection, and of the number of connections."""

    max_connections: int
    max_head_bytes: int = 64 << 10
    max_url_bytes: int = 8 << 10
    head_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    whole_body_timeout_s: float = 300.0
    write_timeout_s: float = 30.0

    @property
    def check_interval_s(self) -> float:
        timeouts_s = (
            self.head_timeout_s,
            self.body_timeout_s,
            self.whole_body_timeout_s,
            self.write_timeout_s,
        )
        return min(*timeouts_s, 4 * _LINGER_S) / 4


class ClientStalls:
    """Adds up the times in which the server may not write, since its buffer for the client is full."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ended_s = 0.0  # of stalls that are over
        self._began_at_s: float | None = None

    def begin(self) -> None:
        """The buffer is full."""
        if self._began_at_s is None:
            self._began_at_s = self._clock.now_s()

    def end(self) -> None:
        """The buffer has space again, or the connection is lost. Does nothing outside a stall."""
        self._ended_s, self._began_at_s = self.total_s(), None

    def total_s(self) -> float:
        """Seconds so far, a stall that goes on included."""
        running_s = 0.0 if self._began_at_s is None else self._clock.now_s() - self._began_at_s
        return self._ended_s + running_s


class _Refusal(Exception):
    """Raised in the parser's callbacks; the parser's own error has it as ``__context__``."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection, within ``limits``.

    The ``state`` of a request's scope gets ``received_at_s``, when its first byte came, on ``clock``; for a
    request sent ahead, when the response before it was complete. It also gets ``client_stalls``, those of the
    connection.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: ConnectionLimits,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._clock = WallClock() if clock is None else clock
        self._stalls = ClientStalls(self._clock)
        self._received_at_s = 0.0  # the data being parsed
        self._checks: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None
        self._in_message = False
        self._closes_after_message = False
        self._num_begun = 0  # messages that began in the data being parsed
        self._num_head_bytes = 0  # of the current message, as parsed, trailers included
        self._num_other_bytes = 0  # of the current message, as received, without its body
        self._num_body_bytes = 0
        self._head_since_s: float | None = None  # while a head is awaited
        self._body_since_s = 0.0  # last progress of the body
        self._body_awaited_s = 0.0  # time that the server waited for the client, over the whole body
        self._answered_at_s = 0.0
        self._sent_at_s = 0.0  # last progress of the reader
        self._num_unsent = 0
        self._refused_at_s: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self._limits.max_connections:
            self.transport = transport
            self._refused_at_s = self.loop.time()
            transport.write(
                _error_response(HTTPStatus.SERVICE_UNAVAILABLE, "The server has too many connections.")
            )
            transport.close()
            return
        super().connection_made(transport)
        self._head_since_s = self.loop.time()
        self._checks = self.loop.call_later(self._limits.check_interval_s, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._checks is not None:
            self._checks.cancel()
        if self._running is not None:  # uvicorn tells only the last of several pipelined requests
            self._running.disconnected = True
            self._running.message_event.set()
        self._stalls.end()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self._stalls.begin()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stalls.end()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._refused_at_s is not None or self.parser is None:
            return
        self._received_at_s = self._clock.now_s()
        self._unset_keepalive_if_required()
        if not self._in_message and self._head_since_s is None:
            self._head_since_s = self.loop.time()
        was_in_message, self._num_begun, num_body_bytes = self._in_message, 0, self._num_body_bytes
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # upgrades are not supported; the request is answered as if it had not asked
        except httptools.HttpParserError as error:
            cause = error.__context__
            if not isinstance(cause, _Refusal):
                cause = _Refusal(HTTPStatus.BAD_REQUEST, "This is not a valid HTTP/1.1 request.")
            self._refuse(cause.status, str(cause))
            return
        if self._num_begun + was_in_message > 1:
            self._num_other_bytes = 0  # only the parser knows which bytes belong to the last message
        elif self._in_message:
            received = self._num_body_bytes - (0 if self._num_begun else num_body_bytes)
            self._num_other_bytes += len(data) - received
            self._check_framing()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"].update(received_at_s=self._received_at_s, client_stalls=self._stalls)
        self._in_message = True
        self._num_begun += 1
        self._num_head_bytes = self._num_other_bytes = self._num_body_bytes = 0
        if self._head_since_s is None:
            self._head_since_s = self.loop.time()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self._limits.max_url_bytes:
            message = f"The URL is over the limit of {self._limits.max_url_bytes} bytes."
            raise _Refusal(HTTPStatus.REQUEST_URI_TOO_LONG, message)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_head_bytes += len(name) + len(value) + len(b": \r\n")
        if self._num_head_bytes > self._limits.max_head_bytes:
            raise self._head_too_large()
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._closes_after_message:
            raise _Refusal(HTTPStatus.BAD_REQUEST, "The connection ends after the request before this one.")
        if len(self.pipeline) >= MAX_PIPELINED:
            message = f"At most {MAX_PIPELINED} requests may be sent ahead of their responses."
            raise _Refusal(HTTPStatus.TOO_MANY_REQUESTS, message)
        self._head_since_s = None
        self._body_since_s = self.loop.time()
        self._body_awaited_s = 0.0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        self._body_since_s = self.loop.time()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_message = False
        super().on_message_complete()
        if self._closes_after_message:
            self.transport.close()
        # Answered before the body was complete: wait for the next head now.
        elif self.cycle.response_complete:
            self._head_since_s = self.loop.time()

    def on_response_complete(self) -> None:
        self._answered_at_s = self.loop.time()
        if self.pipeline:
            following, _ = self.pipeline[-1]
            following.scope["state"]["received_at_s"] = self._clock.now_s()
        super().on_response_complete()

    def end_after_request(self) -> None:
        """Close the connection after a response. What is left of its request is read and dropped first.

        Closed at once, the client would see a reset and perhaps no response. A response that was cut off, or
        that has requests behind it, ends the connection at once.
        """
        if not self._in_message or not self.cycle.response_complete:
            self.transport.close()
            return
        self._closes_after_message = True
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        cycle.transport = _ResponseTransport(self)
        super()._start_asgi_task(cycle, app)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _check_framing(self) -> None:
        most = self._limits.max_head_bytes + _MAX_FRAMING_PER_BYTE * self._num_body_bytes
        if self._num_other_bytes > most:
            refusal = self._head_too_large()
            self._refuse(refusal.status, str(refusal))

    def _head_too_large(self) -> _Refusal:
        message = f"The request's headers are over the limit of {self._limits.max_head_bytes} bytes."
        return _Refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message)

    def _check(self) -> None:
        """End the connection if its client exceeded a timeout."""
        now_s = self.loop.time()
        self._checks = self.loop.call_later(self._limits.check_interval_s, self._check)
        if self._refused_at_s is not None:
            if now_s - self._refused_at_s >= _LINGER_S:
                self.transport.abort()
        elif self._is_reader_stalled(now_s):
            _reset(self.transport)
        elif self._head_since_s is not None:
            self._check_head(now_s)
        elif self._in_message:
            self._check_body(now_s)

    def _is_reader_stalled(self, now_s: float) -> bool:
        num_unsent = self.transport.get_write_buffer_size()
        # The buffer's size shows whether the client reads only while the server adds nothing to it.
        is_constant = self.flow.write_paused or self.transport.is_closing() or not self._is_answering
        if num_unsent == 0 or not is_constant or num_unsent != self._num_unsent:
            self._sent_at_s = now_s
        self._num_unsent = num_unsent
        return now_s - self._sent_at_s >= self._limits.write_timeout_s

    def _check_head(self, now_s: float) -> None:
        assert self._head_since_s is not None
        if self._is_answering:  # the connection is in use, and reading may be paused
            self._head_since_s = now_s
        elif now_s - self._head_since_s < self._limits.head_timeout_s:
            pass
        elif self._in_message:
            message = f"The request's head was not complete after {self._limits.head_timeout_s:g} s."
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, message)
        else:
            self.transport.close()

    def _check_body(self, now_s: float) -> None:
        if self.cycle.response_complete:  # the rest of a body whose response was sent
            if now_s - self._answered_at_s >= self._limits.head_timeout_s:
                self.transport.abort()
        elif self.cycle.body or self.flow.read_paused or self.pipeline:  # the app is slow, not the client
            self._body_since_s = now_s
        elif now_s - self._body_since_s >= self._limits.body_timeout_s:
            message = f"No data of the request's body arrived for {self._limits.body_timeout_s:g} s."
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, message)
        else:
            self._body_awaited_s += self._limits.check_interval_s
            allowed_s = self._num_body_bytes / _MIN_BODY_BYTES_PER_S
            if self._body_awaited_s >= max(self._limits.whole_body_timeout_s, allowed_s):
                message = (
                    f"The request's body was not complete after {self._limits.whole_body_timeout_s:g} s."
                )
                self._refuse(HTTPStatus.REQUEST_TIMEOUT, message)

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        """Send an error in place of the app's response, or cut off one that has begun; read no more."""
        if self._closes_after_message:  # the response is sent, and nothing may follow it
            self.transport.close()
            return
        self._refused_at_s = self.loop.time()
        if self._is_answering:
            answers_earlier = self._head_since_s is not None or bool(self.pipeline)
            if answers_earlier or self.cycle.response_started:
                self.transport.abort()
                return
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.flow.resume_reading()
        self.transport.write(_error_response(status, message))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()


class _ResponseTransport(asyncio.Transport):
    """What a response is written to: the connection's transport, which ends after the response's request."""

    def __init__(self, protocol: LimitedHttpProtocol) -> None:
        super().__init__()
        self._protocol = protocol

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._protocol.transport.write(data)

    def is_closing(self) -> bool:
        return self._protocol.transport.is_closing()

    def close(self) -> None:
        self._protocol.end_after_request()


def _reset(transport: asyncio.Transport) -> None:
    """Abort, and make the kernel drop what it has buffered for the client."""
    connection = transport.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def _error_response(status: HTTPStatus, message: str) -> bytes:
    kind = "service_unavailable_error" if status >= 500 else "invalid_request_error"
    code = "server_is_overloaded" if status >= 500 else None
    body = msgspec.json.encode(error_body(message, kind, code=code))
    retry_after = "Retry-After: 2\r\n" if status >= 500 else ""
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n{retry_after}Connection: close\r\n\r\n"
    )
    return head.encode() + body
