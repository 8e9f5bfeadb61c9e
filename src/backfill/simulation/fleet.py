"""Replicas of an engine on one virtual clock, behind a router."""

from __future__ import annotations

import gc
import heapq
import itertools
import math
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

from backfill.core.counters import ClassCounters
from backfill.core.prefixes import token_keys
from backfill.core.request import Request, RequestId, ServiceClass
from backfill.core.sampling import SamplingParams
from backfill.engine.messages import TokenOutput
from backfill.router.policy import ReplicaSet, RoutedRequest, create_policy
from backfill.router.replica import Placement
from backfill.simulation.fleet_replica import FleetClock, ReplicaSpec, SimulatedReplica
from backfill.simulation.fleet_traffic import FleetArrival, Segment, answer_number, prompt_tokens
from backfill.simulation.processes import RunShare
from backfill.simulation.replay import Lengths

REPORT_S = 0.5  # from a replica's report to its next


@dataclass(slots=True)
class OnlineResult:
    """What happened to an online request.

    Attributes:
        replica: that served it.
        ttft_s: to its first token.
        tpot_s: mean gap between its tokens; 0 for a single one.
    """

    arrived_at_s: float
    replica: int
    ttft_s: float = math.nan
    tpot_s: float = 0.0


@dataclass(slots=True)
class _Online:
    """An online request that has not ended."""

    result: OnlineResult
    placement: Placement
    first_at_s: float = math.nan
    num_tokens: int = 0


@dataclass(slots=True)
class FleetResult:
    """What a run measured. Offline figures and hits are of the workload's duration.

    Attributes:
        counters: of each replica, by class.
        offline_done: offline requests that ended, of each replica.
        num_online: unfinished online requests of each replica, every ``REPORT_S``.
        scheduling_s: CPU time of planning and committing, all replicas together.
    """

    duration_s: float
    online: list[OnlineResult]
    counters: list[dict[ServiceClass, ClassCounters]] = field(default_factory=list)
    offline_done: list[int] = field(default_factory=list)
    num_online: list[array[int]] = field(default_factory=list)
    num_steps: int = 0
    num_stopped_steps: int = 0
    scheduling_s: float = 0.0


class Fleet:
    """Runs replicas side by side: of all arrivals and ends of steps the earliest is next.

    Offline requests come from one pool, which repeats, and go where ``ReplicaSet.place_line`` says. The
    fleet runs until every online request has ended.

    Args:
        router: name of a routing policy.
        seed: of the devices' noise.
    """

    def __init__(
        self,
        router: str,
        num_replicas: int,
        spec: ReplicaSpec,
        online: Sequence[FleetArrival],
        offline: Sequence[Lengths],
        duration_s: float,
        seed: int,
    ) -> None:
        self.clock = FleetClock()
        self.replicas = [
            SimulatedReplica(number, spec, self.clock, seed * 1000 + number) for number in range(num_replicas)
        ]
        self.result = FleetResult(duration_s, [])
        self._set = ReplicaSet(create_policy(router), self.clock)
        self._arrivals = online
        self._next_arrival = 0
        self._offline: Iterator[Lengths] | None = itertools.cycle(offline) if offline else None
        self._duration_s = duration_s
        self._online: dict[RequestId, _Online] = {}
        self._lines: dict[RequestId, Placement] = {}
        self._numbers = itertools.count(len(online))  # of offline requests
        self._wakes: list[tuple[float, int]] = []
        self._due: list[list[TokenOutput]] = [[] for _ in self.replicas]
        self._share = RunShare()

    def run(self) -> FleetResult:
        """Run the whole workload."""
        with _without_garbage_collection():
            return self._run()

    def _run(self) -> FleetResult:
        reports_at_s, has_ended = 0.0, False
        while not has_ended or self._online:
            arrives_at_s = self._arrives_at_s
            wakes_at_s = self._wakes[0][0] if self._wakes else math.inf
            at_s = min(arrives_at_s, wakes_at_s, reports_at_s)
            if at_s >= self._duration_s and not has_ended:
                has_ended = True
                self._note_totals()
            self.clock.move_to(at_s)
            if reports_at_s <= at_s:
                self._report(tops_up=not has_ended)
                reports_at_s += REPORT_S
            elif arrives_at_s <= wakes_at_s:
                self._arrive()
            else:
                _, number = heapq.heappop(self._wakes)
                if self.replicas[number].wakes_at_s == wakes_at_s:
                    self._wake(self.replicas[number], tops_up=not has_ended)
        self.result.num_steps = sum(each.num_steps for each in self.replicas)
        self.result.num_stopped_steps = sum(each.engine.num_stopped_steps for each in self.replicas)
        self.result.scheduling_s = sum(each.engine.scheduling_s for each in self.replicas)
        return self.result

    @property
    def _arrives_at_s(self) -> float:
        number = self._next_arrival
        return self._arrivals[number].at_s if number < len(self._arrivals) else math.inf

    def _arrive(self) -> None:
        """The next online request comes to the router."""
        number, now_s = self._next_arrival, self.clock.now_s()
        arrival = self._arrivals[number]
        self._next_arrival += 1
        token_ids = prompt_tokens(arrival.prompt)
        routed = RoutedRequest(num_tokens=len(token_ids), keys=token_keys(token_ids))
        placement = self._set.place(routed)
        assert placement is not None, "no replica ever closes"
        replica = self.replicas[int(placement.replica.name)]
        request = _request(number, token_ids, arrival.output_len, ServiceClass.ONLINE, now_s)
        result = OnlineResult(now_s, replica.number)
        self.result.online.append(result)
        self._online[request.request_id] = _Online(result, placement)
        replica.arrive(request)
        self._schedule(replica)

    def _wake(self, replica: SimulatedReplica, *, tops_up: bool) -> None:
        """A step of the replica ends, or the next one may begin."""
        if replica.is_running:
            self._due[replica.number] = replica.end()
        else:
            due, self._due[replica.number] = self._due[replica.number], []
            if self._deliver(replica, due) and tops_up:
                self._top_up()
            replica.begin()
        self._schedule(replica)

    def _deliver(self, replica: SimulatedReplica, outputs: Sequence[TokenOutput]) -> int:
        """Returns: how many offline lines have ended."""
        now_s, num_lines = self.clock.now_s(), 0
        for output in outputs:
            assert output.message is None, f"{output.request_id}: {output.message}"
            online = self._online.get(output.request_id)
            if online is None:
                if output.finish_reason is not None:
                    num_lines += 1
                    self._lines.pop(output.request_id).on_end()
                continue
            online.num_tokens += 1
            if online.num_tokens == 1:
                online.first_at_s = now_s
                online.result.ttft_s = now_s - online.result.arrived_at_s
                online.placement.on_first_token(now_s)
            if output.finish_reason is not None:
                online.result.tpot_s = (now_s - online.first_at_s) / max(online.num_tokens - 1, 1)
                online.placement.on_end()
                del self._online[output.request_id]
        replica.offline_done += num_lines
        return num_lines

    def _report(self, *, tops_up: bool) -> None:
        num_online = array("i")
        for replica in self.replicas:
            report = replica.report()
            num_online.append(report.num_online)
            self._set.report(replica.name, report)
        self.result.num_online.append(num_online)
        if tops_up:
            self._top_up()
        self._share.note(self.clock.now_s() / self._duration_s)

    def _top_up(self) -> None:
        """Send offline lines as long as a replica has room."""
        if self._offline is None:
            return
        while (placement := self._set.place_line(_LINE)) is not None:
            lengths = next(self._offline)
            number = next(self._numbers)
            prompt = prompt_tokens((Segment(answer_number(number), lengths.input_len),))
            request = _request(number, prompt, lengths.output_len, ServiceClass.OFFLINE, self.clock.now_s())
            self._lines[request.request_id] = placement
            replica = self.replicas[int(placement.replica.name)]
            refusal = replica.engine.add(request)
            assert refusal is None, f"{request.request_id}: {refusal}"
            if replica.is_idle:
                replica.wakes_at_s = self.clock.now_s()
                self._schedule(replica)

    def _schedule(self, replica: SimulatedReplica) -> None:
        if not replica.is_idle:
            heapq.heappush(self._wakes, (replica.wakes_at_s, replica.number))

    def _note_totals(self) -> None:
        for replica in self.replicas:
            counters = replica.engine.scheduler.counters
            self.result.counters.append({each: counters[each].copy() for each in ServiceClass})
            self.result.offline_done.append(replica.offline_done)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """A run makes no cycles, and a full collection visits the blocks and contents of every replica."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# Offline prompts share nothing, so a line goes where there is most room.
_LINE = RoutedRequest(num_tokens=1)


@cache
def _sampling(output_len: int) -> SamplingParams:
    return SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)


def _request(
    number: int, token_ids: tuple[int, ...], output_len: int, service_class: ServiceClass, now_s: float
) -> Request:
    return Request(
        request_id=RequestId(str(number)),
        prompt_token_ids=token_ids,
        sampling=_sampling(output_len),
        service_class=service_class,
        arrived_at_s=now_s,
    )
