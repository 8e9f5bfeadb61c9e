"""Times scheduling without a model: plan and commit of a step under the ``slo`` policy, and a reclaim.

    python benchmarks/scheduling.py

Goals: plan and commit take at most 1 ms with 256 running and 10,000 queued offline requests, and grow no
faster than the batch; reclaiming 1,000 checkpointed blocks takes at most 100 us. A quarter of the running
requests are online. With a host pool the device pool is full, so that every new block is checkpointed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from backfill.core.clock import VirtualClock
from backfill.core.config import SchedulerConfig
from backfill.core.plan import SampledToken, StepOutcome
from backfill.core.request import Request, RequestId, ServiceClass
from backfill.core.sampling import SamplingParams
from backfill.costs.hardware import load_hardware_profile
from backfill.kvcache.block_manager import BlockManager
from backfill.scheduling.create import create_policy
from backfill.scheduling.scheduler import Scheduler

_BLOCK_SIZE = 16
_PROMPT_TOKENS = 512
_STEPS = 200
_WARM_UP = 600


def time_decisions(num_running: int, num_queued: int, *, has_host_pool: bool) -> float:
    """Median seconds to plan and commit a step while ``num_running`` requests decode."""
    cost = load_hardware_profile("a100-80g-llama-3-8b").costs.cost
    config = SchedulerConfig(
        max_num_seqs=num_running,
        max_num_batched_tokens=8192,
        policy="slo",
        ttft_slo=1.5,
        tpot_slo=0.11,
        checkpointing="adaptive",
    )
    clock = VirtualClock()
    num_blocks = num_running * (_PROMPT_TOKENS + _STEPS + _WARM_UP + _BLOCK_SIZE) // _BLOCK_SIZE
    scheduler = Scheduler(
        config,
        BlockManager(num_blocks, _BLOCK_SIZE, num_blocks if has_host_pool else 0),
        create_policy(config, cost, can_stop=True),
        cost=cost,
    )
    for index in range(num_running + num_queued):
        is_online = index < num_running // 4
        scheduler.add(_request(index, ServiceClass.ONLINE if is_online else ServiceClass.OFFLINE))
    for _ in range(_WARM_UP):  # until every request that fits has its prompt computed
        _step(scheduler, clock)
    assert len(scheduler.requests.running) == num_running
    return statistics.median(_step(scheduler, clock) for _ in range(_STEPS))


def time_reclaim(num_blocks: int) -> float:
    """Median seconds to reclaim all blocks of a checkpointed request, while another has copies in flight."""
    request_id, other = RequestId("victim"), RequestId("other")
    times = []
    for _ in range(_STEPS):
        blocks = BlockManager(num_blocks + 8, _BLOCK_SIZE, 2 * num_blocks)
        blocks.grow(request_id, num_blocks * _BLOCK_SIZE)
        blocks.checkpoint(request_id, num_blocks * _BLOCK_SIZE, num_blocks)
        blocks.complete(blocks.take_copies()[0])
        blocks.grow(other, 8 * _BLOCK_SIZE)
        blocks.checkpoint(other, 8 * _BLOCK_SIZE, 8)
        began = time.perf_counter()
        kept = blocks.reclaim(request_id, num_blocks * _BLOCK_SIZE)
        times.append(time.perf_counter() - began)
        assert kept == num_blocks * _BLOCK_SIZE and blocks.num_free_blocks == num_blocks
    return statistics.median(times)


def _step(scheduler: Scheduler, clock: VirtualClock) -> float:
    began = time.perf_counter()
    plan = scheduler.plan_step(clock.now_s())
    planned_s = time.perf_counter() - began
    clock.advance(plan.predicted_s)
    outcome = StepOutcome(
        tuple(SampledToken(scheduled.request_id, 5) for scheduled in plan.slices if scheduled.samples),
        completed_copies=plan.checkpoint + plan.restore,
    )
    began = time.perf_counter()
    scheduler.commit(plan, outcome, clock.now_s())
    return planned_s + time.perf_counter() - began


def _request(index: int, service_class: ServiceClass) -> Request:
    return Request(
        request_id=RequestId(f"r{index}"),
        prompt_token_ids=range(_PROMPT_TOKENS),
        sampling=SamplingParams(max_tokens=_STEPS + _WARM_UP, temperature=0.0, ignore_eos=True),
        service_class=service_class,
    )


def main() -> None:
    argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0]).parse_args()
    figures = {}
    print("running   queued   host pool   decision, ms (median)   us a running request")
    for num_running, num_queued, has_host_pool in (
        (32, 10_000, False),
        (64, 10_000, False),
        (128, 10_000, False),
        (256, 10_000, False),
        (256, 0, False),
        (256, 10_000, True),
    ):
        seconds = time_decisions(num_running, num_queued, has_host_pool=has_host_pool)
        figures[f"{num_running}_{num_queued}{'_host' if has_host_pool else ''}"] = seconds
        print(
            f"{num_running:7d} {num_queued:8d} {'yes' if has_host_pool else 'no':>11s} "
            f"{seconds * 1e3:14.3f} {seconds / num_running * 1e6:21.2f}"
        )
    reclaim_s = {num_blocks: time_reclaim(num_blocks) for num_blocks in (100, 1000)}
    for num_blocks, seconds in reclaim_s.items():
        print(f"reclaiming {num_blocks} checkpointed blocks: {seconds * 1e6:.0f} us")
    print(json.dumps({"benchmark": "scheduling", "decision_s": figures, "reclaim_s": reclaim_s}))


if __name__ == "__main__":
    main()
