"""Lines of batches for engines that do not share the router's store: it leases them and sends them by HTTP.

To the store the router is a server like others (``jobs/leases.py``) whose engine is all of these. A line is
an offline request. Its result is recorded once, from an answer that came whole; where its engine was lost, it
runs elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from backfill.core.errors import StepFailed
from backfill.engine.tasks import TaskWatch
from backfill.http.errors import LOST_HEADER, TURN_KEPT
from backfill.http.metrics import JobMetrics
from backfill.http.middleware import ALONE_HEADER, OWNER_HEADER
from backfill.http.streaming import WARNING_HEADER
from backfill.jobs.config import JobsConfig
from backfill.jobs.errors import Busy
from backfill.jobs.lines import LineResult, completed, refused, unanswered
from backfill.jobs.manager import JobManager
from backfill.preparation.lines import BatchLine
from backfill.protocol.responses import ErrorAnswer
from backfill.protocol.service import TokenCount
from backfill.router.engines import Engines
from backfill.router.line_reader import RoutedLine, RoutedReader
from backfill.router.looks import EngineLost
from backfill.router.metrics import RouterMetrics
from backfill.router.policy import RoutedRequest
from backfill.router.replica import Placement
from backfill.router.requests import apart, peek

logger = logging.getLogger(__name__)

# Answers to a line itself. Others are of an engine that cannot run it now, or may not for this router.
_REFUSALS = frozenset({400, 404, 413, 415, 422})
_REFUSED_S = 0.5  # before an engine that refused a line is tried again
# Before one that does not know the router's key, or sends it elsewhere; longer each time.
_FAULT_S, _LONGEST_FAULT_S = 30.0, 600.0
# A line that is to run alone waits so long for its turn at an engine, then leaves that to others for as long.
# Both double each time, so that the line runs at last, and others wait for half of the time for it.
_TURN_S = 60.0
# From this loss on, a line is said to be lost: one may be the engine's fault, two look like the line's.
_SUSPICIOUS_LOSSES = 2
_STORE_PERIOD_S = 1.0  # of the store's figures


@dataclass(frozen=True, slots=True)
class _Answer:
    """``num_lost_too``: other requests that its engine lost with this one; None where it lost none."""

    status: int
    body: dict[str, object]
    num_lost_too: int | None = None
    warning: str | None = None

    @property
    def keeps_turn(self) -> bool:
        """The engine lets the line run once those that it has have ended, and refuses others until then."""
        error = self.body.get("error")
        return self.status == 429 and isinstance(error, dict) and error.get("code") == TURN_KEPT


@dataclass(slots=True)
class _Pause:
    """Of an engine that gets no lines, or not this one, ``until_s`` on the loop's clock."""

    seconds: float
    until_s: float


@dataclass(eq=False, slots=True)
class EngineRunner:
    """A ``LineRunner`` on engines that do not share the store."""

    engines: Engines
    metrics: RouterMetrics
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _faults: dict[str, _Pause] = field(default_factory=dict, init=False)

    @property
    def capacity(self) -> int:
        """Lines that all of them may have at once. Those at fault count for none."""
        besides = self._besides
        return sum(
            2 * engine.state.max_num_seqs
            for engine in self.engines.all
            if engine.is_up and engine.url not in besides
        )

    @property
    def _besides(self) -> set[str]:
        """Engines that get no lines: those that lease them themselves, and those at fault."""
        return _paused(self._faults).union(
            each.url for each in self.engines.all if self.engines.shares_store(each)
        )

    def on_change(self) -> None:
        """What is up, or its headroom for lines, may have changed."""
        self._changed.set()

    async def run(
        self, line: BatchLine, count: TokenCount | None = None, *, is_alone: bool = False
    ) -> LineResult:
        """Raises: StepFailed where two engines were lost over the line; one alone may lose whatever it gets.

        Where there is one engine, StepFailed is raised if it was lost twice.
        """
        assert isinstance(line, RoutedLine)
        lost_on: set[str] = set()
        missed: dict[str, _Pause] = {}
        num_losses = 0
        while True:
            placement = await self._place(line, lost_on, missed)
            url = placement.replica.name
            try:
                answer = await self._attempt_in_turn(line, url, missed, is_alone)
            finally:
                placement.on_end()
                self.on_change()
            if answer is None:
                continue
            if answer.num_lost_too is not None:
                num_losses += 1
                lost_on.add(url)
                if num_losses == _SUSPICIOUS_LOSSES:
                    raise StepFailed(
                        "The engine was lost while it ran the line.",
                        num_lost=1 + answer.num_lost_too,
                        num_others=answer.num_lost_too,
                    )
                continue
            if answer.status in (401, 403) or 300 <= answer.status < 400:
                self._note_fault(url, answer.status)
                continue
            self._faults.pop(url, None)
            if answer.status == 200:
                return completed(line, answer.body, answer.warning)
            if answer.status in _REFUSALS:
                return refused(line, ErrorAnswer(answer.status, answer.body))
            if answer.status == 500:
                return unanswered(line, "internal_error")
            self.metrics.retries["refused"] += 1
            await asyncio.sleep(_REFUSED_S)

    async def _place(self, line: RoutedLine, lost_on: Set[str], missed: Mapping[str, _Pause]) -> Placement:
        """Wait for an engine with headroom; lines that wait get theirs in turn.

        ``lost_on`` are engines that lost the line: they get it only where no other takes lines. Where its
        turn was ``missed``, they do not get it for a while. While it waits for another one it does not hold
        up those that any engine may have.
        """
        request = await apart(line.num_bytes, peek, line.body, {}, line.owner)
        async with self._turn:
            while (placement := self._placement(request, lost_on, missed)) is None:
                if lost_on or missed:
                    break
                await self._change()
        while placement is None:
            await self._change()
            placement = self._placement(request, lost_on, missed)
        return placement

    def _placement(
        self, request: RoutedRequest, lost_on: Set[str], missed: Mapping[str, _Pause]
    ) -> Placement | None:
        """None where no engine that may have the line has headroom."""
        replicas, besides = self.engines.replicas, self._besides | _paused(missed)
        others = [each for each in self.engines.all if each.is_up and each.url not in besides | lost_on]
        if any(replicas.takes_lines(each.url) for each in others):
            besides |= lost_on
        return replicas.place_line(request, besides)

    async def _change(self) -> None:
        """Wait until an engine's state has changed."""
        self._changed.clear()
        await self._changed.wait()

    def _note_fault(self, url: str, status: int) -> None:
        """The engine, and not the line, is at fault: it gets none for a while."""
        self.metrics.retries["refused"] += 1
        now_s = asyncio.get_running_loop().time()
        before = self._faults.get(url)
        if before is not None and now_s < before.until_s:
            return  # lines that were there already
        seconds = _FAULT_S if before is None else min(2 * before.seconds, _LONGEST_FAULT_S)
        self._faults[url] = _Pause(seconds, now_s + seconds)
        logger.error("%s gets no lines for %.0f s: it answers them with status %d", url, seconds, status)

    async def _attempt_in_turn(
        self, line: RoutedLine, url: str, missed: dict[str, _Pause], is_alone: bool
    ) -> _Answer | None:
        """Again while the engine keeps the line its turn, up to a bound. What is refused is not lost."""
        loop = asyncio.get_running_loop()
        seconds = 2 * missed[url].seconds if url in missed else _TURN_S
        ends_at_s = loop.time() + seconds
        answer = await self._attempt(line, url, is_alone)
        while answer is not None and answer.keeps_turn and self.engines.replicas.takes_lines(url):
            now_s = loop.time()
            if now_s >= ends_at_s:
                missed[url] = _Pause(seconds, now_s + seconds)
                logger.warning(
                    "%s has not ended what it has for %.0f s: a line that is to run alone asks again later",
                    url,
                    seconds,
                )
                break
            self.metrics.retries["refused"] += 1
            await asyncio.sleep(_REFUSED_S)
            answer = await self._attempt(line, url, is_alone)
        return answer

    async def _attempt(self, line: RoutedLine, url: str, is_alone: bool) -> _Answer | None:
        """None where the engine was not reached."""
        engine = self.engines.get(url)
        if engine is None:  # it has left
            return None
        self.metrics.on_sent(url, is_offline=True)
        headers = {
            **self.engines.key_headers,
            "Content-Type": "application/json",
            "x-request-id": line.request_id,
        }
        if line.owner:
            headers[OWNER_HEADER] = line.owner
        if is_alone:
            headers[ALONE_HEADER] = "1"
        body = await apart(line.num_bytes, line.offline_body)
        try:
            async with self.engines.request(
                engine, "POST", line.path, body, headers, is_alone=is_alone
            ) as response:
                content = await response.read()
        except EngineLost as error:
            self.metrics.retries["lost" if error.was_reached else "unreachable"] += 1
            if not error.was_reached:
                return None
            # An engine that has ended cannot say what other routers had sent it.
            return _Answer(503, {}, int(error.had_others or not is_alone))
        lost = response.headers.get(LOST_HEADER)
        if lost is not None:
            self.metrics.retries["lost"] += 1
        num_lost_too = None if lost is None else int(lost)
        return _Answer(response.status, _json_of(content), num_lost_too, response.headers.get(WARNING_HEADER))


async def start_jobs(
    config: JobsConfig,
    engines: Engines,
    metrics: RouterMetrics,
    url: str,
    tasks: TaskWatch,
    weight_of: Callable[[str], float],
) -> JobManager:
    """The Files and Batches API of a router, whose engines have joined. Raises: ConfigError."""
    model = engines.model
    assert model is not None, "engines have joined"
    runner = EngineRunner(engines, metrics)
    job_metrics = JobMetrics(model.models[0])
    jobs = JobManager(
        config,
        RoutedReader(config.order),
        model_names=model.models,
        url=url,
        on_lines=job_metrics.on_lines,
        runner=runner,
        weight_of=weight_of,
        tasks=tasks,
    )
    await jobs.start()
    engines.store_id = jobs.store_id

    def on_change() -> None:
        jobs.feed(runner.capacity)
        runner.on_change()

    async def watch_store() -> None:
        while True:
            with suppress(Busy):  # the figures stay as they are
                job_metrics.show(await jobs.store_snapshot())
            await asyncio.sleep(_STORE_PERIOD_S)

    engines.on_change = on_change
    on_change()
    metrics.registry.register(job_metrics)
    tasks.start(watch_store(), "batch-figures")
    return jobs


def _paused(pauses: Mapping[str, _Pause]) -> set[str]:
    now_s = asyncio.get_running_loop().time()
    return {url for url, pause in pauses.items() if now_s < pause.until_s}


def _json_of(content: bytes) -> dict[str, object]:
    try:
        body = msgspec.json.decode(content)
    except msgspec.DecodeError:
        body = None
    return body if isinstance(body, dict) else {"error": {"message": "The engine sent no JSON."}}
