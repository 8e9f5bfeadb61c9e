from __future__ import annotations

from array import array
from dataclasses import replace
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
from experiments.blendserve.feed import PoolFeed
from experiments.blendserve.pool import HARDWARE

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
            is_blend=order == "blend",
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


@pytest.mark.parametrize("order", ["fcfs", "dfs", "blend"])
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


def test_the_pool_learns_how_far_requests_are_under_blend_only() -> None:
    for order, is_told in (("dfs", False), ("blend", True)):
        fed = Fed("blend" if order == "blend" else "dfs")
        with mock.patch.object(fed.pool, "note_progress") as note_progress:
            for _ in range(32):
                fed.step()
        told = {call.args for call in note_progress.call_args_list}
        running = {int(each.request_id): len(each.output_token_ids) for each in fed.feed.in_flight.values()}
        assert bool(told) == is_told
        assert told <= set(running.items())
