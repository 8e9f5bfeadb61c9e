"""Passes requests on to engines, and their answers back, byte for byte.

An answer begins to be sent when its first event, or all of a body that is no stream, has come. Until then a
request whose engine is lost runs on another one. After that it cannot: its stream ends with an error event.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

import aiohttp
from fastapi import Request
from starlette.types import Message, Receive, Scope, Send

from backfill.core.clock import Clock
from backfill.core.errors import RequestError
from backfill.http.bodies import BodyBudget, HeldBody, json_body, owner_of
from backfill.http.errors import LOST_HEADER, RateLimited, Unavailable
from backfill.http.limits import OwnerLimiter, OwnerSlot
from backfill.http.middleware import ALONE_HEADER, OWNER_HEADER
from backfill.http.streaming import sse_event, while_connected
from backfill.protocol.responses import error_body
from backfill.router.engine import Engine
from backfill.router.engines import Engines
from backfill.router.looks import EngineLost
from backfill.router.metrics import RouterMetrics
from backfill.router.policy import RoutedRequest
from backfill.router.replica import Placement
from backfill.router.requests import apart, peek

logger = logging.getLogger(__name__)

# A request that one engine after the other is lost over may be the cause.
MAX_LOSSES = 2
_FORWARD_ATTEMPTS = 5
_RETRY_S = 0.1
# A larger body is sent as it comes.
_WHOLE_BYTES = 8 << 20
_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# Of a client, and not for an engine. A key is for who checks it: files and batches would need none that only
# engines check. An engine would refuse the Origin of a page that the router allows.
_NOT_FORWARDED = _HOP_BY_HOP | {
    b"authorization",
    b"host",
    b"content-length",
    b"origin",
    b"expect",
    b"x-request-id",
    OWNER_HEADER.encode(),
    ALONE_HEADER.encode(),
}
_NOT_RETURNED = _HOP_BY_HOP | {b"date", b"server", b"x-request-id"}
_LOST_HEADER = LOST_HEADER.encode()
_DONE = b"data: [DONE]\n\n"
_EVENT_END = b"\n\n"
NO_ENGINES = "This router has no engines: all have been removed."
_LOST = "The engine that served this request was lost after the answer had begun."


class _Refusal(Exception):
    """An engine cannot run the request now; another one may.

    Attributes:
        head, body: of its answer.
        was_lost: the engine lost the request.
    """

    def __init__(self, head: Message, body: bytes) -> None:
        super().__init__(head["status"])
        self.head = head
        self.body = body
        self.was_lost = any(name == _LOST_HEADER for name, _ in head["headers"])

    @property
    def is_queue_full(self) -> bool:
        return bool(self.head["status"] == 429)


@dataclass(slots=True)
class _Exchange:
    """One request of a client."""

    path: str
    headers: list[tuple[str, str]]
    body: HeldBody
    routed: RoutedRequest
    slot: OwnerSlot
    send: Send
    has_begun: bool = False

    async def begin(self, head: Message) -> None:
        self.has_begun = True
        self.body.release()
        self.slot.on_first_token(0)
        await self.send(head)

    async def write(self, data: bytes, *, is_last: bool = False) -> None:
        await self.send({"type": "http.response.body", "body": data, "more_body": not is_last})

    async def answer(self, head: Message, body: bytes) -> None:
        await self.begin(head)
        await self.write(body, is_last=True)


@dataclass(slots=True)
class Proxy:
    """Forwards to ``engines``.

    Attributes:
        limiter: of what owners may have. Here a request counts as one choice, and its tokens as estimated.
        bodies: limits the bytes of bodies that are held until an answer has begun.
        checks_keys: the router knows its clients' keys, so engines are told the owner.
        num_open: requests whose answer is not complete.
    """

    engines: Engines
    clock: Clock
    metrics: RouterMetrics
    limiter: OwnerLimiter
    bodies: BodyBudget
    max_body_bytes: int
    retry_timeout_s: float
    checks_keys: bool
    num_open: int = field(default=0, init=False)

    async def generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run a generation request.

        Raises, with nothing sent: what ``json_body`` does, OwnerLimited, Unavailable.
        """
        request = Request(scope, receive)
        owner = owner_of(request)
        try:
            await self._generate(request, owner, send)
        except (RateLimited, RequestError, Unavailable) as error:
            if self.checks_keys:
                await self.limiter.delay(owner, error)
            raise

    async def _generate(self, request: Request, owner: str, send: Send) -> None:
        slot = self.limiter.enter(owner)
        request.state.answer_headers = slot.headers
        self.num_open += 1
        try:
            async with json_body(request, self.bodies, self.max_body_bytes) as body:
                routed = await apart(body.num_bytes, peek, body.raw, request.headers, owner)
                if routed.is_offline:
                    body.mark_offline()
                slot.queue([routed.num_tokens])
                headers = self._headers(request, owner)
                exchange = _Exchange(request.scope["path"], headers, body, routed, slot, send)
                await while_connected(self._run(exchange), request.receive)
        finally:
            slot.release()
            self.num_open -= 1

    async def forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request that any engine can answer. Raises, with nothing sent: Unavailable."""
        request = Request(scope, receive)
        headers = self._headers(request, owner_of(request))
        if scope["method"] != "POST":
            await self._forward(scope, headers, b"", send)
            return
        async with json_body(request, self.bodies, self.max_body_bytes) as body:
            await while_connected(self._forward(scope, headers, body.raw, send), receive)

    async def _forward(self, scope: Scope, headers: list[tuple[str, str]], body: bytes, send: Send) -> None:
        for _ in range(_FORWARD_ATTEMPTS):
            if not await self.engines.until_up(self.retry_timeout_s):
                break
            up = [engine for engine in self.engines.all if engine.is_up]
            engine = min(up, key=lambda engine: engine.num_in_flight)
            try:
                async with self.engines.request(
                    engine, scope["method"], scope["path"], body, headers
                ) as response:
                    content = await response.read()
            except EngineLost:
                continue
            await send(_head_of(response))
            await send({"type": "http.response.body", "body": content})
            return
        raise self._no_engine()

    def _headers(self, request: Request, owner: str) -> list[tuple[str, str]]:
        """What an engine gets."""
        own = {"x-request-id": request.state.response_id, **self.engines.key_headers}
        if self.checks_keys:
            own[OWNER_HEADER] = owner
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in request.scope["headers"]
            if name not in _NOT_FORWARDED
        ]
        return [*headers, *own.items()]

    async def _run(self, exchange: _Exchange) -> None:
        """Run a request on one engine, or on others after it."""
        besides: set[str] = set()
        refusal: _Refusal | None = None
        num_lost = num_retried = 0
        self.engines.retries.note_request()
        give_up_at_s = self.clock.now_s() + self.retry_timeout_s
        while True:
            # A queue that is full is the client's to wait for; an engine that is not there is the router's.
            may_wait = refusal is None or not refusal.is_queue_full
            placement = await self._place(exchange.routed, besides, give_up_at_s if may_wait else 0.0)
            if placement is None:
                if refusal is None:
                    raise self._no_engine()
                await exchange.answer(refusal.head, refusal.body)
                return
            engine = self.engines.get(placement.replica.name)
            assert engine is not None, "replicas are engines that are up"
            try:
                await self._attempt(exchange, engine, placement)
                return
            except EngineLost as error:
                self.metrics.retries["lost" if error.was_reached else "unreachable"] += 1
                num_lost += error.was_reached
                if exchange.has_begun:
                    await self._end_broken(exchange, engine)
                    return
                logger.warning("a request runs elsewhere, %s is lost: %s", engine.url, error)
            except _Refusal as other:
                self.metrics.retries["lost" if other.was_lost else "refused"] += 1
                num_lost += other.was_lost
                refusal = other
                if not other.is_queue_full:
                    self.engines.pause(engine)
            finally:
                placement.on_end()
            if num_lost == MAX_LOSSES:
                raise Unavailable(f"{MAX_LOSSES} engines were lost while they ran this request.")
            if num_lost > num_retried:
                num_retried = num_lost
                if not self.engines.retries.take(self.clock.now_s()):
                    raise Unavailable("Engines lost too many requests to run them all again. Please retry.")
            besides.add(engine.url)

    async def _place(self, routed: RoutedRequest, besides: set[str], wait_until_s: float) -> Placement | None:
        """The engine to try next. One that was tried is tried again only if it may be waited for."""
        placement = self._choose(routed, besides)
        while placement is None:
            left_s = wait_until_s - self.clock.now_s()
            if left_s <= 0 or not await self.engines.until_up(left_s):
                return None
            if besides:
                besides.clear()
            else:
                await asyncio.sleep(min(_RETRY_S, left_s))
            placement = self._choose(routed, besides)
        return placement

    def _choose(self, routed: RoutedRequest, besides: set[str]) -> Placement | None:
        replicas = self.engines.replicas
        if routed.is_offline:
            return replicas.place_line(routed, besides, may_exceed=True)
        return replicas.place(routed, besides)

    async def _attempt(self, exchange: _Exchange, engine: Engine, placement: Placement) -> None:
        """Raises: _Refusal, EngineLost."""
        self.metrics.on_sent(engine.url, is_offline=placement.is_offline)
        if not (placement.is_offline or exchange.routed.streams):
            # The whole answer comes at once, so its first token is not seen.
            asyncio.get_running_loop().call_later(placement.predicted_s, self._assume_first_token, placement)
        async with self.engines.request(
            engine, "POST", exchange.path, exchange.body.raw, exchange.headers
        ) as response:
            head = _head_of(response)
            if response.status in (429, 503):
                raise _Refusal(head, await response.read())
            if response.content_type == "text/event-stream":
                last = await self._pass_events(exchange, head, response.content, placement)
            elif (response.content_length or 0) <= _WHOLE_BYTES:
                last = await response.read()
            else:
                last = b""
                await exchange.begin(head)
                async for data in response.content.iter_any():
                    await exchange.write(data)
        # From here on the end of the engine breaks nothing, however slowly the client reads.
        if not exchange.has_begun:
            await exchange.begin(head)
        await exchange.write(last, is_last=True)

    async def _pass_events(
        self,
        exchange: _Exchange,
        head: Message,
        content: aiohttp.StreamReader,
        placement: Placement,
    ) -> bytes:
        """Pass on whole events, so that an error can follow. Returns: what is left of the answer."""
        held = b""
        async for data in content.iter_any():
            end = len(data) if data.endswith(_EVENT_END) else data.rfind(_EVENT_END) + len(_EVENT_END)
            if end < len(_EVENT_END):
                held += data
                continue
            if not exchange.has_begun:
                placement.on_first_token(self.clock.now_s())
                await exchange.begin(head)
            await exchange.write(held + data[:end])
            held = data[end:]
        return held

    async def _end_broken(self, exchange: _Exchange, engine: Engine) -> None:
        """End an answer that has begun with an error, where it is a stream; else cut it off."""
        self.metrics.num_broken += 1
        logger.error("an answer of %s was cut off after it had begun", engine.url)
        if not exchange.routed.streams:
            raise EngineLost(_LOST)
        event = sse_event(error_body(_LOST, "service_unavailable_error", code="server_is_overloaded"))
        await exchange.write(event + _DONE, is_last=True)

    def _assume_first_token(self, placement: Placement) -> None:
        placement.on_first_token(self.clock.now_s(), is_measured=False)

    def _no_engine(self) -> Unavailable:
        if self.engines.all_have_left:
            return Unavailable(NO_ENGINES)
        return Unavailable("No engine is up. Please retry.")


def _head_of(response: aiohttp.ClientResponse) -> Message:
    """The ASGI message that begins an answer with the engine's status and headers."""
    headers = [(name.lower(), value) for name, value in response.raw_headers]
    returned = [each for each in headers if each[0] not in _NOT_RETURNED]
    return {"type": "http.response.start", "status": response.status, "headers": returned}
