"""Responses of generation requests, as server-sent events or one body; cancelled when the client leaves."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from backfill.core.errors import BackfillError
from backfill.http.error_responses import error_response, response_id_of
from backfill.protocol.encoding import EncodedBody
from backfill.protocol.responses import error_of
from backfill.protocol.shapes import Json

Result = TypeVar("Result")

_encoder = msgspec.json.Encoder()
_DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b": keep-alive\n\n"
_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
WARNING_HEADER = "x-backfill-warning"


async def while_connected(work: Coroutine[Any, Any, Result], receive: Receive) -> Result:
    """The result of ``work``, which is cancelled when the client disconnects.

    Args:
        receive: of a request whose body has been read.
    Raises: ClientDisconnect, and the errors of ``work``.
    """
    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(until_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    if task.cancelled():
        raise ClientDisconnect
    return task.result()


async def until_disconnect(receive: Receive) -> None:
    """Return when the client disconnects; the request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def sse_event(body: Json) -> bytes:
    return b"data: " + _encoder.encode(body) + b"\n\n"


class LongResponse(Response, ABC):
    """A response whose work is cancelled when the client disconnects.

    Args:
        on_end: called once, also after an error or a disconnect.
        warning: sent as the header ``x-backfill-warning``; printable ASCII.
    """

    def __init__(self, on_end: Callable[[], None], warning: str | None = None) -> None:
        super().__init__()
        self._on_end = on_end
        self._warning = warning

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientDisconnect, OSError):
                await while_connected(self._answer(scope, receive, send), receive)
        finally:
            self._on_end()

    @abstractmethod
    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    async def _start(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        if self._warning is not None:
            headers.append((WARNING_HEADER.encode(), self._warning.encode("ascii")))
        await send({"type": "http.response.start", "status": 200, "headers": headers})


class WholeResponse(LongResponse):
    """The JSON body that ``work`` returns, sent in chunks at the client's pace."""

    def __init__(
        self, work: Coroutine[Any, Any, Json], on_end: Callable[[], None], *, warning: str | None = None
    ) -> None:
        super().__init__(on_end, warning)
        self._work = work

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            encoded = EncodedBody(await self._work)
        except Exception as error:
            await error_response(error, response_id_of(scope))(scope, receive, send)
            return
        headers = [
            (b"content-length", str(encoded.num_bytes).encode()),
            (b"content-type", b"application/json"),
        ]
        await self._start(send, headers)
        num_left = encoded.num_bytes
        for chunk in encoded.chunks():
            num_left -= len(chunk)
            await send({"type": "http.response.body", "body": chunk, "more_body": num_left > 0})
            if num_left > 0:
                await asyncio.sleep(0)  # let other tasks run: ``send`` does not wait for a fast reader


class EventStream(LongResponse):
    """Chunks as server-sent events, ended by ``[DONE]``.

    An error before the first chunk gives an error response; a later one gives an event.

    Args:
        chunks: lists of bodies; each list is one write. The next is asked for when the last is written.
        keep_alive_s: send a comment after this many seconds without a chunk; 0 sends none.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[list[Json], None],
        on_end: Callable[[], None],
        *,
        keep_alive_s: float = 0.0,
        warning: str | None = None,
    ) -> None:
        super().__init__(on_end, warning)
        self._chunks = chunks
        self._keep_alive_s = keep_alive_s

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The order matters: ``paced`` waits for ``chunks``, which cannot be closed in the meantime.
        async with (
            aclosing(self._chunks) as chunks,
            aclosing(_with_keep_alives(chunks, self._keep_alive_s)) as paced,
        ):
            opened = False
            try:
                async for bodies in paced:
                    if not opened:
                        opened = True
                        await self._start(send, list(_STREAM_HEADERS))
                    data = _KEEP_ALIVE if bodies is None else b"".join(map(sse_event, bodies))
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                    await asyncio.sleep(0)  # the event loop hands the data to the kernel between two turns
            except Exception as error:
                if not opened:
                    await error_response(error, response_id_of(scope))(scope, receive, send)
                    return
                event = _error_event(error, response_id_of(scope))
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": _DONE, "more_body": False})


def _error_event(error: Exception, request_id: str) -> bytes:
    if isinstance(error, BackfillError):
        return sse_event(error_of(error).body)
    return b"data: " + bytes(error_response(error, request_id).body) + b"\n\n"


async def _with_keep_alives(
    chunks: AsyncGenerator[list[Json], None], interval_s: float
) -> AsyncGenerator[list[Json] | None, None]:
    """The chunks, and None after every ``interval_s`` without a chunk; 0 yields no None."""
    if interval_s <= 0:
        async for chunk in chunks:
            yield chunk
        return
    iterator = chunks.__aiter__()
    while True:
        following = asyncio.ensure_future(anext(iterator))
        try:
            while not (await asyncio.wait({following}, timeout=interval_s))[0]:
                yield None
            yield following.result()
        except StopAsyncIteration:
            return
        finally:
            if not following.done():
                following.cancel()
                await asyncio.wait({following})
