"""Engines of a simulated world, and the network between them and routers: in place of aiohttp's session.

Engines are machines of their own: what they do takes place while a router is paused, too.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import math
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, ClassVar
from unittest import mock
from urllib.parse import urlsplit

import aiohttp
import msgspec

from backfill.api.quarantine import LineAlone, Quarantine
from backfill.http.errors import LOST_HEADER
from backfill.http.middleware import ALONE_HEADER
from backfill.protocol.replica_state import ReplicaState
from tests.jobs.virtual_processes import CALL_S, Scheduler

CONNECT_S = 5.0  # as the router's: after which it gives a connection up
DONE = b"data: [DONE]\n\n"
BROKEN = b'data: {"error": {"message": "of the engine"}}\n\n'
_ANSWER_BYTES = 9 << 20  # announced by answers that are passed on as they come


@dataclass(frozen=True, slots=True)
class Head:
    status: int
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class EngineWorld:
    """A world of a seed: what engines ask of it, and tell it.

    Attributes:
        loads_s: at most so long an engine loads.
        run_s: that a request takes, from and to.
        plan_of: what a source of random numbers makes of the world: faults, engines and their capacity.
    """

    loads_s = 2.0
    run_s = 0.05, 0.6
    plan_of: ClassVar[Callable[[Random], Any]]

    seed: int
    violations: list[str] = field(default_factory=list, init=False)  # what did not hold
    poison: set[str] = field(default_factory=set, init=False)  # requests that end the engine
    engines: dict[str, VirtualEngine] = field(default_factory=dict, init=False)  # by URL
    is_chaotic: bool = field(default=True, init=False)  # faults occur
    scheduler: Scheduler = field(init=False)
    plan: Any = field(init=False)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.seed)
        self.plan = self.plan_of(self.source)
        self.scheduler.note(str(self.plan))
        for number in range(self.plan.num_engines):
            url = f"http://engine-{number}"
            self.engines[url] = VirtualEngine(self, url, self.plan.capacity)

    @property
    def source(self) -> Random:
        return self.scheduler.random

    @property
    def noticed_s(self) -> float:
        """Within this a router has looked at an engine that answers."""
        return 0.0

    @property
    def longest_away_s(self) -> float:
        """Of an engine that a request has ended."""
        return 3.0

    def occurs(self, fault: str, probability: float) -> bool:
        return self.is_chaotic and fault in self.plan.faults and self.source.random() < probability

    def answer_of(self, name: str) -> bytes:
        """Of a request that is no stream."""
        usage = {"prompt_tokens": 2, "completion_tokens": 1}
        return json.dumps({"choices": [{"text": name}], "usage": usage}).encode()

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Sessions of aiohttp are this world's, and what the product logs is in its trace."""
        handler, logger = _WorldHandler(self), logging.getLogger("backfill")
        logger.addHandler(handler)
        level, logger.propagate = logger.level, False
        logger.setLevel(logging.INFO)
        try:
            with (
                mock.patch.object(aiohttp, "ClientSession", partial(VirtualSession, self)),
                mock.patch.object(aiohttp, "TCPConnector"),
            ):
                yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = True

    def on_record(self, record: logging.LogRecord) -> None:
        """Errors that the product logs with a traceback are faults of its own."""
        self.scheduler.note(f"  {record.name.rpartition('.')[2]}: {record.getMessage()}")
        if record.exc_info:
            self.violations.append(f"{record.getMessage()}: {record.exc_info[1]!r}")

    def note_lost(self, names: Collection[str]) -> None:
        """An engine has lost these requests at once."""

    def note_kill(self, name: str) -> None:
        """A request has ended an engine."""

    def note_sent(self, exchange: Exchange) -> None:
        """A router sends it."""

    def note_loss(self, exchange: Exchange) -> None:
        """A router learns that it was lost."""

    def note_cancelled(self, exchange: Exchange) -> None:
        """A router has given it up."""


class _WorldHandler(logging.Handler):
    def __init__(self, world: EngineWorld) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        self._world.on_record(record)


def events_of(name: str) -> list[bytes]:
    """Of a stream."""
    return [b"data: " + json.dumps({"text": f"{name} {number}"}).encode() + b"\n\n" for number in range(4)]


class Exchange:
    """A request of the router to an engine, or a look at its state (without a name)."""

    def __init__(self, engine: VirtualEngine, body: bytes | None, *, is_alone: bool = False) -> None:
        self.engine = engine
        self.is_alone = is_alone  # no other offline request is to run beside it
        self.fields: dict[str, Any] = {} if body is None else json.loads(body)
        self.name: str = self.fields.get("prompt", "")
        self.is_offline = self.fields.get("service_tier") == "flex"
        self.has_begun = False  # the engine has sent its first byte
        self.is_computed = False  # and needs only to be sent
        self.is_closed = False  # the router has all of it, or has left
        self._came = deque[Any]()
        self._arrival: asyncio.Future[None] | None = None
        self._last_at_s = 0.0

    async def get(self) -> Any:
        """The next part: a ``Head``, bytes, None for the end. Raises: what breaks the connection."""
        while not self._came:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        part = self._came.popleft()
        if isinstance(part, BaseException):
            raise part
        return part

    def arrive(self, part: Any) -> None:
        """After a while, but in order."""
        scheduler = self.engine.world.scheduler
        now_s = scheduler.clock.now_s()
        self._last_at_s = max(self._last_at_s, now_s + scheduler.random.uniform(0, CALL_S))
        scheduler.after(self._last_at_s - now_s, partial(self._put, part))

    def _put(self, part: Any) -> None:
        self._came.append(part)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)


class Answer:
    """What the router reads of one, as ``aiohttp.ClientResponse``."""

    def __init__(self, exchange: Exchange, head: Head) -> None:
        self._exchange = exchange
        self.status = head.status
        self.headers = head.headers
        self.raw_headers = [(name.encode(), value.encode()) for name, value in head.headers.items()]
        self.content_type = head.headers.get("content-type", "application/json")
        length = head.headers.get("content-length")
        self.content_length = None if length is None else int(length)

    @property
    def content(self) -> Answer:
        return self

    async def iter_any(self) -> AsyncIterator[bytes]:
        while (part := await self._exchange.get()) is not None:
            yield part

    async def read(self, num_bytes: int = -1) -> bytes:
        return b"".join([part async for part in self.iter_any()])


class VirtualSession:
    """In place of ``aiohttp.ClientSession``."""

    def __init__(self, world: EngineWorld, **_: object) -> None:
        self._world = world

    def get(self, url: str, **_: object) -> Any:
        return self._exchange(url, None)

    def request(self, method: str, url: str, *, data: bytes, headers: Any, **_: object) -> Any:
        return self._exchange(url, data, is_alone=ALONE_HEADER in dict(headers))

    @asynccontextmanager
    async def _exchange(
        self, url: str, body: bytes | None, *, is_alone: bool = False
    ) -> AsyncGenerator[Answer, None]:
        world = self._world
        exchange = Exchange(world.engines["http://" + urlsplit(url).netloc], body, is_alone=is_alone)
        if exchange.name:
            world.note_sent(exchange)
        world.scheduler.after(world.source.uniform(0, CALL_S), partial(exchange.engine.connect, exchange))
        try:
            head = await exchange.get()
            if LOST_HEADER in head.headers:
                world.note_loss(exchange)
            yield Answer(exchange, head)
        except aiohttp.ServerDisconnectedError:
            if exchange.name:
                world.note_loss(exchange)
            raise
        except asyncio.CancelledError:
            if exchange.name:
                world.note_cancelled(exchange)
            raise
        finally:
            exchange.is_closed = True
            world.scheduler.after(world.source.uniform(0, CALL_S), partial(exchange.engine.leave, exchange))

    async def close(self) -> None:
        pass


class VirtualEngine:
    """A server that runs requests. What is wrong with it, the world says.

    Attributes:
        is_up: its process is; is_ready: the engine in it, too.
        is_failing: it loses each request, and looks well.
        status: of its answers to requests, if not 200; look_status: of those to looks.
        ill_since_s: from when on it may be taken for dead; infinite where it may not.
        well_since_s: from when on it answers all; infinite where it does not.
        is_rock: nothing was ever wrong with it.
    """

    def __init__(self, world: EngineWorld, url: str, capacity: int) -> None:
        self.world = world
        self.url = url
        self._capacity = capacity
        self.instance = 0
        self.started_at_s = -math.inf
        self.is_up = self.is_ready = True
        self.is_failing = False
        self.status = self.look_status = 200
        self.ill_since_s = math.inf
        self.well_since_s = 0.0
        self.is_rock = True
        self._num_blocks = 0  # partitions and hangs
        self._is_cut = False
        self._held = deque[Callable[[], None]]()
        self._in_flight: dict[Exchange, None] = {}
        self._quarantine = Quarantine(world.scheduler.clock)  # of the process

    @property
    def _num_offline(self) -> int:
        return sum(each.is_offline for each in self._in_flight)

    @property
    def is_well(self) -> bool:
        works = self.is_up and self.is_ready and not self.is_failing
        return works and not self._num_blocks and self.status == self.look_status == 200

    def note_change(self) -> None:
        """Of what is wrong with it."""
        now_s = self.world.scheduler.clock.now_s()
        self.is_rock = self.is_rock and self.is_well
        if self.is_well:
            self.well_since_s = min(self.well_since_s, now_s)
            return
        if now_s - self.well_since_s >= self.world.noticed_s:
            self.ill_since_s = math.inf
        self.ill_since_s = min(self.ill_since_s, now_s)
        self.well_since_s = math.inf

    # ---- Faults ----

    def block(self, seconds: float, *, is_cut: bool = False) -> None:
        """Nothing comes or goes; what was on its way does so later."""
        self._num_blocks += 1
        self._is_cut = self._is_cut or is_cut
        self.note_change()
        self.world.scheduler.after(seconds, self._unblock)

    def wake(self) -> None:
        """Whatever blocks it ends now."""
        self._num_blocks = 0
        self._unblock()

    def _unblock(self) -> None:
        self._num_blocks = max(0, self._num_blocks - 1)
        if self._num_blocks:
            return
        self._is_cut = False
        self.note_change()
        while self._held and not self._num_blocks:
            self._held.popleft()()

    def die(self, away_s: float) -> None:
        """Its process. It is started again after ``away_s``, and loads for a while."""
        if not self.is_up:
            return
        self.world.scheduler.note(f"{self.url} dies with {len(self._in_flight)} requests")
        self.is_up = self.is_ready = False
        self.note_change()
        exchanges, self._in_flight = self._in_flight, {}
        self._note_lost(exchanges)
        for exchange in exchanges:
            self._send(exchange, aiohttp.ServerDisconnectedError())
        self.world.scheduler.after(away_s, self._start)

    def _start(self) -> None:
        self.is_up = True
        self.instance += 1
        self._quarantine = Quarantine(self.world.scheduler.clock)
        self.started_at_s = self.world.scheduler.clock.now_s()
        self.world.scheduler.after(
            self.world.source.uniform(0, self.world.loads_s), partial(self._load, self.instance)
        )

    def crash(self, away_s: float) -> None:
        """The engine within it, which is started again after ``away_s``."""
        if not self.is_ready:
            return
        self.world.scheduler.note(f"{self.url} loses its engine with {len(self._in_flight)} requests")
        self.is_ready = False
        self.note_change()
        computed = {exchange: None for exchange in self._in_flight if exchange.is_computed}
        lost = [exchange for exchange in self._in_flight if not exchange.is_computed]
        self._in_flight = computed
        self._note_lost(lost)
        for exchange in lost:
            if exchange.has_begun:
                self._send(exchange, BROKEN + DONE, None)
            else:
                self._refuse(exchange, 503, **{LOST_HEADER: str(len(lost) - 1)})
        self.world.scheduler.after(away_s, partial(self._load, self.instance))

    def _note_lost(self, exchanges: Iterable[Exchange]) -> None:
        self.world.note_lost([exchange.name for exchange in exchanges])

    def _load(self, instance: int) -> None:
        if self.is_up and instance == self.instance:
            self.is_ready = True
            self.note_change()

    # ---- Requests ----

    def connect(self, exchange: Exchange) -> None:
        if self._num_blocks:
            if self._is_cut and self.world.source.random() < 0.5:  # no kept connection is taken
                after_s = CONNECT_S
                self.world.scheduler.after(
                    after_s, partial(exchange.arrive, aiohttp.ConnectionTimeoutError())
                )
            else:
                self._held.append(partial(self.connect, exchange))
        elif not self.is_up:
            refused = OSError(errno.ECONNREFUSED, "refused")
            exchange.arrive(aiohttp.ClientConnectorError(None, refused))  # type: ignore[arg-type]
        elif not exchange.is_closed:
            self._receive(exchange)

    def leave(self, exchange: Exchange) -> None:
        """The router has closed the connection."""
        self._in_flight.pop(exchange, None)

    def _receive(self, exchange: Exchange) -> None:
        world = self.world
        if not exchange.name:
            num_offline = self._num_offline
            state = ReplicaState(
                instance=str(self.instance),
                phase="ready" if self.is_ready else "starting",
                models=("m",),
                digest="d",
                max_num_seqs=self._capacity,
                kv_tokens=100_000,
                num_online=len(self._in_flight) - num_offline,
                num_offline=num_offline,
                is_offline_quarantined=self._quarantine.is_on(num_offline),
            )
            self._send(exchange, Head(self.look_status), msgspec.json.encode(state), None)
            return
        if self.status != 200:
            self._refuse(exchange, self.status)
        elif not self.is_ready or (not self.is_rock and world.occurs("refusals", 0.05)):
            self._refuse(exchange, 503)
        elif not self.is_rock and world.occurs("full queues", 0.1):
            self._refuse(exchange, 429)
        elif (refusal := self._refusal_of(exchange)) is not None:
            self._send(exchange, Head(429), json.dumps({"error": {"code": refusal.code}}).encode(), None)
        else:
            self._in_flight[exchange] = None
            world.scheduler.after(world.source.uniform(*world.run_s), partial(self._run, exchange))

    def _refusal_of(self, exchange: Exchange) -> LineAlone | None:
        if exchange.is_offline:
            try:
                self._quarantine.check(exchange.name if exchange.is_alone else "", self._num_offline)
            except LineAlone as error:
                return error
        return None

    def _refuse(self, exchange: Exchange, status: int, **headers: str) -> None:
        self._send(exchange, Head(status, headers), b'{"error": {"message": "no"}}', None)

    def _run(self, exchange: Exchange) -> None:
        if exchange not in self._in_flight:
            return
        source = self.world.source
        if exchange.name in self.world.poison:
            self.world.note_kill(exchange.name)
            source.choice([self.die, self.crash])(source.uniform(0, self.world.longest_away_s))
        elif self.is_failing or (not self.is_rock and self.world.occurs("lost answers", 0.03)):
            del self._in_flight[exchange]
            self._note_lost([exchange])
            if source.random() < 0.5:
                self._refuse(exchange, 503, **{LOST_HEADER: "0"})
            else:
                self._send(exchange, aiohttp.ServerDisconnectedError())
        elif exchange.fields.get("stream"):
            self._stream(exchange)
        else:
            body = self.world.answer_of(exchange.name)
            is_large = source.random() < 0.2
            headers = {"content-length": str(_ANSWER_BYTES if is_large else len(body))}
            exchange.has_begun = exchange.is_computed = True
            self._send(exchange, Head(200, headers), body[:9])
            self.world.scheduler.after(source.uniform(0, 0.1), partial(self._go_on, exchange, [body[9:]]))

    def _stream(self, exchange: Exchange) -> None:
        exchange.has_begun = True
        self._send(exchange, Head(200, {"content-type": "text/event-stream"}))
        self._go_on(exchange, [*events_of(exchange.name), DONE])

    def _go_on(self, exchange: Exchange, parts: list[bytes]) -> None:
        if exchange not in self._in_flight:
            return
        if not parts:
            del self._in_flight[exchange]
            self._send(exchange, None)
            return
        cut = self.world.source.randrange(1, len(parts[0]))  # anywhere, as by the network
        self._send(exchange, parts[0][:cut], parts[0][cut:])
        self.world.scheduler.after(
            self.world.source.uniform(0, 0.2), partial(self._go_on, exchange, parts[1:])
        )

    def _send(self, exchange: Exchange, *parts: Any) -> None:
        if self._num_blocks:
            self._held.append(partial(self._send, exchange, *parts))
            return
        for part in parts:
            exchange.arrive(part)
