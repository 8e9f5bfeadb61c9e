"""Batches through the router: it keeps files and jobs as a server does, and engines run the lines.

Lines are requests of the offline class to engines. A line's result is written once, from an answer that came
whole; where its engine was lost, it runs elsewhere.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from backfill.api.metrics.jobs import JobMetrics
from backfill.blending.resources import ResourceModel
from backfill.core.errors import EngineDead, StepFailed
from backfill.engine.tasks import TaskWatch
from backfill.http.errors import LOST_HEADER
from backfill.http.middleware import OWNER_HEADER
from backfill.jobs.config import JobsConfig
from backfill.jobs.lines import LineResult, completed, refused, unanswered
from backfill.jobs.manager import JobManager
from backfill.preparation.lines import BatchLine, Refusal
from backfill.protocol.service import TokenCount
from backfill.router.engines import Engine, EngineLost, Engines
from backfill.router.lines import LinesSetup, RoutedLine, RoutedReader
from backfill.router.metrics import RouterMetrics
from backfill.router.policy import LinePlacement

# Lines that wait for a place on each engine, so that one that is free finds a line of its part.
_BACKLOG = 16
# Answers to a line itself. Others are of an engine that cannot run it now, or may not for this router.
_REFUSALS = frozenset({400, 404, 413, 415, 422})
_FULL_S = 0.5  # before an engine that refused a line is tried again
# From this loss on, a line is said to be lost: one may be the engine's fault, two look like the line's.
_SUSPICIOUS_LOSSES = 2
# Of an engine that reports none: an 8B model in bfloat16 on an A100. The order depends on their ratio alone.
_RESOURCES = ResourceModel(token_s=5.1e-5, prompt_pair_s=1.7e-9, cached_token_s=6.4e-8)


@dataclass(frozen=True, slots=True)
class _Answer:
    """``num_lost_too``: other requests that its engine lost with this one; None where it lost none."""

    status: int
    body: dict[str, object]
    num_lost_too: int | None


@dataclass(eq=False, slots=True)
class _Waiting:
    line: RoutedLine
    place: asyncio.Future[LinePlacement]


@dataclass(eq=False, slots=True)
class EngineRunner:
    """A ``LineRunner`` on engines. A line waits for a place on the engine that it is meant for.

    An engine with a place and no line that is meant for it takes the oldest of those for which most wait.
    """

    engines: Engines
    metrics: RouterMetrics
    _waiting: dict[str, deque[_Waiting]] = field(default_factory=dict, init=False)

    @property
    def backlog(self) -> Counter[str]:
        """Lines that wait for each engine."""
        return Counter({shard: len(queue) for shard, queue in self._waiting.items()})

    async def run(self, line: BatchLine, count: TokenCount | None = None) -> LineResult:
        """Raises: StepFailed where engines were lost over the line."""
        assert isinstance(line, RoutedLine)
        is_first = False
        while True:
            placement = await self._place(line, is_first=is_first)
            is_first = True  # it has waited
            try:
                answer = await self._attempt(line, placement.replica.name)
            finally:
                placement.on_end(0.0)
                self.dispatch()
            if answer is None:
                continue
            if answer.status == 200:
                return completed(line, answer.body)
            if answer.status in _REFUSALS:
                line.refusal = Refusal(answer.status, answer.body)
                return refused(line)
            if answer.status == 500:
                return unanswered(line, "internal_error")
            self.metrics.retries["refused"] += 1
            await asyncio.sleep(_FULL_S)

    async def _attempt(self, line: RoutedLine, url: str) -> _Answer | None:
        """None where the engine was lost. Raises: StepFailed if that was more than once."""
        engine = self.engines.get(url)
        if engine is None:  # it has left
            return None
        try:
            with engine.attempt():
                answer = await self._send(engine, line)
        except EngineLost as error:
            self.engines.note_failure(engine)
            self.metrics.retries["lost" if error.was_reached else "unreachable"] += 1
            if error.was_reached:
                self._note_lost(line, int(error.had_company))
            return None
        if answer.num_lost_too is not None:
            self.metrics.retries["lost"] += 1
            self._note_lost(line, answer.num_lost_too)
            return None
        return answer

    def dispatch(self) -> None:
        """Give places to lines that wait."""
        replicas = self.engines.replicas
        while any(self._waiting.values()):
            free = {replica.name: replica.line_room for replica in replicas.replicas if replica.line_room > 0}
            if not free:
                return
            most = max(free, key=lambda name: free[name])
            queue = self._queue_for(most)
            waiting = queue[0]
            # A line that is meant for no engine goes where its prefix is.
            others = free.keys() - {most} if waiting.line.shard else ()
            placement = replicas.place_line(waiting.line.request, others)
            if placement is None:
                return
            queue.popleft()
            if waiting.place.done():  # cancelled
                placement.on_end(0.0)
            else:
                waiting.place.set_result(placement)

    async def _place(self, line: RoutedLine, *, is_first: bool) -> LinePlacement:
        waiting = _Waiting(line, asyncio.get_running_loop().create_future())
        queue = self._waiting.setdefault(line.shard, deque())
        (queue.appendleft if is_first else queue.append)(waiting)
        self.dispatch()
        try:
            return await waiting.place
        except asyncio.CancelledError:
            if waiting.place.done() and not waiting.place.cancelled():
                waiting.place.result().on_end(0.0)
            with suppress(ValueError):
                queue.remove(waiting)
            raise

    def _queue_for(self, name: str) -> deque[_Waiting]:
        own = self._waiting.get(name)
        return own or max(self._waiting.values(), key=len)

    async def _send(self, engine: Engine, line: RoutedLine) -> _Answer:
        self.metrics.on_sent(engine.url, is_offline=True)
        headers = {
            **self.engines.key_headers,
            "Content-Type": "application/json",
            "x-request-id": line.request_id,
        }
        if line.owner:
            headers[OWNER_HEADER] = line.owner
        async with self.engines.session.post(
            engine.url + line.path, data=_offline_body(line.body), headers=headers, allow_redirects=False
        ) as response:
            lost = response.headers.get(LOST_HEADER)
            content = await response.read()
            return _Answer(response.status, _json_of(content), None if lost is None else int(lost))

    def _note_lost(self, line: RoutedLine, num_others: int) -> None:
        """Raises: StepFailed if the line is suspicious."""
        line.num_losses += 1
        if line.num_losses >= _SUSPICIOUS_LOSSES:
            line.num_losses = 0
            raise StepFailed(
                "The engine was lost while it ran the line.", num_lost=1 + num_others, num_others=num_others
            )


class RouterJobs:
    """The Files and Batches API of a router, without HTTP."""

    def __init__(
        self, config: JobsConfig, engines: Engines, metrics: RouterMetrics, url: str, tasks: TaskWatch
    ) -> None:
        self._engines = engines
        self._runner = EngineRunner(engines, metrics)
        self._capacity = 0
        model = engines.model
        if model is None:
            raise EngineDead("No engine has joined.")
        job_metrics = JobMetrics(model.models[0])
        metrics.registry.register(job_metrics)
        reader = RoutedReader(config.order, self._setup, lambda: self._runner.backlog)
        self.manager = JobManager(
            config,
            reader,
            model_names=model.models,
            url=url,
            on_event=job_metrics,
            runner=self._runner,
            tasks=tasks,
        )
        job_metrics.watch(self.manager.snapshot)

    async def start(self) -> None:
        """Raises: ConfigError."""
        await self.manager.start()
        self._engines.on_change = self._on_change
        self._on_change()

    async def pause(self) -> None:
        await self.manager.pause()

    async def stop(self) -> None:
        await self.manager.stop()

    def _on_change(self) -> None:
        """Engines' room has changed."""
        up = [engine for engine in self._engines.all if engine.is_up and engine.state is not None]
        capacity = sum(2 * engine.state.max_num_seqs + _BACKLOG for engine in up if engine.state is not None)
        if capacity != self._capacity:
            self._capacity = capacity
            self.manager.feed(capacity)
        self._runner.dispatch()

    def _setup(self) -> LinesSetup:
        up = [engine for engine in self._engines.all if engine.is_up]
        states = [engine.state for engine in up if engine.state is not None]
        known = next((state.resources for state in states if state.resources is not None), None)
        return LinesSetup(
            shards=sorted(engine.url for engine in up),
            resources=_RESOURCES if known is None else ResourceModel(*known),
            kv_tokens=max(1, min((state.kv_tokens for state in states), default=1)),
        )


def _offline_body(raw: bytes) -> bytes:
    """A line's body as an offline request. The file's check has refused streams."""
    body = msgspec.json.decode(raw)
    body.pop("stream", None)
    body.pop("stream_options", None)
    body["service_tier"] = "flex"
    return msgspec.json.encode(body)


def _json_of(content: bytes) -> dict[str, object]:
    try:
        body = msgspec.json.decode(content)
    except msgspec.DecodeError:
        body = None
    return body if isinstance(body, dict) else {"error": {"message": "The engine sent no JSON."}}
