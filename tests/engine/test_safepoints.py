"""Stopped steps: whether slices are suspended or discarded, every token is as in an undisturbed run."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from backfill.core.clock import WallClock
from backfill.core.config import PreemptionMode, SchedulerConfig
from backfill.core.plan import Resume, StepPlan
from backfill.core.request import FinishReason, Request, RequestId, ServiceClass
from backfill.costs.load import StepLoad
from backfill.costs.profile import CostProfile
from backfill.engine.engine import Engine
from backfill.execution.create import create_torch_executor
from backfill.execution.stage import Stage
from backfill.execution.torch_executor import TorchExecutor
from backfill.kvcache.content import Evictable
from tests.builders import linear_cost, make_profile
from tests.engine.interruptions import (
    OFFLINE_SHAPES,
    ONLINE_SHAPES,
    SHARED,
    Interruptions,
    all_requests,
    any_interleaving,
    before_layers,
    drain,
    requests,
    run_disturbed,
    stopping_engine,
    tokens_of,
    undisturbed,
)
from tests.execution.tiny import cache_fixture, model_fixture, tiny_config
from tests.integrity import check_scheduler

NUM_LAYERS = 8
NUM_BLOCKS = 36


cache = cache_fixture("module")
model_dir = model_fixture("llama", num_hidden_layers=NUM_LAYERS)


def create_executor(model_dir: Path, num_micro_batches: int, interval: int | str = "none") -> TorchExecutor:
    options: dict[str, Any] = {"num_micro_batches": num_micro_batches, "offload_interval": interval}
    config = tiny_config(model_dir, NUM_BLOCKS, **options)
    executor = create_torch_executor(config)
    executor._model = Interruptions(executor._model)  # type: ignore[assignment]
    return executor


@pytest.fixture(
    scope="module",
    params=[(1, "none"), (2, 2), pytest.param((2, "none"), marks=pytest.mark.slow)],
    ids=["1-micro-batch", "2-micro-batches-offloaded", "2-micro-batches"],
)
def executor(request: pytest.FixtureRequest, model_dir: Path) -> TorchExecutor:
    return create_executor(model_dir, *request.param)


def model_of(executor: TorchExecutor) -> Interruptions:
    model = executor._model
    assert isinstance(model, Interruptions)
    return model


def make_engine(executor: TorchExecutor, **options: Any) -> Engine:
    executor._stage = Stage.whole(NUM_LAYERS)  # the engine of the test before counted its steps from 0 too
    return stopping_engine(executor, **options)


def tokens_after(
    engine: Engine, executor: TorchExecutor, arrivals: dict[tuple[int, int], int], *, prefix_caching: bool
) -> dict[str, list[int]]:
    done = run_disturbed(engine, executor, arrivals)
    assert any(request.num_cached_tokens for request in done) == prefix_caching
    return tokens_of(done)


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> dict[str, list[int]]:
    return undisturbed(create_executor(model_dir, num_micro_batches=1), all_requests())


@pytest.mark.parametrize(
    ("layer", "preemption", "prefix_caching"),
    [
        *((layer, "suspend", True) for layer in range(0, NUM_LAYERS + 1, 2)),
        *((layer, "discard", True) for layer in (0, 4, NUM_LAYERS)),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                *((layer, "suspend", True) for layer in range(1, NUM_LAYERS, 2)),
                (2, "suspend", False),
                (4, "discard", False),
            )
        ),
    ],
)
def test_an_arrival_at_any_point_of_a_step_changes_no_token(
    executor: TorchExecutor,
    expected: dict[str, list[int]],
    layer: int,
    preemption: PreemptionMode,
    prefix_caching: bool,
) -> None:
    arrivals = {(step, layer): step - 1 for step in (1, 2, 3)}
    num_split_steps = model_of(executor).num_split_steps
    engine = make_engine(executor, preemption=preemption, prefix_caching=prefix_caching)
    assert tokens_after(engine, executor, arrivals, prefix_caching=prefix_caching) == expected
    assert (model_of(executor).num_split_steps > num_split_steps) == (
        executor._streams.num_micro_batches == 2
    )
    assert engine.num_stopped_steps <= len(ONLINE_SHAPES)
    if preemption == "suspend" and layer < NUM_LAYERS // 2:
        assert engine.num_stopped_steps > 0
        assert engine.scheduler.counters[ServiceClass.OFFLINE].num_discarded_tokens == 0


@pytest.mark.parametrize("layer", [1, NUM_LAYERS // 2, NUM_LAYERS - 2])
def test_what_stops_of_a_flood_for_another_owner_changes_no_token(
    executor: TorchExecutor, model_dir: Path, layer: int
) -> None:
    def wanted() -> list[Request]:
        served = requests(ServiceClass.ONLINE, [(3, 2), (4, 2), *([(5, 9)] * 9)])
        for number, request in enumerate(served):
            request.owner = "chat" if number < 2 else "flood"
        return served

    engine, served = make_engine(executor), wanted()
    first, chat, *flood = served
    arrived = []

    def arrive(rank: int, step: int, at_layer: int) -> None:
        if (step, at_layer) == (5, layer):
            arrived.append(chat)
            engine.arrive(chat)

    before_layers(executor, arrive)
    for request in (first, *flood):
        engine.add(request)
    while not arrived:
        engine.step()
    before_layers(executor, None)
    drain(engine, executor)
    assert engine.num_stopped_steps == 1
    assert engine.scheduler.counters[ServiceClass.ONLINE].num_discarded_tokens == 0
    assert tokens_of(served) == undisturbed(create_executor(model_dir, num_micro_batches=1), wanted())


@any_interleaving(16, 25, NUM_LAYERS)
def test_any_interleaving_yields_the_undisturbed_tokens_and_leaks_nothing(
    executor: TorchExecutor,
    expected: dict[str, list[int]],
    arrivals: dict[tuple[int, int], int],
    options: dict[str, Any],
) -> None:
    engine = make_engine(executor, **options)
    assert tokens_after(engine, executor, arrivals, prefix_caching=options["prefix_caching"]) == expected
    assert engine.num_stopped_steps <= len(ONLINE_SHAPES)


def stop_the_second_step(executor: TorchExecutor, engine: Engine) -> Request:
    """Offline requests in their second step when an online one arrives; the step is suspended."""
    (online,) = requests(ServiceClass.ONLINE, [(13, 5)])

    def before_layer(layer: int) -> None:
        if [each.plan.step for each in engine._in_flight] == [1] and layer == 1:
            model_of(executor).before_layer = lambda layer: None  # this layer may run for two micro-batches
            engine.arrive(online)

    for request in requests(ServiceClass.OFFLINE, OFFLINE_SHAPES):
        engine.add(request)
    model_of(executor).before_layer = before_layer
    engine.step()
    engine.step()
    model_of(executor).before_layer = lambda layer: None
    assert executor._suspended
    return online


def offline_requests(engine: Engine) -> list[Request]:
    return [engine.scheduler.requests.by_id[RequestId(f"offline-{index}")] for index in range(4)]


def assert_work_was_discarded(engine: Engine, offline: list[Request], expected: dict[str, list[int]]) -> None:
    assert engine.scheduler.counters[ServiceClass.OFFLINE].num_discarded_tokens > 0
    for request in offline:
        assert request.output_token_ids == expected[request.request_id]


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_suspended_request_can_be_aborted(
    executor: TorchExecutor, expected: dict[str, list[int]], prefix_caching: bool
) -> None:
    engine = make_engine(executor, prefix_caching=prefix_caching)
    stop_the_second_step(executor, engine)
    survivor = offline_requests(engine)[1]
    engine.abort([RequestId(f"offline-{index}") for index in (0, 2, 3)])
    check_scheduler(engine.scheduler)
    drain(engine, executor)
    assert survivor.output_token_ids == expected["offline-1"]


def test_when_all_suspended_requests_are_aborted_nothing_is_kept(executor: TorchExecutor) -> None:
    engine = make_engine(executor)
    online = stop_the_second_step(executor, engine)
    engine.abort([RequestId(f"offline-{index}") for index in range(4)])
    check_scheduler(engine.scheduler)
    drain(engine, executor)
    assert online.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_suspended_requests_can_be_preempted(
    executor: TorchExecutor, expected: dict[str, list[int]], prefix_caching: bool
) -> None:
    engine = make_engine(executor, prefix_caching=prefix_caching)
    stop_the_second_step(executor, engine)
    offline = offline_requests(engine)
    free = engine.scheduler.kv.counts.available(Evictable.ALL)
    (large,) = requests(ServiceClass.ONLINE, [(8 * (free + 3) - len(SHARED), 2)])
    large.request_id = RequestId("large")
    engine.arrive(large)
    drain(engine, executor)
    assert large.finish_reason is FinishReason.LENGTH
    assert sum(request.num_preemptions for request in offline) > 0
    assert_work_was_discarded(engine, offline, expected)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_suspended_slices_of_which_no_layer_fits_are_discarded_so_that_offline_work_continues(
    executor: TorchExecutor, expected: dict[str, list[int]], prefix_caching: bool
) -> None:
    engine = make_engine(executor, prefix_caching=prefix_caching)
    stop_the_second_step(executor, engine)
    offline = offline_requests(engine)
    resume_s = engine.scheduler.policy.resume_s
    engine.scheduler.policy.resume_s = lambda view: min(resume_s(view), 1e-6)  # type: ignore[method-assign]
    drain(engine, executor)
    assert_work_was_discarded(engine, offline, expected)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_suspended_slices_resume_in_groups_that_fit(
    executor: TorchExecutor, expected: dict[str, list[int]], prefix_caching: bool
) -> None:
    engine = make_engine(executor, prefix_caching=prefix_caching)
    stop_the_second_step(executor, engine)
    offline, suspended = offline_requests(engine), len(engine.scheduler._suspension.requests)
    predictor = engine.predictor
    assert predictor is not None and suspended > 1
    smallest = min(
        engine.scheduler._suspension._groups[0].slices, key=lambda each: (each.num_tokens, each.start)
    )
    layer_s = predictor.cost.step_time_s(StepLoad.of_slices([smallest])) / executor.info.num_layers
    engine.scheduler.policy.resume_s = lambda view: 1.01 * layer_s  # type: ignore[method-assign]
    resumed, plan_step = [], engine.scheduler.plan_step

    def counted(now_s: float) -> StepPlan:
        plan = plan_step(now_s)
        if isinstance(plan.work, Resume):
            resumed.append(len(plan.slices))
        return plan

    engine.scheduler.plan_step = counted  # type: ignore[method-assign]
    drain(engine, executor)
    assert resumed and max(resumed) < suspended, "some of them at a time, layer by layer"
    for request in offline:
        assert request.output_token_ids == expected[request.request_id]


def test_a_stop_meant_for_the_step_before_stops_nothing(executor: TorchExecutor) -> None:
    engine = make_engine(executor)
    for request in requests(ServiceClass.OFFLINE, OFFLINE_SHAPES):
        engine.add(request)
    engine.step()
    executor.request_stop(0)
    engine.step()
    assert engine.num_stopped_steps == 0
    assert not executor._suspended
    drain(engine, executor)


def test_a_request_arriving_twice_stops_a_step_once(executor: TorchExecutor) -> None:
    engine = make_engine(executor)
    stop_the_second_step(executor, engine)
    executor.request_stop(0)  # of a step that is over
    assert engine.num_stopped_steps == 1
    drain(engine, executor)
    assert engine.num_stopped_steps == 1


def test_a_request_that_arrives_while_the_step_is_planned_stops_it(executor: TorchExecutor) -> None:
    engine = make_engine(executor)
    for request in requests(ServiceClass.OFFLINE, OFFLINE_SHAPES):
        engine.add(request)
    (online,) = requests(ServiceClass.ONLINE, [(13, 5)])
    plan_step = engine.scheduler.plan_step

    def plan_while_one_arrives(now_s: float) -> StepPlan:
        plan = plan_step(now_s)
        if plan.step == 1:
            engine.arrive(online)
        return plan

    engine.scheduler.plan_step = plan_while_one_arrives  # type: ignore[method-assign]
    engine.step()
    engine.step()
    assert engine.num_stopped_steps == 1
    drain(engine, executor)


def test_the_engine_takes_an_arrival_from_another_thread_during_a_step(executor: TorchExecutor) -> None:
    executor._stage = Stage.whole(NUM_LAYERS)
    profile: CostProfile = make_profile(linear_cost(token_s=0.01, step_s=0.1))
    config = SchedulerConfig(policy="slo", max_stop_s=1e-9, ttft_slo=5.0, tpot_slo=3.0)
    engine = Engine(config, executor, WallClock(), profile)
    for request in requests(ServiceClass.OFFLINE, OFFLINE_SHAPES):
        engine.add(request)
    (online,) = requests(ServiceClass.ONLINE, [(13, 5)])
    online.arrived_at_s = time.monotonic()
    is_inside, has_arrived = threading.Event(), threading.Event()

    def before_layer(layer: int) -> None:
        if layer == 0 and not has_arrived.is_set():
            is_inside.set()
            assert has_arrived.wait(60.0)

    def arrive() -> None:
        assert is_inside.wait(60.0)
        engine.arrive(online)
        has_arrived.set()

    model_of(executor).before_layer = before_layer
    thread = threading.Thread(target=arrive)
    thread.start()
    engine.step()
    thread.join()
    assert engine.num_stopped_steps == 1
    stopped = engine.stats().step
    assert stopped.stopped
    assert stopped.stop_latency_s is not None
    model_of(executor).before_layer = lambda layer: None
    drain(engine, executor)
