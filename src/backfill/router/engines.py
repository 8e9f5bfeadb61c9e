"""The engines behind a router: who is up, who joins and leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from urllib.parse import quote, urlsplit

import aiohttp

from backfill.core.clock import Clock
from backfill.engine.tasks import TaskWatch
from backfill.http.errors import LOST_HEADER, tls_hint
from backfill.protocol.replica_state import ReplicaState
from backfill.router.config import RouterConfig, engine_url
from backfill.router.engine import Engine
from backfill.router.health import MAX_FAILED_LOOKS, RetryBudget
from backfill.router.looks import EngineLost, EngineRefused, ask
from backfill.router.policy import ReplicaSet, create_policy

logger = logging.getLogger(__name__)

_READY = "ready"
_CONNECT_S = 5.0
# Below the 5 s after which an engine closes an idle connection: a request must not be sent as it does.
_KEEP_ALIVE_S = 3.0
_RETRY_S = 0.25
_GOLDEN_RATIO = 0.618034  # its multiples spread evenly, however many there are


class Engines:
    """Engines of one model, each looked at again and again. One event loop owns it.

    Attributes:
        replicas: those that are up, for the policy.
        on_change: called when what is up, or its headroom for lines, may have changed.
        num_lost: how often each engine was lost.
        retries: budget of those of online requests.
        store_id: of the router's job store; empty where it has none.
    """

    def __init__(self, config: RouterConfig, clock: Clock, tasks: TaskWatch) -> None:
        self._config = config
        self._clock = clock
        self._tasks = tasks
        self._engines: dict[str, Engine] = {}
        self._num_joined = 0
        self._joining = asyncio.Lock()
        self._ups: dict[asyncio.Future[bool], None] = {}  # in the order of who waits
        self.session: aiohttp.ClientSession = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            read_bufsize=1 << 18,
        )
        self.replicas = ReplicaSet(create_policy(config.policy), clock)
        self.on_change: Callable[[], None] = lambda: None
        self.num_lost: dict[str, int] = {}
        self.retries = RetryBudget()
        self.store_id = ""

    @property
    def all(self) -> Collection[Engine]:
        return self._engines.values()

    @property
    def all_have_left(self) -> bool:
        """There is none that may come up again: none is left, or all are leaving."""
        return all(engine.is_leaving for engine in self._engines.values())

    @property
    def model(self) -> ReplicaState | None:
        """A state of an engine, which says what model all serve; None before the first has joined."""
        return next((engine.state for engine in self._engines.values()), None)

    def get(self, url: str) -> Engine | None:
        return self._engines.get(url)

    def shares_store(self, engine: Engine) -> bool:
        """It leases lines of batches from the router's store; to others the router sends lines."""
        return bool(self.store_id) and engine.state.store == self.store_id

    @property
    def key_headers(self) -> dict[str, str]:
        """Of the router's own requests to engines."""
        key = self._config.engine_api_key
        return {} if key is None else {"Authorization": f"Bearer {key}"}

    async def start(self) -> None:
        """Join all configured engines, which may still load. Raises: ConfigError, EngineRefused."""
        timeout_s = self._config.join_timeout or self._config.engine_timeout
        deadline_at_s = asyncio.get_running_loop().time() + timeout_s
        for url in self._config.engines:
            await self.join(url, until_s=deadline_at_s)

    async def join(self, url: str, until_s: float = 0.0) -> Engine:
        """Add an engine, or let one that is leaving stay.

        Args:
            until_s: on the loop's clock; until then one that cannot be reached is tried again.
        Raises: ConfigError for what is no URL; EngineRefused.
        """
        given, url = url, engine_url(url)
        if urlsplit(given).path.strip("/"):
            logger.warning("%s is used without its path: %s", given.strip(), url)
        async with self._joining:
            engine = self._engines.get(url)
            if engine is not None:
                engine.is_leaving = False
                engine.poll_now.set()
                return engine
            state = await self._first_state(url, until_s)
            self._check_model(url, state)
            self._num_joined += 1
            phase = self._num_joined * _GOLDEN_RATIO % 1.0
            engine = self._engines[url] = Engine(url, state, phase)
            logger.info("%s joins: %s", url, state.phase)
            self._note(engine, state)
            engine.watcher = self._tasks.start(self._watch(engine), "engine-watch")
            return engine

    def leave(self, url: str) -> Engine | None:
        """Send an engine no more requests. Those that it has end.

        Returns: None for an unknown one.
        Raises: ConfigError for what is no URL.
        """
        engine = self._engines.get(engine_url(url))
        if engine is not None:
            logger.info("%s leaves with %d requests in flight", url, engine.num_in_flight)
            engine.is_leaving = True
            self.pause(engine)
            if self.all_have_left:
                self._end_waits(False)
        return engine

    def pause(self, engine: Engine) -> None:
        """The engine gets no more requests until it has answered a look at its state."""
        if engine.replica is not None:
            engine.replica.is_open = False
        engine.poll_now.set()

    @asynccontextmanager
    async def request(
        self,
        engine: Engine,
        method: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str] | list[tuple[str, str]],
        *,
        is_alone: bool = False,
    ) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        """The engine's answer, to be read in the block.

        Args:
            path: not quoted.
            is_alone: the engine is to run no other offline request beside it.
        Raises: EngineLost; the engine gets no more then.
        """
        try:
            with engine.attempt(is_alone=is_alone):
                async with self.session.request(
                    method,
                    engine.url + quote(path),
                    data=body or None,
                    headers=headers,
                    allow_redirects=False,
                ) as response:
                    if LOST_HEADER in response.headers:
                        engine.health.note_loss()
                    yield response
            if method == "POST" and response.status < HTTPStatus.INTERNAL_SERVER_ERROR:
                engine.health.note_answer()
        except EngineLost as error:
            if error.was_reached:
                engine.health.note_loss()
            self.pause(engine)
            raise

    async def until_up(self, timeout_s: float) -> bool:
        """Wait until an engine is up or the next comes up.

        Returns: False after ``timeout_s``, or as soon as all have left.
        """
        if any(engine.is_up for engine in self._engines.values()):
            return True
        if self.all_have_left:
            return False
        is_up = asyncio.get_running_loop().create_future()
        self._ups[is_up] = None
        try:
            await asyncio.wait([is_up], timeout=timeout_s)
            return is_up.done() and is_up.result()
        finally:
            del self._ups[is_up]

    async def stop(self) -> None:
        watchers = [engine.watcher for engine in self._engines.values() if engine.watcher is not None]
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        await self.session.close()

    async def _first_state(self, url: str, until_s: float) -> ReplicaState:
        loop = asyncio.get_running_loop()
        is_first = True
        while True:
            try:
                return await ask(self.session, url, self.key_headers, self._config.engine_timeout)
            except EngineLost as error:
                left_s = until_s - loop.time()
                is_closed = isinstance(error.__cause__, aiohttp.ServerDisconnectedError)
                why = f"{error}{tls_hint(url) if is_closed else ''}"
                if left_s <= 0:
                    raise EngineRefused(f"The engine {url} cannot be reached: {why}.") from None
                if is_first and self._config.join_timeout is None:  # else it is just being started
                    logger.info("waiting up to %.0f s for %s to start: %s", left_s, url, why)
                is_first = False
            await asyncio.sleep(_RETRY_S)

    def _check_model(self, url: str, state: ReplicaState) -> None:
        """Raises: EngineRefused for another model than the other engines'."""
        for other in self._engines.values():
            known = other.state
            if (known.models, known.digest) == (state.models, state.digest):
                continue
            name, other_name = ", ".join(state.models), ", ".join(known.models)
            same = " of the same name, with another configuration or other weights" * (name == other_name)
            raise EngineRefused(
                f"All engines must serve one model: {other.url} has {other_name}, and {url} has {name}{same}."
            )

    async def _watch(self, engine: Engine) -> None:
        """Look at an engine's state until it has left."""
        timeout_s = self._config.engine_timeout / MAX_FAILED_LOOKS
        while True:
            try:
                state = await ask(self.session, engine.url, self.key_headers, timeout_s)
            except (EngineLost, EngineRefused) as error:
                self._note_failed_look(engine, str(error))
            else:
                engine.health.num_failed_looks = 0
                self._note(engine, state)
            if engine.is_leaving and engine.num_in_flight == 0:
                break
            engine.poll_now.clear()
            try:
                async with asyncio.timeout(self._wait_s(engine)):
                    await engine.poll_now.wait()
                # Several failures are one reason to look.
                await asyncio.sleep(self._config.poll_interval / 10)
            except TimeoutError:
                pass
        del self._engines[engine.url]
        self.replicas.remove(engine.url)
        logger.info("%s has left", engine.url)

    def _wait_s(self, engine: Engine) -> float:
        """Until the next look. Those at many engines are spread: together they would hold up requests."""
        interval_s = self._config.poll_interval
        wait_s = (engine.phase * interval_s - asyncio.get_running_loop().time()) % interval_s
        return wait_s if wait_s > interval_s / 2 else wait_s + interval_s

    def _note(self, engine: Engine, state: ReplicaState) -> None:
        """What an engine says of itself."""
        if engine.state.instance != state.instance:
            if (engine.state.models, engine.state.digest) != (state.models, state.digest):
                self._lose(engine, f"it was started again with another model, {', '.join(state.models)}")
                return
            logger.warning("%s was started again", engine.url)
            self._forget(engine)
        engine.state = state
        engine.note_load(state.num_online + state.num_offline)
        if state.phase == _READY and not engine.is_leaving and self._opens(engine):
            if not engine.is_up:
                logger.info("%s is up", engine.url)
            engine.replica = self.replicas.report(engine.url, state)
            engine.replica.is_open = True
            self._end_waits(True)
        elif engine.replica is not None:
            engine.replica.is_open = False
        self.on_change()

    def _opens(self, engine: Engine) -> bool:
        """Whether an engine that is ready gets requests.

        No more are ejected than are left to serve. If those cannot serve either, an ejected one does.
        """
        now_s = self._clock.now_s()
        was_ejected = engine.health.is_ejected(now_s)
        others = [other for other in self.all if other is not engine]
        num_ejected = was_ejected + sum(other.health.is_ejected(now_s) for other in others)
        num_serving = sum(other.is_up and not other.health.is_ejected(now_s) for other in others)
        opens = engine.health.opens(now_s, may_eject=num_ejected < num_serving)
        if not (opens or was_ejected):
            logger.error("%s is ejected for a while: it lost requests again and again", engine.url)
        return opens or num_serving == 0

    def _note_failed_look(self, engine: Engine, reason: str) -> None:
        """It gets no more requests; after some in a row, over some time, it counts as dead."""
        if engine.health.note_failed_look(self._clock.now_s(), self._config.poll_interval):
            self._lose(engine, reason)
        elif engine.is_up:
            assert engine.replica is not None
            engine.replica.is_open = False
            logger.warning("%s gets no requests for now: %s", engine.url, reason)
            self.on_change()

    def _lose(self, engine: Engine, reason: str) -> None:
        """The engine cannot be reached: its requests run elsewhere, and its cache is taken for lost."""
        if engine.num_in_flight or engine.replica is not None:
            logger.error(
                "%s is lost with %d requests in flight: %s", engine.url, engine.num_in_flight, reason
            )
        self._forget(engine)
        self.on_change()

    def _forget(self, engine: Engine) -> None:
        if engine.replica is not None:
            self.num_lost[engine.url] = self.num_lost.get(engine.url, 0) + 1
            self.replicas.remove(engine.url)
            engine.replica = None
        for attempt in engine.attempts:
            attempt.is_lost = True
            attempt.task.cancel()

    def _end_waits(self, is_up: bool) -> None:
        """Of ``until_up``."""
        for waiting in self._ups:
            if not waiting.done():
                waiting.set_result(is_up)
