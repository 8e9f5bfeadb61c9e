"""Times scheduling without a model: plan and commit of a step, and a preemption.

    python benchmarks/scheduling.py --policy bros

Without ``--policy``, under every policy that predicts steps. Goals: plan and commit take at most 1 ms with
256 running and 10,000 queued offline requests, and grow no faster than the batch. The last column is their
share of a step. A quarter of the running requests are online. With a host pool the device pool is full, so
that every new block is checkpointed. No request finds a prefix in the cache: prompts are distinct.

A preemption of a request with 1,000 checkpointed blocks is timed with the taking of all these blocks for
another request: a grown table on the device, evictions of what has a host copy, and no copy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import get_args

from in_process import check_no_prefix_hits

from backfill.core.clock import VirtualClock
from backfill.core.config import PolicyName, SchedulerConfig
from backfill.core.plan import SampledToken, StepOutcome
from backfill.core.request import Request, RequestId, ServiceClass
from backfill.core.sampling import SamplingParams
from backfill.costs.hardware import load_hardware_profile
from backfill.kvcache.content import Evictable
from backfill.kvcache.copies import CopyLimits
from backfill.kvcache.create import create_kv_cache
from backfill.kvcache.manager import KVCacheManager
from backfill.scheduling.objectives import server_slo
from backfill.scheduling.policies.create import create_policy
from backfill.scheduling.prediction import StepPredictor
from backfill.scheduling.scheduler import Scheduler

_BLOCK_SIZE = 16
_PROMPT_TOKENS = 512
_STEPS = 200
_WARM_UP = 600


def time_decisions(
    policy: PolicyName, num_running: int, num_queued: int, *, has_host_pool: bool, num_owners: int = 1
) -> tuple[float, float]:
    """Median seconds to plan and commit a step while ``num_running`` requests decode, and of such a step.

    A quarter of the requests are online. The steps are predicted ones of an A100.
    """
    cost = load_hardware_profile("a100-80g-llama-3-8b").costs.cost
    config = SchedulerConfig(
        max_num_seqs=num_running,
        max_num_batched_tokens=8192,
        policy=policy,
        ttft_slo=1.5,
        tpot_slo=0.11,
        checkpointing="adaptive",
    )
    predictor, slo = StepPredictor(cost), server_slo(config, cost)
    clock = VirtualClock()
    num_blocks = num_running * (_PROMPT_TOKENS + _STEPS + _WARM_UP + _BLOCK_SIZE) // _BLOCK_SIZE
    scheduler = Scheduler(
        config,
        create_kv_cache(config, num_blocks, _BLOCK_SIZE, num_blocks if has_host_pool else 0),
        create_policy(config, predictor, default_slo=slo, can_stop=True),
        predictor=predictor,
        default_slo=slo,
    )
    for index in range(num_running + num_queued):
        is_online = index < num_running // 4
        service_class = ServiceClass.ONLINE if is_online else ServiceClass.OFFLINE
        scheduler.add(_request(index, service_class, owner=f"owner{index % num_owners}"))
    for _ in range(_WARM_UP):  # until every request that fits has its prompt computed
        _step(scheduler, clock)
    assert len(scheduler.requests.running) == num_running
    decision_s, began_at_s = [], clock.now_s()
    for _ in range(_STEPS):
        decision_s.append(_step(scheduler, clock))
    check_no_prefix_hits(scheduler.counters.values())
    return statistics.median(decision_s), (clock.now_s() - began_at_s) / _STEPS


def time_preemption(num_blocks: int) -> tuple[float, float]:
    """Median seconds to preempt a checkpointed request, and to take all its blocks for another one.

    The other one has copies in flight.
    """
    config = SchedulerConfig(checkpointing="eager")
    preempt_s, take_s = [], []
    for _ in range(_STEPS):
        kv = create_kv_cache(config, num_blocks + 8, _BLOCK_SIZE, 2 * num_blocks)
        victim = _request(0, ServiceClass.OFFLINE, num_blocks * _BLOCK_SIZE)
        other = _request(1, ServiceClass.ONLINE, num_blocks * _BLOCK_SIZE)
        _compute(kv, victim, num_blocks * _BLOCK_SIZE)
        limits = CopyLimits(num_blocks, num_blocks)
        copies = kv.take_copies(limits, 0.0).checkpoint
        assert len(copies) == num_blocks
        kv.complete(copies)
        _compute(kv, other, 8 * _BLOCK_SIZE)
        assert len(kv.take_copies(limits, 0.0).checkpoint) == 8
        began = time.perf_counter()
        kv.preempt(victim)
        preempted = time.perf_counter()
        kv.grow(other, (num_blocks + 8) * _BLOCK_SIZE, Evictable.LOSING_NOTHING)
        take_s.append(time.perf_counter() - preempted)
        preempt_s.append(preempted - began)
        assert kv.counts.held(other.request_id) == kv.counts.referenced == num_blocks + 8
        assert kv.match(victim).num_tokens >= (num_blocks - 1) * _BLOCK_SIZE, "nothing is lost"
    return statistics.median(preempt_s), statistics.median(take_s)


def _compute(kv: KVCacheManager, request: Request, num_tokens: int) -> None:
    """Run a request whose first tokens are computed."""
    kv.allocate(request, kv.match(request), Evictable.LOSING_NOTHING)
    kv.start(request)
    kv.grow(request, num_tokens, Evictable.LOSING_NOTHING)
    kv.commit(request, num_tokens)
    request.num_computed_tokens = num_tokens


def _step(scheduler: Scheduler, clock: VirtualClock) -> float:
    began = time.perf_counter()
    plan = scheduler.plan_step(clock.now_s())
    planned_s = time.perf_counter() - began
    clock.advance(plan.predicted_s)
    outcome = StepOutcome(
        tuple(SampledToken(scheduled.request_id, 5) for scheduled in plan.slices if scheduled.samples),
        completed_copies=plan.copies.checkpoint + plan.copies.restore,
    )
    began = time.perf_counter()
    scheduler.commit(plan, outcome, clock.now_s())
    return planned_s + time.perf_counter() - began


def _request(
    index: int, service_class: ServiceClass, num_tokens: int = _PROMPT_TOKENS, owner: str = ""
) -> Request:
    first_token = index * num_tokens  # no two requests share a token
    return Request(
        request_id=RequestId(f"r{index}"),
        prompt_token_ids=range(first_token, first_token + num_tokens),
        sampling=SamplingParams(max_tokens=_STEPS + _WARM_UP, temperature=0.0, ignore_eos=True),
        service_class=service_class,
        owner=owner,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    known = [name for name in get_args(PolicyName) if SchedulerConfig(policy=name).needs_cost_model]
    parser.add_argument("--policy", choices=known, action="append", help="default: all of them")
    policies: list[PolicyName] = parser.parse_args().policy or known
    figures: dict[str, dict[str, float]] = {}
    print("policy    running   queued  owners   host pool   decision, ms   us a request   of a step")
    for policy in policies:
        figures[policy] = {}
        for num_running, num_queued, num_owners, has_host_pool in (
            (32, 10_000, 1, False),
            (64, 10_000, 1, False),
            (128, 10_000, 1, False),
            (256, 10_000, 1, False),
            (256, 2_000, 2, False),
            (256, 2_000, 50, False),
            (256, 0, 1, False),
            (256, 10_000, 1, True),
        ):
            seconds, step_s = time_decisions(
                policy, num_running, num_queued, has_host_pool=has_host_pool, num_owners=num_owners
            )
            of_owners = f"_owners{num_owners}" if num_owners > 1 else ""
            name = f"{num_running}_{num_queued}{of_owners}{'_host' if has_host_pool else ''}"
            figures[policy][name] = seconds
            host = "yes" if has_host_pool else "no"
            print(
                f"{policy:9s} {num_running:7d} {num_queued:8d} {num_owners:7d} {host:>11s} "
                f"{seconds * 1e3:12.3f} {seconds / num_running * 1e6:14.2f} {seconds / step_s:11.2%}"
            )
    preemptions = {num_blocks: time_preemption(num_blocks) for num_blocks in (100, 1000)}
    for num_blocks, (preempt_s, take_s) in preemptions.items():
        print(f"{num_blocks} checkpointed blocks are preempted in {preempt_s * 1e6:.0f} us")
        print(f"    and taken for another request in {take_s * 1e6:.0f} us")
    print(json.dumps({"benchmark": "scheduling", "decision_s": figures, "preempt_take_s": preemptions}))


if __name__ == "__main__":
    main()
