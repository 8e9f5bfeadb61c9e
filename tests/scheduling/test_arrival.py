from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from backfill.core.clock import VirtualClock
from backfill.core.config import SchedulerConfig
from backfill.core.plan import ScheduledSlice
from backfill.core.request import Request, RequestId, ServiceClass
from backfill.core.slo import SLO
from backfill.costs.behaviour import DeviceBehaviour
from backfill.costs.load import StepLoad
from backfill.engine.engine import Engine
from backfill.execution.simulated_executor import SimulatedExecutor
from backfill.scheduling.arrival import ArrivedPrompt, RunningStep, StopBudget, online_load, should_stop
from tests.builders import linear_cost, make_info, make_profile, make_request
from tests.scheduling.caching import request_of, tokens

COST = linear_cost(token_s=0.001, step_s=1e-9)


def running(
    predicted_s: float = 1.0, *, online_s: float = 0.0, offline_s: float | None = None, suspends: bool = False
) -> RunningStep:
    return RunningStep(
        started_at_s=10.0,
        predicted_s=predicted_s,
        online_s=online_s,
        offline_s=predicted_s - online_s if offline_s is None else offline_s,
        stop_s=0.005,
        suspends=suspends,
    )


def stops(
    step: RunningStep,
    arrived: Sequence[ArrivedPrompt],
    now_s: float,
    online: StepLoad | None = None,
    time_scale: float = 1.0,
    budget: StopBudget | None = None,
) -> bool:
    return should_stop(step, arrived, online or StepLoad(), now_s, COST, time_scale, budget or StopBudget())


@pytest.mark.parametrize(
    ("step", "ttft_deadline_at_s", "now_s", "expected"),
    [
        pytest.param(running(), 11.5, 10.2, False, id="the prompt is in time after the step"),
        pytest.param(running(), 10.9, 10.2, True, id="it would be late, and is in time if the step stops"),
        pytest.param(running(), 10.25, 10.2, False, id="it is late even so"),
        pytest.param(running(online_s=0.99), 10.9, 10.2, False, id="online slices take nearly as long"),
        pytest.param(running(), 10.9, 11.5, False, id="the step is past its predicted end"),
    ],
)
def test_slices_are_discarded_only_where_that_saves_a_first_token(
    step: RunningStep, ttft_deadline_at_s: float, now_s: float, expected: bool
) -> None:
    assert stops(step, [ArrivedPrompt(100, ttft_deadline_at_s)], now_s) is expected


@pytest.mark.parametrize(
    ("step", "now_s", "expected"),
    [
        pytest.param(running(suspends=True), 10.2, True, id="most of the step is left"),
        pytest.param(running(suspends=True), 10.99, False, id="nearly at its end"),
        pytest.param(running(online_s=0.995, suspends=True), 10.2, False, id="online slices take as long"),
        pytest.param(running(online_s=0.2, suspends=True), 10.2, True, id="online slices are short"),
    ],
)
def test_slices_are_suspended_wherever_that_saves_a_wait(
    step: RunningStep, now_s: float, expected: bool
) -> None:
    prompt = ArrivedPrompt(100, ttft_deadline_at_s=100.0)
    assert stops(step, [prompt], now_s) is expected
    assert not stops(step, [], now_s)


def test_a_stop_that_costs_offline_work_is_paid_for_by_a_share_of_it() -> None:
    """Both parts of the step read the weights: 0.2 s for the whole step, 0.16 s for what is left of it."""
    step, budget = running(online_s=0.3, offline_s=0.9, suspends=True), StopBudget()
    prompt = ArrivedPrompt(100, ttft_deadline_at_s=20.0)
    assert step.stop_costs_s(10.2) == pytest.approx(0.2 * (0.8 - 0.005))
    assert not stops(step, [prompt], 10.2, budget=budget)
    budget.earn(10.0)
    assert stops(step, [prompt], 10.2, budget=budget)
    budget.spend(step.stop_costs_s(10.2))
    assert not stops(step, [prompt], 10.2, budget=budget)
    late = ArrivedPrompt(100, ttft_deadline_at_s=10.8)
    assert stops(step, [late], 10.2, budget=budget), "without a stop the first token is late"
    assert stops(running(suspends=True), [prompt], 10.2, budget=budget), "nothing is lost by this one"


def test_a_stop_that_costs_offline_work_saves_more_than_anyone_would_notice() -> None:
    step, budget = running(online_s=0.3, offline_s=0.9, suspends=True), StopBudget()
    budget.earn(100.0)
    saved_s = step.ends_in_s(10.2) - step.ends_stopped_in_s(10.2)
    near, far = (ArrivedPrompt(100, 10.2 + saved_s / share) for share in (0.021, 0.019))
    assert stops(step, [near], 10.2, budget=budget)
    assert not stops(step, [far], 10.2, budget=budget)
    assert stops(step, [far, near], 10.2, budget=budget)
    assert stops(running(suspends=True), [far], 10.2, budget=budget), "nothing is lost by this one"


def test_a_step_of_a_pipeline_is_stopped_only_for_what_cannot_run_beside_it() -> None:
    """0.8 s of the step are left, and half of the arrival's step runs beside it."""
    step = replace(running(suspends=True), overlap=0.5)
    for num_tokens, expected in ((100, True), (1500, True), (1600, False)):
        assert stops(step, [ArrivedPrompt(num_tokens, ttft_deadline_at_s=100.0)], 10.2) is expected
    assert stops(replace(step, overlap=0.0), [ArrivedPrompt(1600, 100.0)], 10.2), "it waits for the outcome"


def test_arrived_prompts_are_computed_together() -> None:
    prompts = [ArrivedPrompt(100, 11.15) for _ in range(2)]
    assert not stops(running(), prompts[:1], 10.2)
    assert stops(running(), prompts, 10.2)


QUEUED_SHORT = StepLoad.of([(0, 100, True)])
QUEUED_LONG = StepLoad.of([(0, 800, True)])
DECODES = StepLoad.of([(50, 1, True)] * 60)


@pytest.mark.parametrize(
    ("online", "time_scale", "ttft_deadline_at_s", "expected"),
    [
        pytest.param(QUEUED_SHORT, 1.0, 11.15, True, id="a queued prompt makes a stop needed"),
        pytest.param(QUEUED_LONG, 1.0, 10.9, False, id="a long queued prompt makes it useless"),
        pytest.param(DECODES, 1.0, 11.13, True, id="many decodes make it needed"),
        pytest.param(DECODES, 1.0, 10.34, False, id="many decodes make it useless"),
        pytest.param(StepLoad(), 1.5, 11.12, True, id="slower steps than predicted make it needed"),
        pytest.param(StepLoad(), 1.5, 10.32, False, id="slower steps than predicted make it useless"),
    ],
)
def test_what_the_next_step_computes_besides_decides(
    online: StepLoad, time_scale: float, ttft_deadline_at_s: float, expected: bool
) -> None:
    prompts = [ArrivedPrompt(100, ttft_deadline_at_s)]
    assert stops(running(), prompts, 10.2, online, time_scale) is expected
    assert stops(running(), prompts, 10.2) is not expected, "the prompt alone decides otherwise"


def test_the_next_step_computes_what_the_running_one_leaves() -> None:
    decode, part, queued = (
        make_request(tokens, request_id=name) for tokens, name in ((8, "d"), (50, "p"), (30, "q"))
    )
    decode.num_computed_tokens, part.num_computed_tokens, queued.num_computed_tokens = 7, 10, 16
    slices = (
        ScheduledSlice(decode.request_id, 7, 1, (), True, False),
        ScheduledSlice(part.request_id, 10, 15, (), False, False),
        ScheduledSlice(RequestId("offline"), 0, 500, (), True, True),
    )
    load = online_load([decode, part], [queued], slices)
    assert load == StepLoad.of([(8, 1, True), (25, 25, True), (16, 14, True)])


class OneArrival:
    """Delivers one request to an engine at an instant."""

    def __init__(self, engine: Engine, request: Request, at_s: float) -> None:
        self._engine, self._request, self._at_s = engine, request, at_s

    def next_at_s(self) -> float:
        return self._at_s

    def deliver(self) -> None:
        self._at_s = math.inf
        self._engine.arrive(self._request)


@pytest.mark.parametrize("num_tokens", [11, 3003])
def test_a_step_is_stopped_for_a_prompt_that_is_cached_but_for_a_few_tokens(num_tokens: int) -> None:
    """The step has 0.19 s left, and computing 3,000 tokens takes 0.3 s: then no stop would help."""
    config, clock, cost = SchedulerConfig(policy="conserve"), VirtualClock(), linear_cost(token_s=1e-4)
    executor = SimulatedExecutor(make_info(num_blocks=2000, num_layers=100), DeviceBehaviour(cost), clock)
    engine = Engine(config, executor, clock, make_profile(cost))
    prompt = tokens("chat", num_tokens)
    engine.add(request_of(prompt[: num_tokens - 3]))
    while engine.has_unfinished:
        engine.step()
    engine.add(request_of(tokens("job", 2000), service_class=ServiceClass.OFFLINE))
    arrived_at_s = clock.now_s() + 0.01
    request = request_of(prompt, arrived_at_s=arrived_at_s, slo=SLO(0.1, 1.0))
    executor.events = OneArrival(engine, request, arrived_at_s)
    while engine.has_unfinished:
        engine.step()
    assert engine.num_stopped_steps == 1
    assert request.first_token_at_s is not None
    assert request.first_token_at_s <= arrived_at_s + 0.1


NUM_DECODES = 60
STEP_TOKENS = 100  # 40 of an offline prompt: more would cost as much a token


def stops_an_engines_step(spare_s: float, *, safepoints: bool = True, bias: float = 1.0) -> bool:
    """Whether an engine stops a step of online decodes and an offline prompt for a prompt of 100 tokens.

    If the step ran to its end, and the prompt were computed after it alone and as fast as predicted, its
    first token would come ``spare_s`` before its deadline. Steps take as long as predicted times ``bias``.
    """
    config = SchedulerConfig(policy="slo", preemption="discard", safepoints=safepoints, tpot_slo=1.0)
    clock = VirtualClock()
    info = make_info(num_blocks=1000, num_layers=100)
    cost = linear_cost(token_s=0.001, step_s=1e-9)
    executor = SimulatedExecutor(info, DeviceBehaviour(cost), clock)
    engine = Engine(config, executor, clock, make_profile(cost))
    for _ in range(NUM_DECODES):
        engine.add(make_request(1, 50, ignore_eos=True))
    engine.step()
    engine.add(make_request(400, 1, service_class=ServiceClass.OFFLINE))
    for _ in range(200 if bias != 1.0 else 0):
        assert engine.predictor is not None
        engine.predictor.observe(1.0, bias)
    arrived_at_s = clock.now_s() + 0.01
    ttft_s = bias * 0.001 * STEP_TOKENS - 0.01 + 0.1 + spare_s
    request = make_request(100, 1, arrived_at_s=arrived_at_s, slo=SLO(ttft_s, 1.0))
    executor.events = OneArrival(engine, request, arrived_at_s)
    engine.step()
    step = engine.stats().step
    assert (step.kind, step.num_tokens) == ("mixed", STEP_TOKENS)
    return step.stopped


def test_an_engine_counts_the_decodes_beside_an_arrived_prompt() -> None:
    assert not stops_an_engines_step(spare_s=-0.01), "with the decodes the prompt is late in any case"
    assert stops_an_engines_step(spare_s=0.04), "with the decodes the prompt would be late after the step"
    assert not stops_an_engines_step(spare_s=0.07)


def test_an_engine_scales_the_next_step_by_the_bias() -> None:
    assert not stops_an_engines_step(spare_s=0.05, bias=1.5), "it takes 0.24 s and not 0.16"
    assert stops_an_engines_step(spare_s=0.11, bias=1.5)
    assert not stops_an_engines_step(spare_s=0.15, bias=1.5)


def test_without_safepoints_no_step_is_stopped() -> None:
    assert not stops_an_engines_step(spare_s=0.04, safepoints=False)
