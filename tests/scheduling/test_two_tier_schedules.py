"""Whole schedules with two tiers, against an executor that knows the contents of every slot.

Chats of several turns, shared prefixes, two owners, aborts, failing steps, stopped steps and slow copies. All
invariants are checked after every step.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backfill.core.clock import VirtualClock
from backfill.core.config import (
    CheckpointingName,
    KVLayoutName,
    PolicyName,
    PreemptionMode,
    RestoreMode,
    SchedulerConfig,
)
from backfill.core.plan import BlockCopies, CopyDirections, StepPlan
from backfill.core.request import MAX_PAUSES, FinishReason, Request, RequestStatus, ServiceClass
from backfill.core.slo import SLO
from backfill.engine.engine import Engine
from backfill.execution.simulated_executor import hashed_token
from backfill.kvcache.copies import CopyLimits
from backfill.kvcache.manager import KVCacheManager
from backfill.offloading.residency import ResidencyPolicy
from tests.builders import (
    TwoTierExecutor,
    linear_cost,
    make_info,
    make_profile,
    make_request,
    with_residencies,
)
from tests.integrity import check_kv, check_scheduler
from tests.scheduling.bench import scheduler_of
from tests.scheduling.caching import Unforgiving
from tests.shared import examples

BLOCK_SIZE = 4
MAX_STEPS = 3000
OFFLINE = ServiceClass.OFFLINE


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What one schedule runs with."""

    checkpointing: CheckpointingName = "eager"
    restore: RestoreMode = "background"
    policy: PolicyName = "priority"
    preemption: PreemptionMode = "suspend"
    num_blocks: int = 12
    num_host_blocks: int = 12
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 32
    max_prefill_chunk_tokens: int = 32
    can_stop: bool = False
    block_copy_s: float | None = None
    completes: float = 0.4
    fails: float = 0.0
    prefix_caching: bool = True
    kv_layout: KVLayoutName = "unidirectional"
    min_interval: int | None = None  # the pool may be larger with smaller intervals, up to this one

    def config(self) -> SchedulerConfig:
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_prefill_chunk_tokens=min(self.max_num_batched_tokens, self.max_prefill_chunk_tokens),
            policy=self.policy,
            checkpointing=self.checkpointing,
            kv_restore=self.restore,
            preemption=self.preemption,
            prefix_caching=self.prefix_caching,
            kv_layout=self.kv_layout,
            ttft_slo=1.0,
            tpot_slo=0.05,
        )

    def executor(self, seed: int, stages: tuple[int, ...] = ()) -> TwoTierExecutor:
        """Args: stages: layers of each stage of a pipeline, with a step in flight for each."""
        info = make_info(
            self.num_blocks,
            BLOCK_SIZE,
            num_host_blocks=self.num_host_blocks,
            num_layers=4 if self.can_stop else 1,
        )
        if stages:
            layers = stages if self.can_stop else ()
            info = replace(info, max_steps_in_flight=len(stages), stage_layers=layers)
        if self.min_interval is not None:
            info = replace(info, num_layers=sum(stages) or 8, offload_interval=max(stages, default=8))
            info = with_residencies(replace(info, layer_bytes=2), self.min_interval)
        return TwoTierExecutor(
            info, random.Random(seed), completes=self.completes, fails=self.fails, stops=0.4
        )


@dataclass(frozen=True)
class Arrival:
    at_step: int
    request: Request
    aborted_at_step: int | None = None


@dataclass
class Run:
    """A scheduler and its executor; each step takes its predicted time of a virtual clock."""

    setting: Setting
    seed: int = 0
    residency: ResidencyPolicy | None = None
    plans: list[StepPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = VirtualClock()
        self.executor = self.setting.executor(self.seed)
        self.scheduler = scheduler_of(
            self.setting.config(),
            self.executor.info,
            linear_cost(step_s=0.001),
            block_copy_s=self.setting.block_copy_s,
            residency=self.residency,
        )
        self.limits = CopyLimits(0, 0)
        take_copies = self.scheduler.kv.take_copies

        def limited(limits: CopyLimits, copy_cost: float) -> BlockCopies:
            self.limits = limits
            return take_copies(limits, copy_cost)

        self.scheduler.kv.take_copies = limited  # type: ignore[method-assign]

    def step(self) -> StepPlan:
        before = len(self.executor.in_flight)
        plan = self.scheduler.plan_step(self.clock.now_s())
        assert plan.num_tokens <= self.setting.max_num_batched_tokens
        assert len(plan.slices) <= self.setting.max_num_seqs
        begun = self.scheduler.kv.num_copies_in_flight - before
        assert 0 <= begun <= max(0, self.limits.online - before)
        num_checkpoints = len(plan.copies.checkpoint) + len(plan.copies.slot_checkpoint)
        assert CopyDirections.CHECKPOINT in plan.copies.blocking or num_checkpoints <= max(
            0, self.limits.background - before
        )
        self.clock.advance(plan.predicted_s or 0.001)
        self.scheduler.commit(plan, self.executor.run(plan), self.clock.now_s())
        check_scheduler(self.scheduler)
        self.plans.append(plan)
        return plan

    def run(self, arrivals: list[Arrival]) -> None:
        """Run all arrivals to their end, and the releases and copies after them."""
        last = max((arrival.at_step for arrival in arrivals), default=0)
        while len(self.plans) <= last or self.scheduler.has_work:
            for arrival in arrivals:
                if arrival.at_step == len(self.plans):
                    self.executor.namespaces[arrival.request.request_id] = arrival.request.owner
                    self.scheduler.add(arrival.request)
                elif arrival.aborted_at_step == len(self.plans):
                    self.scheduler.finish(arrival.request.request_id, FinishReason.ABORT)
                    check_scheduler(self.scheduler)
            plan = self.step()
            assert not (plan.does_nothing and self.scheduler.has_unfinished), (
                "it stopped with unfinished requests"
            )
            assert len(self.plans) < MAX_STEPS, "it hangs"
        assert_whole(self.scheduler.kv)
        assert not self.executor.num_tokens, "the executor was told to forget all"


def assert_whole(kv: KVCacheManager) -> None:
    check_kv(kv)
    assert kv.counts.referenced == 0
    assert kv.num_copies_in_flight == 0
    assert not kv._tables, "nothing is kept of finished requests but content"


@st.composite
def all_settings(draw: st.DrawFn) -> Setting:
    policy = draw(st.sampled_from(("slo", "conserve", "bros", "priority", "fcfs", "round-robin")))
    return Setting(
        checkpointing=draw(st.sampled_from(get_args(CheckpointingName))),
        restore=draw(st.sampled_from(get_args(RestoreMode))),
        policy=policy,
        preemption=draw(st.sampled_from(get_args(PreemptionMode))),
        num_blocks=draw(st.sampled_from((12, 12, 16, 24))),
        num_host_blocks=draw(st.sampled_from((0, 1, 3, 8, 20))),
        max_num_seqs=draw(st.integers(1, 5)),
        max_num_batched_tokens=draw(st.sampled_from((5, 12, 32))),
        max_prefill_chunk_tokens=draw(st.sampled_from((1, 7, 32))),
        can_stop=policy in ("slo", "conserve") and draw(st.booleans()),
        block_copy_s=draw(st.sampled_from((None, 1.0, 0.02, 0.005))),
        completes=draw(st.sampled_from((0.05, 0.4, 1.0))),
        prefix_caching=draw(st.booleans()),
        kv_layout=draw(st.sampled_from(get_args(KVLayoutName))),
    )


def shared_prompt(num_tokens: int, num_shared: int, family: int) -> list[int]:
    """A prompt whose first tokens are those of its family."""
    shared = [10 + family] * min(num_tokens, num_shared)
    return shared + [20 + (7 * i + num_tokens) % 90 for i in range(num_tokens - len(shared))]


def next_turn(rng: random.Random, arrivals: Sequence[Arrival]) -> tuple[list[int], int, str]:
    """The prompt of a chat that goes on, with answers that are known before they are sampled.

    Returns: it, the step in which it comes, and its owner.
    """
    arrival = rng.choice(arrivals)
    request, info = arrival.request, make_info()
    positions = range(request.num_prompt_tokens, request.num_prompt_tokens + request.sampling.max_tokens)
    answer = [hashed_token(request.request_id, position, info) for position in positions]
    history = [*request.prompt_token_ids, *answer][: rng.randint(1, 35)]
    return [*history, 150 + rng.randrange(40)], arrival.at_step + rng.randint(0, 60), request.owner


def crowd(rng: random.Random) -> list[Arrival]:
    """Requests of both classes, in most cases more than the pool holds; each fits it alone."""
    arrivals: list[Arrival] = []
    for index in range(rng.randint(1, 16)):
        prompt = shared_prompt(rng.randint(1, 36), rng.choice((0, 0, 9, 24)), rng.randint(0, 1))
        at_step, owner = rng.randint(0, 40), rng.choice(("", "", "", "other"))
        if arrivals and rng.random() < 0.3:
            prompt, at_step, owner = next_turn(rng, arrivals)
        request = make_request(
            max_tokens=rng.randint(1, 48 - len(prompt)),
            request_id=f"r{index}",
            prompt_token_ids=prompt,
            service_class=rng.choice((ServiceClass.ONLINE, OFFLINE, OFFLINE)),
            priority=rng.choice((0, 0, 0, -1, 1)),
            owner=owner,
            arrived_at_s=rng.random(),
            slo=rng.choice((None, SLO(0.05, 0.01))),
            complete_by_s=rng.choice((None, None, 0.2)),
        )
        arrivals.append(
            Arrival(at_step, request, rng.choice((None, None, None, at_step + rng.randint(1, 40))))
        )
    return arrivals


@settings(max_examples=examples(40), deadline=None)
@given(setting=all_settings(), seed=st.integers(0, 2**32))
def test_every_token_is_computed_from_its_own_context_and_nothing_is_lost(
    setting: Setting, seed: int
) -> None:
    arrivals = crowd(random.Random(seed))
    Run(setting, seed).run(arrivals)
    for arrival in arrivals:
        request = arrival.request
        assert request.status is RequestStatus.FINISHED
        if request.finish_reason is not FinishReason.ABORT:
            assert len(request.output_token_ids) == request.sampling.max_tokens
            assert_pauses_are_told(request)
        else:
            assert arrival.aborted_at_step is not None


def assert_pauses_are_told(request: Request) -> None:
    """Each preemption of a running request is a pause, until it runs; to be preempted meanwhile is none."""
    assert len(request.pauses) == min(request.num_preemptions, MAX_PAUSES)
    assert request.paused_at_s is None
    instants = [request.first_scheduled_at_s, *itertools.chain(*request.pauses), request.last_token_at_s]
    assert instants == sorted(instants)  # type: ignore[type-var]


def contention() -> list[Arrival]:
    """Offline requests that fill the pool, and bursts of online ones that need half of it."""
    offline = [
        Arrival(0, make_request(12, 24, service_class=OFFLINE, arrived_at_s=float(index)))
        for index in range(4)
    ]
    return offline + [Arrival(6 + 9 * index, make_request(20, 6)) for index in range(6)]


@pytest.mark.parametrize(
    ("policy", "checkpointing", "restore"),
    [
        ("slo", "adaptive", "background"),
        ("slo", "eager", "blocking"),
        ("slo", "swap", "background"),
        ("priority", "adaptive", "blocking"),
        ("priority", "eager", "background"),
        ("priority", "swap", "blocking"),
    ],
)
def test_preempted_requests_are_restored_from_host_memory(
    policy: PolicyName, checkpointing: CheckpointingName, restore: RestoreMode
) -> None:
    setting = Setting(policy=policy, checkpointing=checkpointing, restore=restore)
    run = Run(setting)
    run.run(contention())
    counters = run.scheduler.counters[OFFLINE]
    assert run.executor.num_copies["checkpoint"] > 0
    assert run.executor.num_copies["restore"] > 0
    assert counters.num_preemptions > 0
    assert counters.num_restored_tokens > 0
    without = Run(Setting(policy=policy, checkpointing="none", num_host_blocks=0))
    without.run(contention())
    recomputed = without.scheduler.counters[OFFLINE].num_recomputed_tokens
    assert counters.num_recomputed_tokens < recomputed


def test_others_run_beside_a_restore_unless_it_blocks() -> None:
    for restore in get_args(RestoreMode):
        # Twenty blocks hold two offline requests beside the reserve, so that one runs while one is restored;
        # without prefix caching, because the online requests' cache would keep the second one out.
        pools = {"num_blocks": 20, "num_host_blocks": 40}
        run = Run(Setting(policy="slo", restore=restore, completes=0.1, prefix_caching=False, **pools))
        run.run(contention())
        while_restoring = [plan for plan in run.plans if plan.copies.restore and plan.slices]
        assert while_restoring
        for plan in run.plans:
            assert bool(plan.copies.blocking) == (restore == "blocking")


@settings(max_examples=examples(30), deadline=None)
@given(setting=all_settings(), seed=st.integers(0, 2**32))
def test_failing_steps_cost_only_requests_with_tokens_or_a_second_failure(
    setting: Setting, seed: int
) -> None:
    rng = random.Random(seed)
    executor, arrivals = replace(setting, fails=0.1).executor(seed), crowd(rng)
    clock, unforgiving = VirtualClock(), Unforgiving(executor)
    engine = Engine(setting.config(), unforgiving, clock, make_profile(linear_cost(step_s=0.001)))
    num_sent: Counter[str] = Counter()
    num_failures: Counter[str] = Counter()  # steps that failed before the first token
    failed: set[str] = set()
    num_steps = 0
    last = max(arrival.at_step for arrival in arrivals)
    while num_steps <= last or engine.has_work:
        for arrival in arrivals:
            if arrival.at_step == num_steps:
                executor.namespaces[arrival.request.request_id] = arrival.request.owner
                assert engine.add(arrival.request) is None
        outputs = engine.step()
        plan = unforgiving.plan
        assert plan is not None
        in_step = {scheduled.request_id for scheduled in plan.slices}
        if executor.fail_at_step == plan.step:
            num_failures.update(each for each in in_step if not num_sent[each])
            lost = {each for each in in_step if num_sent[each] or num_failures[each] == 2}
            assert {(each.request_id, each.num_lost) for each in outputs} == {
                (each, len(in_step)) for each in lost
            }
            failed |= lost
        else:
            num_sent.update(output.request_id for output in outputs)
        check_scheduler(engine.scheduler)
        clock.advance(rng.uniform(0.0, 0.01))
        num_steps += 1
        assert num_steps < MAX_STEPS, "it hangs"
    assert not engine.has_unfinished
    for arrival in arrivals:
        is_failed = arrival.request.request_id in failed
        assert arrival.request.finish_reason is (FinishReason.ERROR if is_failed else FinishReason.LENGTH)
    assert_whole(engine.scheduler.kv)
    assert not executor.num_tokens, "the executor was told to forget all"
