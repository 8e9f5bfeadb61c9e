"""Several steps in flight: random schedules against an executor that knows the contents of every slot."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Any, get_args

import pytest

from backfill.core.clock import VirtualClock
from backfill.core.config import (
    CheckpointingName,
    KVLayoutName,
    PolicyName,
    PreemptionMode,
    RestoreMode,
)
from backfill.core.plan import Compute, Resume, Safepoints, ScheduledSlice, StepPlan
from backfill.core.request import FinishReason, Request, RequestId, RequestStatus, ServiceClass
from backfill.core.slo import SLO
from backfill.execution.simulated_executor import hashed_token
from backfill.scheduling.in_flight import StepsInFlight
from tests.builders import InFlightExecutor, linear_cost, make_request
from tests.integrity import check_scheduler
from tests.scheduling.bench import scheduler_of
from tests.scheduling.test_memory_division import ErraticResidency, GivenResidency
from tests.scheduling.test_two_tier_schedules import (
    MAX_STEPS,
    Setting,
    assert_whole,
    shared_prompt,
)
from tests.shared import examples

STAGES = ((2, 2), (1, 3), (1, 2, 1))
OFFLOADING_STAGES = ((6, 6), (5, 7), (5, 6, 5))
SELDOM_CHANGED: tuple[PolicyName, ...] = ("conserve", "priority", "fcfs", "round-robin")


class Flight:
    """A scheduler, and an executor with several steps in flight, which are collected at any time."""

    def __init__(self, setting: Setting, stages: tuple[int, ...], seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = VirtualClock()
        self.inner = inner = setting.executor(seed, stages)
        residency = None
        if setting.min_interval is not None:
            residency = ErraticResidency(inner.info.residencies, stages, random.Random(seed))
        self.executor = InFlightExecutor(inner, self.rng)
        self.scheduler = scheduler_of(
            setting.config(),
            inner.info,
            linear_cost(step_s=0.001),
            block_copy_s=setting.block_copy_s,
            residency=residency,
        )
        self.in_flight: deque[StepPlan] = deque()
        self.requests: list[Request] = []
        self.aborted: set[str] = set()
        self.num_failed = self.num_suspended = self.num_beside = self.num_lost = 0
        self.num_divisions = 0

    @property
    def may_submit(self) -> bool:
        return len(self.in_flight) < self.executor.info.max_steps_in_flight

    @property
    def unfinished(self) -> list[Request]:
        return [each for each in self.requests if each.finish_reason is None]

    def arrive(self, rng: random.Random, count: int, num_shared: int) -> None:
        """A few requests, of which two or three fill the pool."""
        now_s = self.clock.now_s()
        for _ in range(count):
            prompt_tokens = rng.randint(1, 36)
            is_online = rng.random() < 0.4
            request = make_request(
                prompt_tokens,
                rng.randint(1, 48 - prompt_tokens),
                request_id=f"r{len(self.requests)}",
                prompt_token_ids=shared_prompt(prompt_tokens, num_shared, len(self.requests) % 2),
                service_class=ServiceClass.ONLINE if is_online else ServiceClass.OFFLINE,
                arrived_at_s=now_s,
                slo=rng.choice((None, SLO(0.05, 0.01))) if is_online else None,
                complete_by_s=None if is_online else rng.choice((None, now_s + 0.2)),
                owner=rng.choice(("", "", "", "other")),
                ignore_eos=True,
            )
            self.requests.append(request)
            self.inner.namespaces[request.request_id] = request.owner
            self.scheduler.add(request)

    def abort(self, request: Request) -> None:
        """One that is in flight ends when its step commits."""
        self.aborted.add(request.request_id)
        assert self.scheduler.finish(request.request_id, FinishReason.ABORT) is request
        is_in_flight = request.request_id in self.scheduler.in_flight.slices
        assert (request.status is RequestStatus.FINISHED) is not is_in_flight
        check_scheduler(self.scheduler)

    def submit(self) -> bool:
        """Returns: whether there was something to do beside the steps in flight."""
        division = self.scheduler._division
        plan = self.scheduler.plan_step(self.clock.now_s())
        check_scheduler(self.scheduler)
        if division is not None and plan.slices:
            assert not division.waits_for_steps
        assert plan.offload_interval is None or not plan.does_nothing, "no executor is told of it"
        if self.in_flight and plan.does_nothing:
            return False
        self.num_beside += bool(self.in_flight)
        self.num_divisions += plan.memory is not None
        self.executor.submit(plan)
        self.in_flight.append(plan)
        self.clock.advance(0.0005)
        return bool(plan.slices)

    def collect(self) -> None:
        plan = self.in_flight.popleft()
        self.clock.advance(plan.predicted_s or 0.001)
        aborted = set(self.aborted)
        try:
            outcome = self.executor.collect()
        except RuntimeError:
            self.num_failed += 1
            for request in self.scheduler.fail(plan):
                is_aborted = request.request_id in aborted
                assert request.finish_reason is (FinishReason.ABORT if is_aborted else FinishReason.ERROR)
        else:
            self.num_suspended += bool(outcome.suspended)
            dropped = aborted | self.scheduler.in_flight.lost
            self.num_lost += bool(self.scheduler.in_flight.lost & _names(plan))
            committed = self.scheduler.commit(plan, outcome, self.clock.now_s())
            names = {token.request.request_id for token in committed}
            assert names == {sampled.request_id for sampled in outcome.sampled} - dropped
        over = _names(plan) - self.scheduler.in_flight.slices.keys()
        assert aborted.isdisjoint({each.request_id for each in self.unfinished} & over)
        check_scheduler(self.scheduler)

    def step(self) -> None:
        """As an engine's: as many steps are in flight as may be."""
        while self.may_submit and self.submit():
            pass
        self.collect()

    def end(self) -> None:
        """All requests to their end. Their tokens are those that one step in flight gives."""
        num_steps = 0
        while self.in_flight or self.scheduler.has_work:
            self.step()
            num_steps += 1
            assert num_steps < MAX_STEPS, "it hangs"
        assert_whole(self.scheduler.kv)
        assert not self.inner.num_tokens, "the executor was told to forget all"
        for request in self.requests:
            positions = range(request.num_prompt_tokens, request.num_tokens)
            expected = [hashed_token(request.request_id, each, self.inner.info) for each in positions]
            assert request.output_token_ids == expected
            if request.finish_reason is FinishReason.LENGTH:
                assert len(expected) == request.sampling.max_tokens
            elif request.finish_reason is FinishReason.ABORT:
                assert request.request_id in self.aborted
            else:
                assert request.finish_reason is FinishReason.ERROR and self.num_failed


def _names(plan: StepPlan) -> set[str]:
    return {scheduled.request_id for scheduled in plan.slices}


def crowded_flight(rng: random.Random, layouts: Sequence[tuple[int, ...]] = STAGES, **setting: Any) -> Flight:
    """More requests of both classes than the pool holds, some of which are aborted."""
    most = Setting(max_num_seqs=rng.randint(2, 6), **setting)
    flight = Flight(most, rng.choice(layouts), rng.getrandbits(32))
    for _ in range(60):
        if rng.random() < 0.15 and len(flight.requests) < 24:
            flight.arrive(rng, rng.randint(1, 6), rng.choice((0, 0, 9, 24)))
        if rng.random() < 0.05 and flight.unfinished:
            flight.abort(rng.choice(flight.unfinished))
        if flight.may_submit and (not flight.in_flight or rng.random() < 0.7):
            flight.submit()
        else:
            flight.collect()
    flight.end()
    return flight


@pytest.mark.parametrize(
    "policy",
    ["slo", "bros", *(pytest.param(each, marks=pytest.mark.slow) for each in SELDOM_CHANGED)],
)
def test_crowded_schedules_compute_every_token_from_its_own_context(policy: PolicyName) -> None:
    num_beside = num_preempted = num_restored = num_followed = 0
    num_seeds = examples(8)
    for seed in range(num_seeds):
        rng = random.Random(f"{policy} {seed}")
        flight = crowded_flight(
            rng,
            policy=policy,
            checkpointing=rng.choice(get_args(CheckpointingName)),
            restore=rng.choice(get_args(RestoreMode)),
            num_host_blocks=rng.choice((0, 3, 20)),
            max_num_batched_tokens=rng.choice((5, 12, 32)),
            can_stop=False,
            block_copy_s=rng.choice((None, 0.02)),
            fails=rng.choice((0.0, 0.05)),
            prefix_caching=rng.random() < 0.7,
            kv_layout=rng.choice(get_args(KVLayoutName)),
        )
        num_beside += flight.num_beside
        num_preempted += sum(each.num_preemptions for each in flight.requests)
        num_restored += flight.inner.num_copies["restore"]
        num_followed += flight.executor.num_followed
    assert num_followed > 1.25 * num_seeds and num_restored > 1.25 * num_seeds
    assert num_beside > 12.5 * num_seeds and num_preempted > 2.5 * num_seeds


@pytest.mark.parametrize("preemption", get_args(PreemptionMode))
@pytest.mark.parametrize("policy", ["slo", pytest.param("conserve", marks=pytest.mark.slow)])
def test_steps_that_are_stopped_beside_others(policy: PolicyName, preemption: PreemptionMode) -> None:
    num_suspended = num_discarded = 0.0
    for seed in range(examples(4)):
        rng = random.Random(f"{policy} {preemption} {seed}")
        flight = crowded_flight(
            rng,
            policy=policy,
            preemption=preemption,
            can_stop=True,
            fails=rng.choice((0.0, 0.05)),
            kv_layout=rng.choice(get_args(KVLayoutName)),
        )
        num_suspended += flight.num_suspended
        num_discarded += flight.scheduler.counters[ServiceClass.OFFLINE].num_discarded_tokens
    assert num_discarded > 0
    assert (num_suspended > 10) is (preemption == "suspend")


@pytest.mark.parametrize(
    ("policy", "preemption", "kv_layout"),
    [
        ("slo", "suspend", "bidirectional"),
        pytest.param("slo", "discard", "unidirectional", marks=pytest.mark.slow),
        pytest.param("bros", "suspend", "unidirectional", marks=pytest.mark.slow),
        ("bros", "discard", "bidirectional"),
    ],
)
def test_memory_changes_hands_beside_steps_in_flight(
    policy: PolicyName, preemption: PreemptionMode, kv_layout: KVLayoutName
) -> None:
    num_moves = num_divisions = num_beside = 0
    for seed in range(examples(4)):
        rng = random.Random(f"{policy} {preemption} {kv_layout} {seed}")
        flight = crowded_flight(
            rng,
            OFFLOADING_STAGES,
            policy=policy,
            preemption=preemption,
            min_interval=1,
            can_stop=True,
            num_host_blocks=rng.choice((0, 3, 20)),
            fails=rng.choice((0.0, 0.05)),
            kv_layout=kv_layout,
        )
        num_moves += flight.inner.num_moves
        num_divisions += flight.num_divisions
        num_beside += flight.num_beside
    assert num_moves > 0 and num_divisions > 10 and num_beside > 50


def grown_flight(num_online: int, num_offline: int, num_tokens: int) -> tuple[Flight, GivenResidency]:
    """Two stages, whose memory is given to KV, and requests that are computing their outputs."""
    setting = Setting(policy="slo", min_interval=1, num_host_blocks=0, max_num_seqs=8, prefix_caching=False)
    flight = Flight(setting, (6, 6), 0)
    division = flight.scheduler._division
    assert division is not None
    division.policy = policy = GivenResidency(division.policy.choices, (6, 6))
    policy.target = policy.choices[0]
    for number in range(num_online + num_offline):
        service_class = ServiceClass.ONLINE if number < num_online else ServiceClass.OFFLINE
        request = make_request(
            8, num_tokens, request_id=f"r{number}", service_class=service_class, ignore_eos=True
        )
        flight.requests.append(request)
        flight.inner.namespaces[request.request_id] = ""
        flight.scheduler.add(request)
    for _ in range(14):
        flight.step()
    return flight, policy


def test_a_drain_that_cannot_end_leaves_the_pipeline_full_most_of_the_time() -> None:
    """Online requests alone need more than the smaller pool, and are not preempted for it."""
    flight, policy = grown_flight(4, 0, 40)
    policy.target = policy.choices[-1]
    num_full, num_empty = 0, 0
    for _ in range(40):
        while flight.may_submit and flight.submit():
            pass
        if flight.scheduler.kv.resizing.num_draining:
            num_full += len(flight.in_flight) == 2
            num_empty += len(flight.in_flight) == 1
        flight.collect()
    assert num_full > 3 * num_empty > 0
    flight.end()


def test_plans_that_are_not_run_bring_no_preemption_nearer() -> None:
    """An arrival, or the end of another step's copies, makes the engine ask for a plan again."""
    flight, policy = grown_flight(2, 2, 40)
    policy.target = policy.choices[-1]
    division = flight.scheduler._division
    assert division is not None
    while flight.may_submit and flight.submit():
        pass
    before = division._num_short
    for _ in range(20):
        division.prepare(flight.clock.now_s())
    assert division._num_short == before
    flight.end()


def test_a_waiting_request_gets_the_blocks_of_requests_that_are_in_flight_in_turn() -> None:
    """Two offline requests fill the pool, each in a step of its own, so that one is always in flight."""
    flight = Flight(Setting(policy="slo", num_host_blocks=0, prefix_caching=False), (2, 2), 0)
    offline = [
        make_request(
            16, 8, request_id=f"offline-{index}", service_class=ServiceClass.OFFLINE, ignore_eos=True
        )
        for index in range(2)
    ]
    for request in offline:
        flight.scheduler.add(request)
    while not all(request.output_token_ids for request in offline):
        flight.step()
    online = make_request(40, 4, request_id="online", arrived_at_s=flight.clock.now_s(), ignore_eos=True)
    flight.scheduler.add(online)
    assert flight.scheduler.in_flight.slices
    for _ in range(3):
        flight.step()
    assert online.first_scheduled_at_s is not None
    assert [request.num_preemptions for request in offline] == [1, 1]
    flight.requests = [*offline, online]
    flight.end()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_running_request_gets_the_block_of_one_that_is_in_flight(policy: PolicyName) -> None:
    """Of three requests two fit to their ends; the latest gives way, though it is in flight by turns."""
    flight = Flight(Setting(policy=policy, num_host_blocks=0, prefix_caching=False), (2, 2), 0)
    requests = [
        make_request(8, 16, request_id=f"r{index}", arrived_at_s=float(index), ignore_eos=True)
        for index in range(3)
    ]
    for request in requests:
        flight.scheduler.add(request)
    flight.requests = requests
    flight.end()
    assert [request.num_preemptions for request in requests][:2] == [0, 0]
    assert requests[2].num_preemptions >= 1


def offline_plan(step: int, num_layers: int | None = None, predicted_s: float = 1.0) -> StepPlan:
    """One offline slice, computed or resumed for so many layers."""
    slices = (ScheduledSlice(RequestId(f"r{step}"), 0, 8, (), True, True),)
    points = Safepoints(1, suspends=True)
    if num_layers is None:
        return StepPlan(step, Compute(slices, predicted_s, points))
    return StepPlan(step, Resume(slices, num_layers, predicted_s, points))


def test_a_resumed_step_is_predicted_in_the_stages_that_have_its_layers() -> None:
    in_flight = StepsInFlight(2, (5, 5))
    in_flight.add(offline_plan(0, 4, predicted_s=0.4), 1.0, {}, layers_done=4)
    assert in_flight.begins_at_s(1.0) == pytest.approx(1.1)
    plan = offline_plan(1)
    in_flight.add(plan, 1.0, {})
    assert in_flight.waits_s(plan) == pytest.approx(0.1), "it is in the first stage until 1.6"


def test_steps_that_are_stopped_leave_their_stages() -> None:
    in_flight, plans = StepsInFlight(2, (5, 5)), [offline_plan(0), offline_plan(1)]
    for plan in plans:
        in_flight.add(plan, 0.0, {})
    assert in_flight.num_suspendable_tokens == 16
    assert in_flight.begins_at_s(0.1) == pytest.approx(1.0)
    for plan in plans:
        in_flight.stop(plan.step)
    in_flight.remove(plans[0], 0.11, was_stopped=True)
    assert in_flight.begins_at_s(0.11) == pytest.approx(0.11)
    assert in_flight.interval_s(plans[1]) is None, "it does not show how long steps take"
    in_flight.remove(plans[1], 0.12, was_stopped=True)
    in_flight.stop(1)
    assert in_flight.begins_at_s(0.2) == 0.2
