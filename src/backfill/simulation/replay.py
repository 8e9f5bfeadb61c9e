"""Replays a workload against an engine, on a virtual clock or the wall clock."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from backfill.core.clock import Clock, VirtualClock
from backfill.core.config import SchedulerConfig
from backfill.core.counters import ClassCounters
from backfill.core.request import Request, RequestId, ServiceClass
from backfill.core.sampling import SamplingParams
from backfill.costs.behaviour import DeviceBehaviour
from backfill.costs.hardware import HardwareProfile
from backfill.costs.profile import CostProfile
from backfill.engine.engine import Engine
from backfill.engine.messages import TokenOutput
from backfill.execution.executor import Executor
from backfill.simulation.device import create_simulated_executor, exact_behaviour, executor_info

FILLER = 5  # of prompts and outputs; every model has this id
_QUEUE_DEPTH = 32
BIN_S = 5.0

EngineFactory = Callable[[SchedulerConfig, Executor, Clock, CostProfile], Engine]


class Lengths(NamedTuple):
    """Tokens of a prompt and of its output."""

    input_len: int
    output_len: int


class Arrival(NamedTuple):
    """An online request: its arrival, in seconds from the start of the replay, and its lengths."""

    at_s: float
    lengths: Lengths


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of a replay.

    Attributes:
        online: in order of arrival.
        offline: lengths of the offline requests, which repeat; empty for none.
    """

    online: tuple[Arrival, ...]
    duration_s: float
    offline: tuple[Lengths, ...]


@dataclass(slots=True)
class OnlineRecord:
    """Times of an online request's arrival and of each of its tokens, on the replay's clock."""

    arrived_at_s: float
    token_at_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.token_at_s[0] - self.arrived_at_s

    @property
    def tpot_s(self) -> float:
        """Mean gap between tokens; 0 for a single token."""
        num_gaps = len(self.token_at_s) - 1
        return (self.token_at_s[-1] - self.token_at_s[0]) / num_gaps if num_gaps else 0.0

    @property
    def normalized_latency_s(self) -> float:
        """Seconds from arrival to the last token, for each token of the output."""
        return (self.token_at_s[-1] - self.arrived_at_s) / len(self.token_at_s)

    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.token_at_s, self.token_at_s[1:], strict=False)]


@dataclass(slots=True)
class ReplayResult:
    """What a replay measured.

    Attributes:
        duration_s: duration of the workload. Tokens are counted up to it, online requests to their end.
        online: one record for each online request.
        counters: of each class at ``duration_s``.
        num_offline_completed: offline requests that have ended by ``duration_s``.
        timeline: tokens computed in each ``BIN_S`` from the start, by class, without recomputed ones.
        scheduling_s: CPU time of planning and committing.
        num_prefix_hit_tokens: prompt tokens found in the prefix cache, of all classes and both tiers, up to
            the end of the replay.
    """

    duration_s: float
    online: list[OnlineRecord]
    counters: dict[ServiceClass, ClassCounters]
    num_offline_completed: int
    timeline: list[Counter[ServiceClass]]
    num_steps: int
    num_stopped_steps: int
    scheduling_s: float
    num_prefix_hit_tokens: int


class Totals(NamedTuple):
    """What a replay has counted so far."""

    counters: dict[ServiceClass, ClassCounters]
    num_offline_completed: int


class Replay:
    """Feeds an engine online requests at their arrival times, and a flood of offline requests.

    The flood keeps 32 offline requests waiting until the workload's end, as a large batch job does. The
    replay then continues until every online request has ended, so that delayed ones are counted. No two
    prompts begin alike: requests share no cached KV.

    Args:
        clock: the engine's.
        host_s: seconds that pass on a virtual clock after each step, before its tokens are delivered.
    """

    def __init__(self, engine: Engine, clock: Clock, workload: Workload, *, host_s: float = 0.0) -> None:
        self._engine = engine
        self._clock = clock
        self._online = workload.online
        self._offline = itertools.cycle(workload.offline) if workload.offline else None
        self._duration_s = workload.duration_s
        self._origin_s = clock.now_s()
        self._host_s = host_s
        self._numbers = itertools.count()  # of all requests, in both classes
        self._next_arrival = 0
        self._num_offline = 0
        self._num_offline_completed = 0
        self._records: dict[RequestId, OnlineRecord] = {}
        self._num_unfinished = len(workload.online)
        self._num_steps = 0
        self._timeline: list[Counter[ServiceClass]] = []
        self._counted = dict.fromkeys(ServiceClass, 0)

    def next_at_s(self) -> float:
        """Time of the next arrival on the clock; inf if all have arrived."""
        if self._next_arrival >= len(self._online):
            return math.inf
        return self._origin_s + self._online[self._next_arrival].at_s

    def deliver(self) -> None:
        """Pass the requests that have arrived to the engine."""
        now_s = self._clock.now_s()
        while self.next_at_s() <= now_s:
            arrival = self._online[self._next_arrival]
            request = self._request(f"online-{self._next_arrival}", arrival.lengths, ServiceClass.ONLINE)
            request.arrived_at_s = self.next_at_s()
            self._records[request.request_id] = OnlineRecord(request.arrived_at_s)
            self._next_arrival += 1
            self._engine.arrive(request)

    def run(self) -> ReplayResult:
        """Replay the whole workload."""
        at_end: Totals | None = None
        while self._num_unfinished:
            is_over = self._elapsed_s >= self._duration_s
            if is_over and at_end is None:
                at_end = self._totals()
            self._take_arrivals()
            if not is_over:
                self._top_up()
            if self._engine.has_work:
                self._step()
            else:
                self._wait_for_arrival()
        while at_end is None and self._elapsed_s < self._duration_s:
            self._top_up()
            if not self._engine.has_work:
                self._wait_until(self._origin_s + self._duration_s)
                break
            self._step()
        totals = at_end or self._totals()
        return ReplayResult(
            duration_s=self._duration_s,
            online=list(self._records.values()),
            counters=totals.counters,
            num_offline_completed=totals.num_offline_completed,
            timeline=self._timeline,
            num_steps=self._num_steps,
            num_stopped_steps=self._engine.num_stopped_steps,
            scheduling_s=self._engine.scheduling_s,
            num_prefix_hit_tokens=sum(
                each.num_all_prefix_hit_tokens for each in self._engine.scheduler.counters.values()
            ),
        )

    def _take_arrivals(self) -> None:
        """Called between two steps."""
        self.deliver()

    def _wait_for_arrival(self) -> None:
        """Called when the engine has nothing to do."""
        self._wait_until(self.next_at_s())

    @property
    def _elapsed_s(self) -> float:
        return self._clock.now_s() - self._origin_s

    def _step(self) -> None:
        outputs = self._engine.step()
        self._num_steps += 1
        if isinstance(self._clock, VirtualClock):
            self._clock.advance(self._host_s)
        now_s = self._clock.now_s()
        for output in outputs:
            self._record(output, now_s)
        self._count_tokens()

    def _record(self, output: TokenOutput, now_s: float) -> None:
        record = self._records.get(output.request_id)
        assert output.message is None, f"{output.request_id}: {output.message}"
        if record is None:
            self._num_offline_completed += output.finish_reason is not None
            return
        record.token_at_s.append(now_s)
        if output.finish_reason is not None:
            self._num_unfinished -= 1

    def _count_tokens(self) -> None:
        index = int(self._elapsed_s // BIN_S)
        while len(self._timeline) <= index:
            self._timeline.append(Counter())
        for service_class, counters in self._engine.scheduler.counters.items():
            computed = counters.num_computed_tokens - counters.num_recomputed_tokens
            self._timeline[index][service_class] += computed - self._counted[service_class]
            self._counted[service_class] = computed

    def _top_up(self) -> None:
        if self._offline is None:
            return
        _, num_waiting = self._engine.scheduler.count_by_class()[ServiceClass.OFFLINE]
        for _ in range(_QUEUE_DEPTH - num_waiting):
            name = f"offline-{self._num_offline}"
            request = self._request(name, next(self._offline), ServiceClass.OFFLINE)
            request.arrived_at_s = self._clock.now_s()
            self._num_offline += 1
            refusal = self._engine.add(request)
            assert refusal is None, f"{request.request_id}: {refusal}"

    def _request(self, name: str, lengths: Lengths, service_class: ServiceClass) -> Request:
        vocab_size = self._engine.executor.info.vocab_size
        return Request(
            request_id=RequestId(name),
            prompt_token_ids=unique_prompt(next(self._numbers), lengths.input_len, vocab_size),
            sampling=SamplingParams(max_tokens=lengths.output_len, temperature=0.0, ignore_eos=True),
            service_class=service_class,
        )

    def _wait_until(self, at_s: float) -> None:
        assert at_s < math.inf, "requests are unfinished, and the engine has nothing to do"
        seconds = max(0.0, at_s - self._clock.now_s())
        if isinstance(self._clock, VirtualClock):
            self._clock.advance(seconds)
        else:
            time.sleep(seconds)

    def _totals(self) -> Totals:
        counters = {each: counters.copy() for each, counters in self._engine.scheduler.counters.items()}
        return Totals(counters, self._num_offline_completed)


def simulate(
    config: SchedulerConfig,
    workload: Workload,
    hardware: HardwareProfile,
    host_kv_tokens: int,
    *,
    behaviour: DeviceBehaviour | None = None,
    profile: CostProfile | None = None,
    seed: int = 0,
    create_engine: EngineFactory = Engine,
) -> ReplayResult:
    """Replay a workload on a virtual clock.

    Args:
        config: its objectives are those of every online request.
        host_kv_tokens: size of the KV pool in host memory.
        behaviour: what steps take; by default exactly the hardware profile's times.
        profile: what the engine predicts with; by default the hardware profile.
        seed: of the device's noise.
    """
    clock = VirtualClock()
    behaviour = behaviour or exact_behaviour(hardware.costs)
    info = executor_info(hardware, host_kv_tokens)
    executor = create_simulated_executor(info, behaviour, clock, seed)
    engine = create_engine(config, executor, clock, profile or hardware.costs)
    if config.policy == "online-only":
        workload = replace(workload, offline=())
    replay = Replay(engine, clock, workload, host_s=behaviour.host_s)
    executor.events = replay
    return replay.run()


def unique_prompt(number: int, num_tokens: int, vocab_size: int) -> tuple[int, ...]:
    """A prompt of ``num_tokens`` that begins with the digits of ``number`` in base ``vocab_size``.

    Prompts of different numbers below ``vocab_size ** 2`` differ in their first two tokens, so they share no
    block. Only a prompt of one token holds less: the last digit.
    """
    head = (number % vocab_size, number // vocab_size % vocab_size)
    return (head + (FILLER,) * (num_tokens - len(head)))[:num_tokens]
