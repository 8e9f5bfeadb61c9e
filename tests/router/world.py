"""One simulated fleet: a router before engines whose faults a seed chooses, and what must hold despite them.

Looks, health, ejection, the policy, the proxy with its retry budget, and the runner of lines are the
product's. Time, the network and the engines are simulated; ``tests/jobs/world.py`` has the store.

``python -m tests.router.world 0 2000`` runs these seeds, and prints those that fail;
``python -m tests.router.world 17`` runs one, and prints what happened.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

from backfill.core.errors import StepFailed
from backfill.engine.tasks import TaskWatch
from backfill.http.bodies import BodyBudget
from backfill.http.errors import RateLimited, Unavailable
from backfill.http.limits import NO_LIMITS, OwnerLimiter
from backfill.router import health, line_runner
from backfill.router.config import RouterConfig
from backfill.router.engines import Engines
from backfill.router.health import RetryBudget
from backfill.router.line_reader import RoutedLine
from backfill.router.line_runner import EngineRunner
from backfill.router.looks import EngineLost, EngineRefused
from backfill.router.metrics import RouterMetrics
from backfill.router.policy import PolicyName
from backfill.router.proxy import MAX_LOSSES, NO_ENGINES, Proxy
from tests.jobs.virtual_processes import Process
from tests.router.virtual_fleet import (
    BROKEN,
    CONNECT_S,
    DONE,
    EngineWorld,
    Exchange,
    VirtualEngine,
    events_of,
)
from tests.seeds import run_seeds

FAULTS = (
    "deaths",
    "crashes",
    "hangs",
    "partitions",
    "failing engines",
    "failing looks",
    "other keys",
    "refusals",
    "full queues",
    "lost answers",
    "poison",
    "pauses",
    "clients leave",
    "engines leave",
)
_POLICIES: tuple[PolicyName, ...] = ("slo", "round-robin", "least-loaded", "prefix")
# Less than the product's, so that a seed is short and retries are few.
_EJECTION_S, _LONGEST_EJECTION_S = 10.0, 40.0
_FAULT_S, _LONGEST_FAULT_S = 3.0, 60.0  # for which an engine gets no lines that knows another key
_RETRIES_PER_S = 1.0
_LONGEST_AWAY_S = 25.0  # of an engine, after the last fault
_NUM_PROBES = 6


@dataclass(frozen=True, slots=True)
class Plan:
    """What a seed makes of the world.

    Attributes:
        num_rocks: so many of the engines have no faults but those that requests bring.
        chaos_s: seconds during which faults occur.
        come_within_s: requests and lines do, from the start of the faults.
        num_retries: in the budget at the start.
    """

    num_engines: int
    num_rocks: int
    policy: PolicyName
    poll_s: float
    timeout_s: float
    retry_s: float
    capacity: int
    chaos_s: float
    num_requests: int
    num_lines: int
    come_within_s: float
    num_retries: int
    faults: frozenset[str]

    @classmethod
    def of(cls, source: random.Random) -> Plan:
        num_engines, chaos_s = source.randint(1, 5), source.uniform(5, 30)
        return cls(
            num_engines=num_engines,
            num_rocks=source.choice([0, 0, source.randint(0, num_engines)]),
            policy=source.choice(_POLICIES),
            poll_s=source.choice([0.25, 0.5, 1.0]),
            timeout_s=source.choice([1.0, 3.0, 10.0]),
            retry_s=source.choice([0.0, 2.0, 30.0]),
            capacity=source.choice([1, 4, 16]),
            chaos_s=chaos_s,
            num_requests=source.choice([10, 40, 80]),
            num_lines=source.choice([0, 10, 30]),
            come_within_s=source.choice([1.0, chaos_s, chaos_s]),
            num_retries=source.choice([1024, 1024, 3]),
            faults=frozenset(kind for kind in FAULTS if source.random() < 0.3),
        )


@dataclass(eq=False, slots=True)
class Client:
    """Of one online request, and what it was sent."""

    name: str
    streams: bool
    has_left: bool = False
    messages: list[dict[str, Any]] = field(default_factory=list)
    error: Exception | None = None
    is_over: bool = False

    @property
    def status(self) -> int | None:
        return self.messages[0]["status"] if self.messages else None

    @property
    def content(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)


@dataclass(slots=True)
class World(EngineWorld):
    """Runs a seed. ``violations`` are what did not hold."""

    kills: Counter[str] = field(default_factory=Counter)
    losses: Counter[str] = field(default_factory=Counter)  # of each request and line
    clients: dict[str, Client] = field(default_factory=dict)
    lines: dict[str, asyncio.Task[Any]] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)  # URLs of those that were removed
    num_sent: Counter[str] = field(default_factory=Counter)
    num_retries: int = 0
    retried: Counter[str] = field(default_factory=Counter)
    is_over: bool = False
    resumed_at_s: float = 0.0
    none_since_s: float = 0.0  # no engine is up
    none_at_s: float = 0.0  # when none was last
    plan: Plan = field(init=False)
    process: Process = field(init=False)
    router: Engines = field(init=False)
    proxy: Proxy = field(init=False)
    runner: EngineRunner = field(init=False)

    @staticmethod
    def plan_of(source: random.Random) -> Plan:
        return Plan.of(source)

    @property
    def now_s(self) -> float:
        return self.scheduler.clock.now_s()

    @property
    def noticed_s(self) -> float:
        return 2 * self.plan.poll_s + self.plan.timeout_s / 3 + 0.5

    @property
    def is_noticed_dead_s(self) -> float:
        """Within this the router has taken an engine for dead that answers nothing."""
        return max(10 * self.plan.poll_s, self.plan.timeout_s) + self.plan.timeout_s + 1.0

    def run(self) -> None:
        with self._patched():
            self.process = Process(self.scheduler, "router")
            self.process.spawn(self._start())
            self._check_often()
            self.scheduler.run_for(1.0)
            self._plan_requests()
            self._plan_faults()
            self.scheduler.run_for(self.plan.chaos_s)
            self._end_faults()
            self._expect_within(self._bound_s(), self._have_ended, "requests, lines or joins are open")
            self._expect_within(_LONGEST_AWAY_S, self._are_well, "engines are away")
            back_s = self.noticed_s + (_LONGEST_EJECTION_S if self.plan.num_engines > 1 else 0.0)
            self._expect_within(back_s, self._are_up, "engines that are well get no requests")
            self._probe()
            self._stop()
        self._check_clients()
        self.violations += self.scheduler.errors

    # ---- The router ----

    async def _start(self) -> None:
        plan, clock = self.plan, self.scheduler.clock
        config = RouterConfig(
            engines=tuple(self.engines),
            policy=plan.policy,
            poll_interval=plan.poll_s,
            engine_timeout=plan.timeout_s,
            retry_timeout=plan.retry_s,
        )
        tasks = TaskWatch()
        self.router = engines = Engines(config, clock, tasks)
        engines.retries = RetryBudget(float(plan.num_retries))
        metrics = RouterMetrics(engines, clock)
        self.proxy = Proxy(
            engines,
            clock,
            metrics,
            OwnerLimiter(lambda _: NO_LIMITS, clock),
            BodyBudget(1 << 20, 1 << 16),
            1 << 16,
            plan.retry_s,
            checks_keys=False,
        )
        self.runner = EngineRunner(engines, metrics)
        engines.on_change = self.runner.on_change
        await engines.start()

    def _stop(self) -> None:
        self.is_over = True
        self._check_rest()
        self.process.spawn(self.router.stop())
        self.scheduler.run_for(1.0)
        self.process.bury()

    # ---- Clients ----

    def _plan_requests(self) -> None:
        for number in range(self.plan.num_requests):
            self._after(self.source.uniform(0, self.plan.come_within_s), partial(self._ask, f"r{number}"))
        for number in range(self.plan.num_lines):
            self._after(self.source.uniform(0, self.plan.come_within_s), partial(self._run_line, number))
        if "poison" in self.plan.faults:
            names = [f"r{number}" for number in range(self.plan.num_requests)]
            names += [f"l{number}" for number in range(self.plan.num_lines)]
            self.poison.update(self.source.sample(names, self.source.randint(1, 3)))

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        """In the router's process, once it runs."""
        self.scheduler.after(seconds, partial(self.process.once_running, act))

    def _ask(self, name: str) -> None:
        client = self.clients[name] = Client(name, streams=self.source.random() < 0.5)
        fields: dict[str, Any] = {"prompt": name, "max_tokens": 4}
        if client.streams:
            fields["stream"] = True
        if self.source.random() < 0.2:
            fields["service_tier"] = "flex"
        self.process.spawn(self._exchange(client, json.dumps(fields).encode()))

    async def _exchange(self, client: Client, body: bytes) -> None:
        loop = self.process.loop
        leaves = loop.create_future()
        if self.occurs("clients leave", 0.3):
            loop.call_later(self.source.uniform(0, 2), self._leave, client, leaves)
        messages: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]
        pause_s = self.source.choice([0.0, 0.0, 0.0, 1.0])  # of a client that reads slowly

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await leaves
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            client.messages.append(message)
            if pause_s:
                await asyncio.sleep(self.source.uniform(0, pause_s))

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "headers": [(b"content-type", b"application/json")],
            "state": {"response_id": client.name},
        }
        try:
            await self.proxy.generate(scope, receive, send)
        except Exception as error:
            client.error = error
        client.is_over = True
        self.scheduler.note(f"{client.name} ends: {client.status} {client.error!r}")
        self._check_client(client)

    def _leave(self, client: Client, leaves: asyncio.Future[None]) -> None:
        if not client.is_over:
            client.has_left = True
            leaves.set_result(None)

    def _run_line(self, number: int) -> None:
        name = f"l{number}"
        body = json.dumps({"prompt": name, "max_tokens": 1}).encode()
        line = RoutedLine(number=number + 1, custom_id=name, path="/v1/completions", body=body)
        self.lines[name] = self.process.spawn(self.runner.run(line))

    # ---- Faults ----

    def _plan_faults(self) -> None:
        source = self.source
        acts: dict[str, Callable[[VirtualEngine], None]] = {
            "deaths": lambda engine: engine.die(source.uniform(0, 15)),
            "crashes": lambda engine: engine.crash(source.uniform(0, 5)),
            "hangs": lambda engine: engine.block(source.choice([0.5, 3, 20]) * source.random()),
            "partitions": lambda engine: engine.block(
                source.choice([0.5, 3, 20]) * source.random(), is_cut=True
            ),
            "failing engines": lambda engine: self.fail(engine, source.uniform(0, 20)),
            "failing looks": partial(self._answer, "look_status", 503),
            "other keys": partial(self._answer, "status", 401),
            "engines leave": self._remove,
        }
        faulty = list(self.engines.values())[self.plan.num_rocks :]
        for kind, act in acts.items():
            if kind in self.plan.faults and faulty:
                for _ in range(source.randint(1, 4)):
                    self.scheduler.after(
                        source.uniform(0, self.plan.chaos_s), partial(self._act, kind, act, faulty)
                    )
        if "pauses" in self.plan.faults:
            for _ in range(source.randint(1, 3)):
                self.scheduler.after(source.uniform(0, self.plan.chaos_s), self._pause)

    def _act(self, kind: str, act: Callable[[VirtualEngine], None], faulty: list[VirtualEngine]) -> None:
        if self.is_chaotic:
            engine = self.source.choice(faulty)
            self.scheduler.note(f"{kind}: {engine.url}")
            act(engine)

    def fail(self, engine: VirtualEngine, seconds: float) -> None:
        """For so long it loses all requests."""
        engine.is_failing = True
        engine.note_change()
        self.scheduler.after(seconds, partial(self._recover, engine))

    def _recover(self, engine: VirtualEngine) -> None:
        engine.is_failing = False
        engine.note_change()

    def _answer(self, what: str, status: int, engine: VirtualEngine) -> None:
        setattr(engine, what, status)
        engine.note_change()
        self.scheduler.after(self.source.uniform(0, 5), partial(self._answer_again, what, engine))

    def _answer_again(self, what: str, engine: VirtualEngine) -> None:
        setattr(engine, what, 200)
        engine.note_change()

    def _remove(self, engine: VirtualEngine) -> None:
        self.process.once_running(partial(self._leave_router, engine))
        self._after(self.source.uniform(0, 5), lambda: self.process.spawn(self._join(engine)))

    def _leave_router(self, engine: VirtualEngine) -> None:
        asyncio._set_running_loop(self.process.loop)
        self.router.leave(engine.url)
        asyncio._set_running_loop(None)
        engine.is_rock = False
        self.left.add(engine.url)

    async def _join(self, engine: VirtualEngine) -> None:
        while True:
            try:
                await self.router.join(engine.url)
            except EngineRefused:
                await asyncio.sleep(0.5)
            else:
                self.left.discard(engine.url)
                return

    def _pause(self) -> None:
        """Of the router's process: once, or again and again."""
        if self.source.random() < 0.5:
            self._pause_for(self.source.choice([0.2, 2, 20]) * self.source.random(), 0)
        else:
            self._pause_for(self.source.uniform(0, self.plan.timeout_s / 2), 20)

    def _pause_for(self, seconds: float, num_more: int) -> None:
        if self.process.is_paused or not self.is_chaotic:
            return
        self.scheduler.note(f"the router is paused for {seconds:.1f} s")
        self.process.pause(seconds)
        self.scheduler.after(seconds, partial(self._note_resumed, seconds, num_more))

    def _note_resumed(self, seconds: float, num_more: int) -> None:
        self.resumed_at_s = self.now_s
        if num_more and self.is_chaotic:
            after_s = self.source.uniform(0.05, 0.2)
            self.scheduler.after(after_s, partial(self._pause_for, seconds, num_more - 1))

    def _end_faults(self) -> None:
        """Engines that are away, hang or are cut off come back when it was said."""
        self.scheduler.note("the faults end")
        self.is_chaotic = False
        self.poison.clear()
        for engine in self.engines.values():
            engine.is_failing = False
            engine.status = engine.look_status = 200
            engine.note_change()

    # ---- What must hold ----

    def note_sent(self, exchange: Exchange) -> None:
        name, url = exchange.name, exchange.engine.url
        self.num_sent[name] += 1
        if self.losses[name] >= MAX_LOSSES and not name.startswith("l"):
            self.violations.append(f"{name} runs again after {self.losses[name]} losses")
        if url in self.left:
            self.violations.append(f"{name} is sent to {url}, which has left")
        if name in self.clients and self.losses[name] > self.retried[name]:
            self.retried[name] = self.losses[name]
            self.num_retries += 1
            budget = self.plan.num_retries + 0.2 * len(self.clients) + _RETRIES_PER_S * self.now_s
            if self.num_retries > budget:
                self.violations.append(f"{self.num_retries} retries, of {budget:.0f}")

    def note_loss(self, exchange: Exchange) -> None:
        self.losses[exchange.name] += 1
        if self.losses[exchange.name] > MAX_LOSSES:
            self.violations.append(f"{exchange.name} is lost {self.losses[exchange.name]} times")

    def note_kill(self, name: str) -> None:
        self.kills[name] += 1
        if self.kills[name] > MAX_LOSSES:
            self.violations.append(f"{name} ends {self.kills[name]} engines")

    def note_cancelled(self, exchange: Exchange) -> None:
        """The router has given the exchange up."""
        client = self.clients.get(exchange.name)
        if self.is_over or (client is not None and client.has_left):
            return
        self.note_loss(exchange)
        engine, plan = exchange.engine, self.plan
        lasted_s = self.now_s - engine.ill_since_s
        # One that was started again has lost what it had, as far as the router knows.
        is_of_now = engine.is_up and self.now_s - engine.started_at_s > self.noticed_s + CONNECT_S
        if is_of_now and self.resumed_at_s < engine.ill_since_s and lasted_s < 8 * plan.poll_s:
            self.violations.append(f"{exchange.name} is aborted at {engine.url}, ill for {lasted_s:.2f} s")

    def _check_often(self) -> None:
        """That requests are not kept from an engine that is well while there is no other."""
        if self.is_over:
            return
        self.scheduler.after(self.plan.poll_s, self._check_often)
        if self.process.is_paused or not hasattr(self, "router") or self.now_s < 1.0:
            self.none_since_s = self.now_s
            return
        if any(engine.is_up for engine in self.router.all) or self.router.all_have_left:
            self.none_since_s = self.now_s
            return
        self.none_at_s = self.now_s
        for engine in self.engines.values():
            since_s = max(self.none_since_s, engine.well_since_s, self.resumed_at_s)
            if engine.url not in self.left and self.now_s - since_s > self.noticed_s:
                lasted_s, self.none_since_s = self.now_s - since_s, self.now_s
                self.violations.append(f"no engine is up for {lasted_s:.1f} s, and {engine.url} is well")

    def _check_client(self, client: Client) -> None:
        """Each request gets one whole answer, or is told why not."""
        name, error, messages = client.name, client.error, client.messages
        if client.has_left:
            return
        kinds = [message["type"] for message in messages]
        ends = [number for number, each in enumerate(messages) if not each.get("more_body", True)]
        is_whole = bool(kinds) and kinds[0] == "http.response.start" and ends == [len(kinds) - 1]
        is_whole = is_whole and kinds.count("http.response.start") == 1
        if error is None and not is_whole:
            self.violations.append(f"{name} has no whole answer: {messages}")
        elif error is not None and messages:
            if not isinstance(error, EngineLost) or client.streams or not self.losses[name]:
                self.violations.append(f"{name} is cut off: {error!r}")
        elif error is not None:
            self._check_refusal(client, error)
        elif client.status == 200:
            self._check_content(client)
        elif client.status not in (401, 429, 503) or (client.status != 401 and self._rocks):
            self.violations.append(f"{name} got {client.status}")

    @property
    def _rocks(self) -> list[VirtualEngine]:
        return [engine for engine in self.engines.values() if engine.is_rock]

    def _check_refusal(self, client: Client, error: Exception) -> None:
        text, num_losses = str(error), self.losses[client.name]
        is_known = isinstance(error, (Unavailable, RateLimited))
        if "were lost while" in text:
            is_known = num_losses == MAX_LOSSES
        elif "lost too many" in text:
            is_known = num_losses > 0 and self.plan.num_retries < 1024
        elif text == NO_ENGINES:
            is_known = "engines leave" in self.plan.faults  # they may have joined again since
        else:  # none is up, but perhaps one that has come up just now
            is_up = any(engine.is_up for engine in self.router.all)
            has_been_up = self.now_s - max(self.none_at_s, self.resumed_at_s) > 2 * self.plan.poll_s
            has_waited = self.num_sent[client.name] == 0
            is_known = is_known and not self._rocks and not (is_up and has_been_up and has_waited)
        if not is_known:
            self.violations.append(f"{client.name} is refused after {num_losses} losses: {error!r}")

    def _check_content(self, client: Client) -> None:
        name, content = client.name, client.content
        if not client.streams:
            if content != self.answer_of(name):
                self.violations.append(f"{name} got {content!r}")
            return
        data = b"".join(events_of(name)) + DONE
        if content.startswith(data):  # nobody reads what follows the end
            return
        events = content.partition(DONE)[0].removesuffix(b"\n\n").split(b"\n\n")
        begun = b"".join(event + b"\n\n" for event in events[:-1])
        if not (content.endswith(DONE) and b"error" in events[-1] and data.startswith(begun)):
            self.violations.append(f"{name} got the stream {content!r}")
        elif events[-1] + b"\n\n" != BROKEN and not self.losses[name]:
            self.violations.append(f"the stream of {name} is broken without a loss")

    def _have_ended(self) -> bool:
        num_ended = sum(client.is_over for client in self.clients.values())
        num_lines_ended = sum(line.done() for line in self.lines.values())
        is_joined = not self.left and not self.process.is_paused
        plan = self.plan
        return is_joined and (num_ended, num_lines_ended) == (plan.num_requests, plan.num_lines)

    def _bound_s(self) -> float:
        """Of requests that are open as the faults end: some engines are away for so long at most."""
        lines_s = _LONGEST_FAULT_S if "other keys" in self.plan.faults else 0.0
        runs_s = MAX_LOSSES * (self.is_noticed_dead_s + CONNECT_S * self.plan.num_engines)
        return _LONGEST_AWAY_S + self.plan.retry_s + lines_s + runs_s + 3.0 * self.plan.num_lines + 10.0

    def _are_well(self) -> bool:
        return all(engine.is_well for engine in self.engines.values())

    def _are_up(self) -> bool:
        return all((known := self.router.get(url)) is not None and known.is_up for url in self.engines)

    def _expect_within(self, seconds: float, holds: Callable[[], bool], otherwise: str) -> None:
        ends_at_s = self.now_s + seconds
        while not holds() and self.now_s < ends_at_s:
            self.scheduler.run_for(0.25)
        if not holds():
            self.violations.append(f"{otherwise} {seconds:.1f} s after the last fault")

    def _probe(self) -> None:
        """All is well again."""
        probes = [f"p{number}" for number in range(_NUM_PROBES)]
        for name in probes:
            self.process.once_running(partial(self._ask, name))
        self._expect_within(
            10.0, lambda: all(self.clients[name].is_over for name in probes), "probes are open"
        )
        refused = [name for name in probes if self.clients[name].status != 200]
        if refused:
            self.violations.append(f"all is well, and {refused} are refused")

    def _check_rest(self) -> None:
        """Nothing is left of requests that have ended."""
        for engine in self.router.all:
            if engine.attempts:
                self.violations.append(f"{engine.url} has attempts left")
        for replica in self.router.replicas.replicas:
            own = replica._own
            if any(
                (own.num_online, own.num_tokens, own.waiting_tokens, replica._num_waiting, replica.num_lines)
            ):
                self.violations.append(f"{replica.name} has requests left: {replica}")
        proxy = self.proxy
        if proxy.num_open or proxy.bodies.all.total or proxy.bodies.offline.total or self.router._ups:
            self.violations.append("the proxy has requests left")

    def _check_clients(self) -> None:
        for name, line in self.lines.items():
            if line.cancelled() or not line.done():
                continue  # said already
            error = line.exception()
            if error is None:
                response = line.result().response
                if response is None or response["body"] != json.loads(self.answer_of(name)):
                    self.violations.append(f"{name} has the result {line.result()}")
            elif not isinstance(error, StepFailed) or self.losses[name] < MAX_LOSSES:
                self.violations.append(f"{name} failed after {self.losses[name]} losses: {error!r}")

    # ---- The machine below ----

    @contextmanager
    def _patched(self) -> Iterator[None]:
        with (
            self.connected(),
            mock.patch.multiple(
                health,
                _EJECTION_S=_EJECTION_S,
                _LONGEST_EJECTION_S=_LONGEST_EJECTION_S,
                _RETRIES_PER_S=_RETRIES_PER_S,
            ),
            mock.patch.multiple(line_runner, _FAULT_S=_FAULT_S, _LONGEST_FAULT_S=_LONGEST_FAULT_S),
        ):
            yield

    def on_record(self, record: logging.LogRecord) -> None:
        EngineWorld.on_record(self, record)
        if "is ejected" in record.getMessage():
            self._check_ejection(record.args[0])  # type: ignore[index, arg-type]

    def _check_ejection(self, url: str) -> None:
        ejected = [each for each in self.router.all if each.health.is_ejected(self.now_s)]
        num_others = sum(each.is_up for each in self.router.all if each not in ejected)
        if len(ejected) > num_others:
            self.violations.append(f"{len(ejected)} engines are ejected, and {num_others} are up")
        if self.engines[url].is_rock:
            self.violations.append(f"{url} is ejected, and was always well")


def run_seed(seed: int) -> World:
    world = World(seed)
    world.run()
    return world


if __name__ == "__main__":
    sys.exit(run_seeds(run_seed))
