"""Runs of BlendServe that an operator would not make: their results are invented where they take long."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from typing import get_args
from unittest import mock

import pytest

from backfill.blending.pool import OfflinePool
from backfill.blending.requests import OrderName, PoolRequest
from backfill.blending.resources import ResourceModel
from backfill.core.clock import VirtualClock
from backfill.core.config import SchedulerConfig
from backfill.core.request import RequestId, ServiceClass
from backfill.costs.hardware import load_hardware_profile
from backfill.engine.engine import Engine
from backfill.execution.simulated_executor import SimulatedExecutor
from backfill.simulation.device import exact_behaviour, executor_info
from backfill.simulation.processes import Progress, processes
from experiments.blendserve.feed import PoolFeed
from experiments.blendserve.mix import MixSpec
from experiments.blendserve.overlap import INTERFERENCE, OverlappedCostModel
from experiments.blendserve.pool import HARDWARE, PoolLoop, StepSizes, run_pool, step_tokens
from tests.experiments.small_sources import small_sources
from tests.integrity import check_scheduler

MIX = MixSpec("burstgpt", 0.9, 0.35, 60, 1)
OTHER_ORDERS: tuple[OrderName, ...] = ("random", "dfs", "batchllm")


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


def loop(
    made: Pool, order: OrderName = "blend", kv_tokens: int = 4096, steps: StepSizes = "density"
) -> PoolLoop:
    hardware = replace(load_hardware_profile(HARDWARE), kv_tokens=kv_tokens)
    cost = OverlappedCostModel.of(hardware.costs.cost, INTERFERENCE["blendserve"])
    return PoolLoop(
        made.requests, made.outputs, order, hardware, cost, max_step_tokens=512, seed=1, steps=steps
    )


@pytest.mark.parametrize(
    "order", ["fcfs", "blend", *(pytest.param(each, marks=pytest.mark.slow) for each in OTHER_ORDERS)]
)
def test_every_request_runs_to_its_end(order: OrderName) -> None:
    made = pool()
    running = loop(made, order)
    progress = Progress()
    with processes(1, progress):
        running.run()
    assert progress.num_done == pytest.approx(1.0)
    counters = running.engine.scheduler.counters[ServiceClass.OFFLINE]
    num_prompt_tokens = sum(len(each.prompt_token_ids) for each in made.requests)
    assert counters.num_prefix_queried_tokens == num_prompt_tokens
    computed = counters.num_computed_tokens - counters.num_recomputed_tokens
    assert (
        computed == num_prompt_tokens + sum(made.outputs) - len(made.outputs) - counters.num_prefix_hit_tokens
    )
    assert not running.engine.has_unfinished
    check_scheduler(running.engine.scheduler)


def test_progress_is_that_of_the_longest_output_where_it_outlasts_the_others() -> None:
    running = loop(pool(num_chats=200, num_videos=1, video_tokens=400))
    progress, seen, finish = Progress(), list[float](), running._finish

    def note(request_id: RequestId) -> None:
        seen.append(progress.num_done)
        finish(request_id)

    with processes(1, progress), mock.patch.object(running, "_finish", note):
        running.run()
    assert len(seen) == 201
    assert seen[-2] < 0.5, "the chats have ended, and nearly all tokens are done"
    assert seen[-1] > 0.9


@pytest.mark.parametrize("order", ["dfs", "blend"])
def test_orders_by_prefix_find_every_shared_block(order: OrderName) -> None:
    """Two prefixes of 64 tokens, each computed once, in a pool that holds few requests."""
    running = loop(pool(num_videos=0), order, kv_tokens=1024)
    running.run()
    counters = running.engine.scheduler.counters[ServiceClass.OFFLINE]
    assert counters.num_prefix_hit_tokens == 58 * 64


@pytest.mark.slow  # what is promised: tests/blending/test_estimates.py
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


def test_a_run_is_the_same_again() -> None:
    first, again = loop(pool()), loop(pool())
    for running in (first, again):
        running.run()
    assert first.compute_s == again.compute_s and first.clock.now_s() == again.clock.now_s()


@pytest.mark.slow  # the optimum itself: test_optimal_work.py
def test_a_run_is_no_faster_than_the_optimum() -> None:
    with small_sources():
        result = run_pool(MIX, "blend", "blendserve")
    assert 0.0 < result.of_optimum <= 1.0
    assert 0.9 < result.of_optimal_sharing <= 1.0
    assert result.tokens_per_s == pytest.approx(result.num_tokens / result.seconds)
    assert set(result.num_requests) == {"burstgpt", "mmlu", "openvid"}
    assert len(result.compute_s) == len(result.memory_s) <= result.num_steps


def test_a_step_has_the_compute_that_the_density_needs() -> None:
    """Reading a full cache of 449,105 tokens takes 36 ms; a row at the cheapest size takes 69 us."""
    cost = load_hardware_profile(HARDWARE).costs.cost
    assert step_tokens(cost, 0.8, 449_105) == 512
    assert step_tokens(cost, 1.3, 449_105) == 768
    assert step_tokens(cost, 50.0, 449_105) == 2048


KV_TOKENS = 4096
NUM_LONG, LONG_TOKENS = 150, 120
NUM_SHORT, SHORT_TOKENS = 200, 8
# With these costs the pool's density is 0.7, that of a long answer 0.3 and that of a short one 3.
RESOURCES = ResourceModel(7e-5, 0.0, 3e-6)


class Fed:
    """An engine and its feed from a pool of short requests with long prompts, and of long answers."""

    def __init__(self, order: OrderName, queue_depth: int = 8) -> None:
        hardware = replace(load_hardware_profile(HARDWARE), kv_tokens=KV_TOKENS)
        self.clock = VirtualClock()
        executor = SimulatedExecutor(executor_info(hardware, 0), exact_behaviour(hardware.costs), self.clock)
        config = SchedulerConfig(policy="fcfs", max_num_seqs=256, max_num_batched_tokens=512)
        self.engine = Engine(config, executor, self.clock)
        requests, outputs = [], []
        for number in range(NUM_LONG + NUM_SHORT):
            is_long = number < NUM_LONG
            prompt = array("I", [1000 + number, *[7] * (20 if is_long else 150)])
            outputs.append(LONG_TOKENS if is_long else SHORT_TOKENS)
            requests.append(PoolRequest(number, prompt, LONG_TOKENS, outputs[-1]))
        self.pool = OfflinePool(order, RESOURCES, kv_tokens=KV_TOKENS)
        self.pool.add(requests)
        self.feed = PoolFeed(
            self.engine,
            self.clock,
            self.pool,
            requests,
            outputs,
            queue_depth=queue_depth,
        )

    def step(self, num_online_tokens: int = 0) -> list[int]:
        """Returns: the requests that ended."""
        self.feed.top_up(num_online_tokens)
        outputs = self.engine.step()
        ended = [each.request_id for each in outputs if each.finish_reason is not None]
        for request_id in ended:
            self.feed.finish(request_id)
        self.feed.on_step()
        return [int(request_id) for request_id in ended]


def test_the_engine_queue_is_short() -> None:
    fed = Fed("fcfs", queue_depth=3)
    fed.feed.top_up()
    assert list(fed.feed.in_flight) == [RequestId(str(number)) for number in range(3)]
    assert fed.engine.scheduler.count_by_class()[ServiceClass.OFFLINE] == (0, 3)


def test_memory_bound_requests_leave_room_for_compute_bound_ones() -> None:
    """All long answers need five times the KV cache. Without KV kept for the short ones, 91 of them end."""
    fed = Fed("blend")
    ended = [number for _ in range(150) for number in fed.step()]
    assert sum(number >= NUM_LONG for number in ended) > 130
    assert sum(number < NUM_LONG for number in ended) > 10
    assert fed.engine.scheduler.counters[ServiceClass.OFFLINE].num_preemptions == 0


@pytest.mark.parametrize("order", ["fcfs", pytest.param("blend", marks=pytest.mark.slow)])
def test_the_kv_of_online_requests_is_left_to_them(order: OrderName) -> None:
    fed, alone = Fed(order), Fed(order)
    most = 0
    for _ in range(300):
        fed.step(num_online_tokens=KV_TOKENS // 2)
        alone.step()
        most = max(most, sum(each.num_tokens for each in fed.feed.in_flight.values()))
    assert 0 < most <= KV_TOKENS // 2
    assert len(alone.feed.in_flight) > len(fed.feed.in_flight)


def test_a_request_that_fits_no_more_joins_an_idle_engine() -> None:
    fed = Fed("fcfs")
    fed.feed.top_up(num_online_tokens=KV_TOKENS)
    assert len(fed.feed.in_flight) == 1


@pytest.mark.parametrize("order", ["dfs", "blend"])
def test_the_pool_learns_how_far_requests_are(order: OrderName) -> None:
    fed = Fed(order)
    with mock.patch.object(fed.pool, "note_progress") as note_progress:
        for _ in range(32):
            fed.step()
    told = {call.args for call in note_progress.call_args_list}
    running = {int(each.request_id): len(each.output_token_ids) for each in fed.feed.in_flight.values()}
    assert told and told <= set(running.items())


@pytest.mark.parametrize("order", [pytest.param("dfs", marks=pytest.mark.slow), "blend"])
def test_steps_are_sized_alike_in_every_order(order: OrderName) -> None:
    sizes = dict[StepSizes, set[int]]()
    for steps in get_args(StepSizes):
        running = loop(pool(), order, steps=steps)
        running._feed.top_up()
        sizes[steps] = set()
        while running.engine.has_work:
            running.step()
            sizes[steps].add(running._policy.step_tokens)
    assert sizes["fixed"] == {512}
    assert len(sizes["density"]) > 1 and max(sizes["density"]) <= 512
