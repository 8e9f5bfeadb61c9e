"""The engine with a pipeline: steps in flight, on the virtual clock."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest

from backfill.core.clock import VirtualClock
from backfill.core.config import PreemptionMode, SchedulerConfig
from backfill.core.plan import Resume, StepOutcome, StepPlan, WeightTransfers
from backfill.core.request import FinishReason, Request, RequestId, ServiceClass
from backfill.core.slo import SLO
from backfill.costs.behaviour import DeviceBehaviour
from backfill.engine.engine import Engine
from backfill.execution.simulated_executor import SimulatedExecutor
from backfill.execution.simulated_pipeline import SimulatedPipeline
from backfill.parallel.executor import merge_transfers
from tests.builders import linear_cost, make_info, make_profile, make_request
from tests.engine.test_engine import NotingBus
from tests.integrity import check_kv

TPOT_S = 0.1
# Of whole steps: 20 ms, and 0.2 ms for each token.
STEP_S, TOKEN_S = 2e-2, 2e-4


class NotingPipeline(SimulatedPipeline):
    """Notes its plans, and how many steps were in flight when each was submitted; some of them fail.

    It says of the time of each step that its stages waited so long for weights.
    """

    failing: Sequence[int] = ()
    stalls_s: Sequence[float] = ()

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self.num_in_front.append(len(self._steps))
        super().submit(plan)

    def collect(self) -> StepOutcome:
        number = self._steps[0].plan.step
        outcome = super().collect()
        if number in self.failing:
            raise RuntimeError("scripted failure")
        transfers = [(stage, WeightTransfers(2, stall_s=each)) for stage, each in enumerate(self.stalls_s)]
        return replace(outcome, weight_transfers=merge_transfers(transfers))

    def __init__(self, *args: object, **named: object) -> None:
        super().__init__(*args, **named)  # type: ignore[arg-type]
        self.plans: list[StepPlan] = []
        self.num_in_front: list[int] = []


@dataclass
class Run:
    """Requests that arrive at their times, in the middle of steps too, and all tokens of each."""

    stages: tuple[int, ...]
    requests: list[Request]
    preemption: PreemptionMode = "suspend"
    policy: str = "slo"
    slowness: float = 1.0
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    failing: Sequence[int] = ()
    step_s: float = STEP_S
    token_at_s: dict[RequestId, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock = VirtualClock()
        is_pipeline = len(self.stages) > 1
        info = replace(
            make_info(1024, 16, max_model_len=4096, num_layers=sum(self.stages)),
            stage_layers=self.stages if is_pipeline else (),
            max_steps_in_flight=len(self.stages),
        )
        device = DeviceBehaviour(linear_cost(self.slowness * TOKEN_S, self.slowness * self.step_s))
        kind = NotingPipeline if is_pipeline else SimulatedExecutor
        self.executor = kind(info, device, self.clock)
        if isinstance(self.executor, NotingPipeline):
            self.executor.failing = self.failing
        config = SchedulerConfig(
            policy=self.policy,  # type: ignore[arg-type]
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            ttft_slo=1.0,
            tpot_slo=TPOT_S,
            preemption=self.preemption,
        )
        self.engine = Engine(
            config, self.executor, self.clock, make_profile(linear_cost(TOKEN_S, self.step_s))
        )
        self.executor.events = self
        self.to_come = sorted(self.requests, key=lambda each: each.arrived_at_s)

    def next_at_s(self) -> float:
        return self.to_come[0].arrived_at_s if self.to_come else math.inf

    def deliver(self) -> None:
        while self.next_at_s() <= self.clock.now_s():
            self.engine.arrive(self.to_come.pop(0))

    def run(self) -> Run:
        while self.to_come or self.engine.has_work:
            if not self.engine.has_work and self.next_at_s() > self.clock.now_s():
                self.clock.advance(self.next_at_s() - self.clock.now_s())
                continue
            self.step()
        assert not self.engine.has_unfinished
        check_kv(self.engine.scheduler.kv)
        return self

    def step(self) -> None:
        self.deliver()
        for output in self.engine.step():
            self.token_at_s.setdefault(output.request_id, []).append(self.clock.now_s())

    @property
    def pipeline(self) -> NotingPipeline:
        assert isinstance(self.executor, NotingPipeline)
        return self.executor

    @property
    def tokens(self) -> dict[str, list[int]]:
        return {each.request_id: each.output_token_ids for each in self.requests}

    @property
    def gaps_s(self) -> list[float]:
        """Between the tokens of online requests, ascending."""
        online = (each for each in self.requests if each.service_class is ServiceClass.ONLINE)
        return sorted(
            late - early for each in online for early, late in pairwise(self.token_at_s[each.request_id])
        )


def workload(num_offline: int, num_online: int, seed: int = 0) -> list[Request]:
    rng, at_s = random.Random(seed), 0.0
    requests = [
        make_request(
            rng.randint(50, 400),
            rng.randint(10, 40),
            request_id=f"offline-{index}",
            service_class=ServiceClass.OFFLINE,
            ignore_eos=True,
        )
        for index in range(num_offline)
    ]
    for index in range(num_online):
        at_s += rng.expovariate(4.0)
        requests.append(
            make_request(
                rng.randint(20, 300),
                rng.randint(2, 30),
                request_id=f"online-{index}",
                arrived_at_s=at_s,
                slo=SLO(1.0, TPOT_S),
                ignore_eos=True,
            )
        )
    return requests


def prompts(count: int, num_tokens: int, max_tokens: int = 2) -> list[Request]:
    names = (f"r{index}" for index in range(count))
    return [make_request(num_tokens, max_tokens, request_id=name, ignore_eos=True) for name in names]


@pytest.fixture(scope="module")
def tokens_of_one() -> dict[str, list[int]]:
    """Of one step in flight."""
    return Run((4,), workload(24, 12)).run().tokens


@pytest.mark.parametrize("preemption", ["suspend", "discard"])
@pytest.mark.parametrize("stages", [(3, 1), (2, 1, 1)])
def test_tokens_are_those_of_one_step_in_flight(
    stages: tuple[int, ...], preemption: PreemptionMode, tokens_of_one: dict[str, list[int]]
) -> None:
    run = Run(stages, workload(24, 12), preemption).run()
    assert run.tokens == tokens_of_one
    most = len(stages) - 1
    if preemption == "suspend":
        most += len(stages) - 1  # of steps that resume
    assert len(stages) - 1 <= max(run.pipeline.num_in_front) <= most


def test_two_stages_compute_side_by_side() -> None:
    """32 decodes take 7.4 ms in one step, or 4.2 ms in two batches that are each in one of the stages."""
    ends = []
    for stages in ((4,), (2, 2)):
        ends.append(Run(stages, prompts(32, 64, 40), policy="fcfs", step_s=1e-3).run().clock.now_s())
    assert ends[1] < 0.7 * ends[0]


@pytest.mark.parametrize("stalls_s", [(0.0, 0.0), (0.8e-3, 0.6e-3), (0.9e-3, 1.3e-3)])
def test_a_bus_learns_how_many_steps_are_in_flight_and_how_far_apart_they_end(
    stalls_s: Sequence[float],
) -> None:
    """16 decodes take 4.2 ms in both stages together, and the stages wait for weights beside each other."""
    run = Run((2, 2), prompts(32, 64, 40), policy="fcfs", step_s=1e-3)
    run.engine._bus = bus = NotingBus()
    run.pipeline.stalls_s = stalls_s
    run.run()
    assert statistics.median(bus.num_in_flight) == max(bus.num_in_flight) == 2
    assert statistics.median(bus.computed_s) == pytest.approx(2.1e-3 - max(stalls_s), rel=0.01)
    assert run.engine.stats().weight_stall_s == pytest.approx(len(run.pipeline.plans) * sum(stalls_s))
    assert all((plan.bus_share == 0.5) == bool(plan.slices) for plan in run.pipeline.plans)


def test_a_step_alone_waits_in_one_stage_after_another() -> None:
    run = Run((2, 2), prompts(1, 8, 40), policy="fcfs", step_s=4e-3)
    run.engine._bus = bus = NotingBus()
    run.pipeline.stalls_s = (1e-3, 0.5e-3)
    run.run()
    assert max(bus.num_in_flight) == 1
    assert statistics.median(bus.computed_s) == pytest.approx(4e-3 + TOKEN_S - 1.5e-3)


def test_batches_in_rotation_are_of_one_size() -> None:
    late = [make_request(8, 30, request_id=f"l{i}", arrived_at_s=0.2, ignore_eos=True) for i in range(7)]
    run = Run((2, 2), [*prompts(12, 8, 40), *late], policy="fcfs")
    sizes = []
    while run.to_come or run.engine.has_work:
        run.step()
        if not run.to_come and run.clock.now_s() < 0.5:
            sizes.append(len(run.pipeline.plans[-1].slices))
    assert {len(plan.slices) for plan in run.pipeline.plans[:6]} == {6}
    assert set(sizes[-6:]) == {9, 10}


def test_a_batch_of_prompts_passes_the_stages_in_several_steps() -> None:
    """The second stage waits for the first step, and computes beside the first stage from then on."""
    run = Run((2, 2), prompts(8, 512), policy="fcfs", step_s=1e-3).run()
    assert [plan.num_tokens for plan in run.pipeline.plans][:3] == [512, 512, 513]
    alone_s = Run((4,), prompts(8, 512), policy="fcfs", step_s=1e-3).run().clock.now_s()
    assert run.clock.now_s() < 0.65 * alone_s


@pytest.mark.parametrize("stages", [(2, 2), (2, 1, 1)])
def test_chunks_of_one_prompt_follow_each_other_through_the_stages(stages: tuple[int, ...]) -> None:
    run = Run(stages, prompts(1, 2048), policy="fcfs", step_s=1e-3).run()
    num_stages, num_chunks = len(stages), -(-2048 // (2048 // (2 * len(stages))))
    last = run.pipeline.plans[num_chunks - 1].slices[0]
    assert last.start + last.num_tokens == 2048 and last.samples
    assert set(run.pipeline.num_in_front[num_stages:num_chunks]) == {num_stages - 1}
    alone = Run((4,), prompts(1, 2048), policy="fcfs", step_s=1e-3).run()
    assert run.tokens == alone.tokens
    (at_s, *_), (alone_at_s, *_) = *run.token_at_s.values(), *alone.token_at_s.values()
    assert at_s < 0.7 * alone_at_s


@pytest.mark.parametrize("failing", [(0,), (1,), (3,), (0, 1)])
def test_a_prompt_with_a_failed_chunk_runs_once_more_behind_those_in_flight(failing: tuple[int, ...]) -> None:
    run = Run((2, 2), prompts(2, 1600), policy="fcfs", failing=failing).run()
    assert run.tokens == Run((4,), prompts(2, 1600)).run().tokens
    first, _ = run.requests
    assert first.was_retried and first.num_preemptions == 1
    assert {each.finish_reason for each in run.requests} == {FinishReason.LENGTH}


def test_an_aborted_prompt_ends_with_the_last_of_its_chunks_in_flight() -> None:
    (prompt,) = prompts(1, 2048)
    run = Run((2, 2), [prompt], policy="fcfs")
    run.step()
    run.engine.submit_steps()
    run.engine.abort([prompt.request_id])
    run.engine.collect_step()
    assert prompt.finish_reason is None and run.engine.has_work
    run.engine.collect_step()
    assert prompt.finish_reason is FinishReason.ABORT
    run.run()
    assert max(each.start for plan in run.pipeline.plans for each in plan.slices) == 1024


@pytest.mark.parametrize(("stages", "slowness"), [((3, 1), 1.3), ((1, 1, 1, 1), 1.0)])
def test_online_requests_keep_their_objectives_on_a_device_of_another_speed(
    stages: tuple[int, ...], slowness: float
) -> None:
    run = Run(stages, workload(40, 16), slowness=slowness).run()
    assert run.engine.predictor is not None
    assert run.engine.predictor.time_scale == pytest.approx(slowness, rel=0.02)
    online = [each for each in run.requests if each.service_class is ServiceClass.ONLINE]
    assert all(run.token_at_s[each.request_id][0] - each.arrived_at_s < 1.0 for each in online)
    assert run.gaps_s[int(0.95 * len(run.gaps_s))] < TPOT_S


def test_an_arrival_fills_the_place_of_a_step_that_is_not_in_flight() -> None:
    """A prompt of 0.1 s is alone, and another one arrives while the first stage computes it."""
    late = make_request(16, 2, request_id="late", arrived_at_s=0.02, ignore_eos=True)
    run = Run((2, 2), [*prompts(1, 400), late], policy="fcfs").run()
    assert [plan.slices[0].request_id for plan in run.pipeline.plans[:2]] == ["r0", "late"]
    assert run.pipeline.num_in_front[1] == 1
    whole_s, stage_s = STEP_S + 400 * TOKEN_S, (STEP_S + 16 * TOKEN_S) / 2
    assert run.token_at_s["r0"][0] == pytest.approx(whole_s)  # type: ignore[index]
    assert run.token_at_s["late"][0] == pytest.approx(whole_s + stage_s)  # type: ignore[index]


def test_an_ended_request_alone_makes_no_step_beside_others() -> None:
    short, long = make_request(8, 1, request_id="short"), make_request(8, 20, request_id="long")
    run = Run((2, 2), [short, long], policy="fcfs").run()
    plans = run.pipeline.plans
    assert all(plan.slices for plan in plans[:-1])
    assert [request_id for plan in plans for request_id in plan.released] == ["short", "long"]


def test_steps_that_another_profile_predicted_do_not_say_how_good_the_new_one_is() -> None:
    run = Run((2, 2), workload(24, 0), slowness=2.0)
    for _ in range(20):
        run.step()
    predictor = run.engine.predictor
    assert predictor is not None and len(run.engine.scheduler.in_flight) == 1
    assert predictor.time_scale > 1.5
    predictor.set_cost_model(linear_cost(2.0 * TOKEN_S, 2.0 * STEP_S))
    run.step()
    assert predictor.time_scale == pytest.approx(1.0)
    for _ in range(10):
        run.step()
    assert predictor.time_scale == pytest.approx(1.0, rel=0.1)


def stoppable(num_layers: int = 10, **changes: Any) -> Run:
    """Two stages full of offline work, in steps of 0.1 s or more, and a chat that arrives at 0.52 s."""
    offline = [
        make_request(
            900, 4, request_id=f"offline-{index}", service_class=ServiceClass.OFFLINE, ignore_eos=True
        )
        for index in range(8)
    ]
    online = make_request(
        16, 2, request_id="online", arrived_at_s=0.52, slo=SLO(1.0, TPOT_S), ignore_eos=True
    )
    return Run((num_layers, num_layers), [*offline, online], max_num_batched_tokens=8192, **changes)


@pytest.mark.parametrize("preemption", ["suspend", "discard"])
def test_an_arrival_stops_all_steps_in_flight_within_a_group_of_layers(preemption: PreemptionMode) -> None:
    run = stoppable(preemption=preemption)
    latencies_s = []
    while run.to_come or run.engine.has_work:
        run.step()
        step = run.engine.stats().step
        if step.stop_latency_s is not None:
            latencies_s.append(step.stop_latency_s)
    assert run.tokens == Run((20,), run.requests).tokens
    if preemption == "discard":
        assert not latencies_s, "the first token is in time without a stop"
        return
    assert len(latencies_s) == 2
    assert max(latencies_s) < 0.02, "a layer and 15 ms"
    # What it waits for, and a step alone.
    assert run.token_at_s[RequestId("online")][0] - 0.52 < 0.02 + STEP_S + 16 * TOKEN_S + 0.001
    resumed = [plan for plan in run.pipeline.plans if isinstance(plan.work, Resume)]
    assert len(resumed) >= 2
    assert max(run.pipeline.num_in_front) == 2, "a resumed step takes the place of no other"
    assert not any(each.was_retried for each in run.requests)


def test_what_was_stopped_is_behind_what_arrived_and_little_is_lost() -> None:
    run, beside = stoppable().run(), stoppable()
    beside.executor.request_stop = lambda step: None  # type: ignore[method-assign]
    beside.run()
    online = RequestId("online")
    assert run.token_at_s[online][0] < beside.token_at_s[online][0] - 0.05
    assert run.clock.now_s() < 1.05 * beside.clock.now_s(), "little is lost"
    predictor = run.engine.predictor
    assert predictor is not None and predictor.time_scale == pytest.approx(1.0, abs=1e-6)


def test_a_failed_step_leaves_those_behind_it() -> None:
    """Two batches of prompts: the first fails, and its requests run once more; then one fails with tokens."""
    requests = prompts(4, 8, 6)
    run = Run((2, 2), requests, policy="fcfs", failing=(0, 4))
    run.step()
    assert run.engine.num_failed_steps_in_a_row == 1
    first, second, *_ = run.pipeline.plans
    assert not run.token_at_s
    run.step()
    assert run.engine.num_failed_steps_in_a_row == 0
    assert set(run.token_at_s) == {each.request_id for each in second.slices}
    run.run()
    plans = run.pipeline.plans
    lost = {each.request_id for plan in plans if plan.step == 4 for each in plan.slices}
    assert lost
    for request in requests:
        is_lost = request.request_id in lost
        assert request.finish_reason is (FinishReason.ERROR if is_lost else FinishReason.LENGTH)
        assert request.was_retried is any(each.request_id == request.request_id for each in first.slices)


def test_an_aborted_request_in_flight_ends_with_its_step() -> None:
    requests = prompts(4, 8, 6)
    run = Run((2, 2), requests, policy="fcfs")
    run.step()
    in_flight = run.engine.scheduler.in_flight.slices
    aborted = next(each for each in requests if each.request_id in in_flight)
    run.engine.abort([aborted.request_id])
    assert aborted.finish_reason is None and run.engine.has_work
    run.step()
    assert aborted.finish_reason is FinishReason.ABORT and aborted.output_token_ids == []
    run.run()
    others = [each for each in requests if each is not aborted]
    assert all(len(each.output_token_ids) == 6 for each in others)
