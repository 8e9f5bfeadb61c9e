from __future__ import annotations

from array import array
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backfill.blending.requests import OrderName, PlannedRequest, PoolRequest
from backfill.core.request import Request, RequestId, ServiceClass
from backfill.core.sampling import SamplingParams
from backfill.costs.hardware import load_hardware_profile
from backfill.costs.overlap import INTERFERENCE, OverlappedCostModel
from backfill.simulation.blend_forecast import MemoryForecast
from backfill.simulation.blend_mix import MixSpec
from backfill.simulation.blend_run import HARDWARE, PoolLoop, PoolRun, run_pool, step_tokens
from tests.simulation.small_sources import small_sources

MIX = MixSpec("burstgpt", 0.9, 0.35, 60, 1)
ORDERS: tuple[OrderName, ...] = ("fcfs", "random", "dfs", "batchllm", "blend")
BLOCK = 16


@dataclass(frozen=True)
class Pool:
    requests: list[PoolRequest]
    outputs: list[int]


def pool(num_chats: int = 60, num_videos: int = 6, video_tokens: int = 300, prefix_tokens: int = 64) -> Pool:
    """Chats of two groups with a prefix each, and videos without one."""
    requests, outputs = [], []
    for number in range(num_chats + num_videos):
        is_video = number >= num_chats
        prefix = [] if is_video else [1 + number % 2] * prefix_tokens
        prompt = array("I", [*prefix, 1000 + number, *[7] * 40])
        length = video_tokens if is_video else 3 + number % 3
        requests.append(PoolRequest(number, prompt, 400, length if is_video else None))
        outputs.append(length)
    return Pool(requests, outputs)


def loop(made: Pool, order: OrderName = "blend", kv_tokens: int = 4096) -> PoolLoop:
    hardware = replace(load_hardware_profile(HARDWARE), kv_tokens=kv_tokens)
    cost = OverlappedCostModel.of(hardware.costs.cost, INTERFERENCE["blendserve"])
    return PoolLoop(made.requests, made.outputs, order, hardware, cost, max_step_tokens=512, seed=1)


@pytest.mark.parametrize("order", ORDERS)
def test_every_request_runs_to_its_end(order: OrderName) -> None:
    made = pool()
    running = loop(made, order)
    running.run()
    counters = running.engine.scheduler.counters[ServiceClass.OFFLINE]
    num_prompt_tokens = sum(len(each.prompt_token_ids) for each in made.requests)
    assert counters.num_prefix_queried_tokens == num_prompt_tokens
    computed = counters.num_computed_tokens - counters.num_recomputed_tokens
    assert (
        computed == num_prompt_tokens + sum(made.outputs) - len(made.outputs) - counters.num_prefix_hit_tokens
    )
    assert not running.engine.has_unfinished
    running.engine.scheduler.check_integrity()


@pytest.mark.parametrize("order", ["dfs", "blend"])
def test_orders_by_prefix_find_every_shared_block(order: OrderName) -> None:
    """Two prefixes of 64 tokens, each computed once, in a pool that holds few requests."""
    running = loop(pool(num_videos=0), order, kv_tokens=1024)
    running.run()
    counters = running.engine.scheduler.counters[ServiceClass.OFFLINE]
    assert counters.num_prefix_hit_tokens == 58 * 64


def test_memory_is_not_promised_twice() -> None:
    """Videos whose lengths are known fit to their ends: none is preempted."""
    running = loop(pool(num_videos=40), kv_tokens=2048)
    running.run()
    assert running.engine.scheduler.counters[ServiceClass.OFFLINE].num_preemptions == 0


def test_each_step_has_its_resources() -> None:
    running = loop(pool())
    running.run()
    assert len(running.compute_s) == len(running.memory_s) > 300
    overlap = INTERFERENCE["blendserve"]
    steps = zip(running.compute_s, running.memory_s, strict=True)
    assert sum(overlap.seconds(*each) for each in steps) == pytest.approx(running.clock.now_s())


def test_a_run_is_the_same_again_and_no_faster_than_the_optimum() -> None:
    with small_sources():
        first, again = (run_pool(PoolRun(MIX, "blend", "blendserve")) for _ in range(2))
    assert first.seconds == again.seconds
    assert 0.0 < first.of_optimum <= 1.0
    assert 0.9 < first.of_optimal_sharing <= 1.0
    assert first.tokens_per_s == pytest.approx(first.num_tokens / first.seconds)
    assert set(first.num_requests) == {"burstgpt", "mmlu", "openvid"}
    assert len(first.compute_s) == len(first.memory_s) <= first.num_steps


def test_a_step_has_the_compute_that_the_density_needs() -> None:
    """Reading a full cache of 449,105 tokens takes 36 ms; a row at the cheapest size takes 69 us."""
    cost = load_hardware_profile(HARDWARE).costs.cost
    assert step_tokens(cost, 0.8, 449_105) == 512
    assert step_tokens(cost, 1.3, 449_105) == 768
    assert step_tokens(cost, 50.0, 449_105) == 2048


def request(number: int, prompt: int) -> Request:
    return Request(
        request_id=RequestId(str(number)),
        prompt_token_ids=[1] * prompt,
        sampling=SamplingParams(max_tokens=1),
        service_class=ServiceClass.OFFLINE,
    )


def test_a_forecast_adds_up_what_is_held_before_each_end() -> None:
    """10 + 90 tokens beside 10 + 40: both hold 50 after 40 steps, and the longer one 100 in the end."""
    forecast = MemoryForecast(100, 0)
    forecast.add(request(0, 10), PlannedRequest(0, 0, 90.0))
    assert forecast.room().most_output_tokens(10) == 40.0
    assert forecast.room().most_output_tokens(11) == 39.5
    assert forecast.room().most_output_tokens(90) == 0.0
    forecast.remove(RequestId("0"))
    assert forecast.room().most_output_tokens(10) == 90.0


def test_a_forecast_looks_past_the_ends_of_others() -> None:
    """After 20 steps the first one ends, and what it held is free."""
    forecast = MemoryForecast(100, 0)
    forecast.add(request(0, 20), PlannedRequest(0, 0, 20.0))
    assert forecast.room().most_output_tokens(40) == 60.0
    assert forecast.room().most_output_tokens(42) == 19.0


def test_a_forecast_takes_short_requests_to_be_followed_by_others() -> None:
    forecast = MemoryForecast(1000, 0)
    forecast.add(request(100, 100), PlannedRequest(100, 0, 400.0))
    assert forecast.room().most_output_tokens(0) == 1000.0
    for number in range(4):
        forecast.add(request(number, 98), PlannedRequest(number, 0, 4.0))
    assert forecast.room().most_output_tokens(0) == 250.0  # (1000 - 4 * 100 - 100) / 2


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(50, 100)), min_size=1, max_size=12))
@settings(max_examples=60)
def test_requests_that_are_admitted_never_hold_more_than_there_is(lengths: list[tuple[int, int]]) -> None:
    """Whatever is added as they decode, one token a step. What fits is not refused for ever."""
    capacity = 400
    forecast = MemoryForecast(capacity, 0)
    running: list[tuple[Request, int]] = []
    waiting = list(enumerate(lengths))
    while running or waiting:
        while waiting:
            number, (prompt, output) = waiting[0]
            if forecast.room().most_output_tokens(prompt) < output:
                break
            waiting.pop(0)
            added = request(number, prompt)
            forecast.add(added, PlannedRequest(number, 0, float(output)))
            running.append((added, prompt + output))
        assert running, "none runs and none fits"
        for each, _ in running:
            each.append(1)
        assert sum(each.num_tokens for each, _ in running) <= capacity
        for each, end in running:
            if each.num_tokens == end:
                forecast.remove(each.request_id)
        running = [(each, end) for each, end in running if each.num_tokens < end]
