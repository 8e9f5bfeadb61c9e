"""The KV pool and the weights divide memory, also while requests are served."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backfill.core.clock import VirtualClock
from backfill.core.config import PolicyName, SchedulerConfig
from backfill.core.plan import StepOutcome, StepPlan
from backfill.core.request import FinishReason, Request, ServiceClass
from backfill.core.slo import SLO
from backfill.costs.model import CostModel
from backfill.costs.profile import CopySpeed
from backfill.engine.engine import Engine
from backfill.execution.executor import ExecutorInfo
from backfill.offloading.interval import num_device_layers
from backfill.offloading.residency import Residency, ResidencyPolicy, Situation
from backfill.scheduling import memory_division
from experiments.layered_device import LayeredDevice, LayeredExecutor
from tests.builders import linear_cost, make_info, make_profile, make_request, with_residencies
from tests.scheduling.test_two_tier_schedules import Run, Setting, all_settings, crowd
from tests.shared import examples

ONLINE, OFFLINE = ServiceClass.ONLINE, ServiceClass.OFFLINE


class ErraticResidency(ResidencyPolicy):
    """Wants another residency, and streams with another interval, every few plans."""

    def __init__(self, choices: Sequence[Residency], stage_layers: Sequence[int], rng: random.Random) -> None:
        super().__init__(choices, stage_layers)
        self._rng = rng

    def choose(self, situation: Situation) -> Residency:
        if self._rng.random() < 0.2:
            self.target = self._rng.choice(self.choices)
        return self.target

    def fastest_interval(self, residency: Residency, situation: Situation) -> int:
        return self._rng.randint(self.choices[0].interval, residency.interval)


def erratic(setting: Setting, seed: int) -> Run:
    info = setting.executor(seed).info
    return Run(setting, seed, ErraticResidency(info.residencies, info.layers_of_stages, random.Random(seed)))


@settings(max_examples=examples(14), deadline=None)
@given(setting=all_settings(), min_interval=st.integers(1, 2), seed=st.integers(0, 2**32))
def test_tokens_are_computed_from_their_own_context_while_memory_changes_hands(
    setting: Setting, min_interval: int, seed: int
) -> None:
    run = erratic(replace(setting, min_interval=min_interval), seed)
    run.run(crowd(random.Random(seed)))
    assert_intervals_have_room(run.executor.info, run.plans)


def assert_intervals_have_room(info: ExecutorInfo, plans: Sequence[StepPlan]) -> None:
    interval = largest = info.offload_interval
    for plan in plans:
        interval = plan.offload_interval or interval
        largest = plan.memory.interval if plan.memory is not None else largest
        assert interval <= largest


# The decision on the virtual clock.

NUM_LAYERS, BLOCK_SIZE = 32, 16
INFO = ExecutorInfo(
    num_blocks=160,
    block_size=BLOCK_SIZE,
    max_model_len=2048,
    vocab_size=1000,
    end_token_ids=(),
    device="simulated",
    dtype="bfloat16",
    num_layers=NUM_LAYERS,
    num_host_blocks=400,
    block_bytes=1 << 20,
    offload_interval=8,
    layer_bytes=32 << 20,
)
# A step of few tokens takes 32 ms: weights are read once, 1 ms a layer. A transfer takes 3 ms.
COST = linear_cost(token_s=5e-5, step_s=0.032, context_s=1e-7)
DEVICE = LayeredDevice(COST, copies=CopySpeed(1e10, 1e10), layer_transfer_s=3e-3)


@dataclass
class Sample:
    at_s: float
    num_blocks: int
    interval: int
    num_draining: int


class Server:
    """An engine on a simulated device, and what it did."""

    def __init__(
        self,
        interval: int,
        min_interval: int | None,
        policy: PolicyName = "slo",
        predicted: CostModel = COST,
        max_chunk_tokens: int = 2048,
    ) -> None:
        base = with_residencies(INFO, 1)
        sizes = {num_device_layers(NUM_LAYERS, each.interval): each.num_blocks for each in base.residencies}
        num_blocks = sizes[num_device_layers(NUM_LAYERS, interval)]
        self.info = replace(INFO, offload_interval=interval, num_blocks=num_blocks)
        if min_interval is not None:
            self.info = with_residencies(self.info, min_interval)
        self.clock = VirtualClock()
        self.executor = LayeredExecutor(self.info, DEVICE, self.clock)
        config = SchedulerConfig(
            policy=policy, checkpointing="adaptive", max_prefill_chunk_tokens=max_chunk_tokens
        )
        self.engine = Engine(config, self.executor, self.clock, make_profile(predicted))
        self.samples: list[Sample] = []
        self.tokens_at_s: dict[str, list[float]] = {}

    def add(self, request: Request) -> None:
        assert self.engine.add(request) is None

    def serve(self, until_s: float) -> None:
        while self.clock.now_s() < until_s:
            if not self.engine.has_work:
                self.clock.advance(until_s - self.clock.now_s())
                return
            for output in self.engine.step():
                self.tokens_at_s.setdefault(output.request_id, []).append(self.clock.now_s())
            stats = self.engine.stats()
            self.samples.append(
                Sample(
                    self.clock.now_s(), stats.num_blocks, stats.offload_interval, stats.num_draining_blocks
                )
            )

    def num_tokens(self, prefix: str) -> int:
        return sum(len(times) for name, times in self.tokens_at_s.items() if name.startswith(prefix))

    def gaps_s(self, prefix: str) -> list[float]:
        return [
            after - before
            for name, times in self.tokens_at_s.items()
            if name.startswith(prefix)
            for before, after in itertools.pairwise(times)
        ]


def add_offline(server: Server, number: int, output_tokens: int = 400) -> None:
    for index in range(number):
        server.add(
            make_request(
                100,
                output_tokens,
                request_id=f"offline-{index}",
                service_class=OFFLINE,
                arrived_at_s=server.clock.now_s(),
            )
        )


def test_offline_work_takes_the_memory_and_online_work_gets_its_time_back() -> None:
    server = Server(8, 1)
    add_offline(server, 300)
    server.serve(10.0)
    assert server.samples[0].num_blocks == server.info.num_blocks
    alone = server.samples[-1]
    assert alone.num_blocks > 2 * server.info.num_blocks
    assert alone.interval < 8
    step_s = server.samples[-1].at_s - server.samples[-2].at_s
    assert step_s > 0.045, "transfers bound it"
    slo = SLO(ttft_s=1.0, tpot_s=0.04)
    server.add(make_request(50, 200, request_id="online", arrived_at_s=server.clock.now_s(), slo=slo))
    num_before = len(server.samples)
    server.serve(15.0)
    since = server.samples[num_before:]
    assert since[0].num_draining > 0
    drained = next(each for each in since if each.num_blocks < alone.num_blocks and not each.num_draining)
    assert drained.at_s < 10.0 + 2.0
    assert since[-1].interval > alone.interval
    gaps = server.gaps_s("online")
    assert max(gaps[len(gaps) // 2 :]) <= slo.tpot_s * 1.001
    counters = server.engine.scheduler.counters
    assert counters[ONLINE].num_preemptions == 0


def test_online_work_gets_its_time_back_where_steps_are_faster_than_predicted() -> None:
    """Transfers take no less time for that."""
    server = Server(8, 2, predicted=linear_cost(token_s=1e-4, step_s=0.064, context_s=2e-7))
    add_offline(server, 300)
    server.serve(15.0)
    assert server.samples[-1].interval == 2
    slo = SLO(ttft_s=1.0, tpot_s=0.045)
    server.add(make_request(50, 60, request_id="online", arrived_at_s=server.clock.now_s(), slo=slo))
    server.serve(20.0)
    gaps = server.gaps_s("online")
    assert max(gaps[len(gaps) // 2 :]) <= slo.tpot_s * 1.001


def test_first_tokens_get_their_time_back_where_gaps_have_enough() -> None:
    """A prompt has 32 steps: they take 1.54 s with interval 2, and 1.13 s without waits for weights."""
    server = Server(8, 1, max_chunk_tokens=64)
    add_offline(server, 400)
    server.serve(10.0)
    assert server.samples[-1].interval == 2
    slo, ttft_s = SLO(ttft_s=1.4, tpot_s=0.25), []
    for number in range(3):
        arrived_at_s = server.clock.now_s()
        server.add(make_request(2000, 10, request_id=f"online-{number}", arrived_at_s=arrived_at_s, slo=slo))
        server.serve(arrived_at_s + 4.0)
        ttft_s.append(server.tokens_at_s[f"online-{number}"][0] - arrived_at_s)
    assert ttft_s[0] > slo.ttft_s, "the pool has to be drained first"
    assert max(ttft_s[1:]) <= slo.ttft_s
    assert server.num_tokens("offline") > 0


def test_prompts_that_the_decodes_beside_them_make_late_need_nothing() -> None:
    """31 steps of 35 ms would be in time, but with 40 decodes they take 37: weights would help nobody."""
    server = Server(8, 1, max_chunk_tokens=64)
    for number in range(40):
        server.add(make_request(20, 400, request_id=f"answer-{number}", slo=SLO(ttft_s=9.0, tpot_s=0.25)))
    server.serve(1.0)
    scheduler, now_s = server.engine.scheduler, server.clock.now_s()
    assert scheduler.predictor is not None and scheduler._division is not None
    usable = scheduler.predictor.usable_share * scheduler.predictor.time_scale
    for steps_s, is_needed in ((31 * 0.036, False), (31 * 0.042, True)):
        slo = SLO(ttft_s=steps_s / usable, tpot_s=0.25)
        prompt = make_request(1984, 10, request_id=f"prompt-{is_needed}", arrived_at_s=now_s, slo=slo)
        server.add(prompt)
        need = scheduler._division._situation(now_s).prompts
        assert (need is not None) is is_needed
        scheduler.finish(prompt.request_id, FinishReason.ABORT)


def add_chats(server: Server, count: int, ttft_s: float) -> None:
    """Chats that hold 20 blocks each."""
    for number in range(count):
        arrived_at_s = server.clock.now_s()
        slo = SLO(ttft_s=ttft_s, tpot_s=0.25)
        server.add(make_request(300, 20, request_id=f"chat-{number}", arrived_at_s=arrived_at_s, slo=slo))


def test_prompts_that_wait_for_blocks_get_more_of_them_and_not_shorter_steps() -> None:
    server = Server(8, 1)
    add_chats(server, 40, ttft_s=9.0)
    server.serve(0.05)
    scheduler, now_s = server.engine.scheduler, server.clock.now_s()
    assert scheduler._division is not None
    situation = scheduler._division._situation(now_s)
    num_fitting = 160 // 20
    assert situation.num_online <= num_fitting + 1
    assert situation.wanted_blocks >= (40 - num_fitting - 1) * 19
    server.serve(3.0)
    assert server.samples[-1].num_blocks > 160


def test_what_ends_before_a_drain_would_needs_no_shorter_steps() -> None:
    """One step is left to the prompt, and little time: others like it have all of theirs."""
    server = Server(8, 1)
    add_offline(server, 40)
    server.serve(10.0)
    assert server.samples[-1].interval == 2
    now_s = server.clock.now_s()
    scheduler = server.engine.scheduler
    assert scheduler._division is not None and scheduler.predictor is not None
    slo = SLO(ttft_s=1.0, tpot_s=0.25)
    server.add(make_request(300, 10, request_id="chat", arrived_at_s=now_s - 0.94, slo=slo))
    need = scheduler._division._situation(now_s).prompts
    assert need is not None
    usable = scheduler.predictor.usable_share * scheduler.predictor.time_scale
    assert need.limit_s == pytest.approx(slo.ttft_s * usable / 2)


@pytest.mark.slow  # first tokens that are late without shorter steps are in the tests above
def test_who_arrives_waits_for_the_step_that_runs_and_then_for_its_own() -> None:
    """With interval 2 a step takes 48 ms, of 80 to the first token; offline work alone would have it."""
    server, slo, rng = Server(8, 1), SLO(ttft_s=0.08, tpot_s=1.0), random.Random(0)
    add_offline(server, 80, output_tokens=800)
    arrivals_s = list(itertools.accumulate((rng.expovariate(2.0) for _ in range(35)), initial=20.0))
    for number, at_s in enumerate(arrivals_s):
        server.serve(at_s)
        server.add(make_request(100, 1, request_id=f"chat-{number}", arrived_at_s=at_s, slo=slo))
    server.serve(arrivals_s[-1] + 1.0)
    waits_s = [server.tokens_at_s[f"chat-{number}"][0] - at_s for number, at_s in enumerate(arrivals_s)]
    assert sum(wait_s > slo.ttft_s for wait_s in waits_s) <= 2


def test_steps_of_a_long_prompt_count_what_they_attend_to() -> None:
    server = Server(
        8, 1, max_chunk_tokens=64, predicted=linear_cost(token_s=5e-5, step_s=0.032, context_s=2e-5)
    )
    server.add(make_request(1984, 10, slo=SLO(ttft_s=9.0, tpot_s=0.25)))
    scheduler = server.engine.scheduler
    assert scheduler.predictor is not None and scheduler._division is not None
    need = scheduler._division._situation(0.0).prompts
    assert need is not None
    assert need.compute_s == pytest.approx(scheduler.predictor.cost.prefill_time_s(1984, 64) / 31, rel=0.01)


def throughput(interval: int, min_interval: int | None) -> tuple[float, float]:
    """Offline tokens a second, and the share of online gaps that are in time.

    For 10 s an online request comes every two seconds, then there are none for 20 s.
    """
    server = Server(interval, min_interval)
    add_offline(server, 400)
    slo = SLO(ttft_s=1.0, tpot_s=0.045)
    for second in range(0, 10, 2):
        request = make_request(50, 100, request_id=f"online-{second}", arrived_at_s=float(second), slo=slo)
        server.add(request)
        server.serve(second + 2.0)
    server.serve(30.0)
    gaps = server.gaps_s("online")
    kept = sum(gap <= slo.tpot_s * 1.001 for gap in gaps) / len(gaps)
    return server.num_tokens("offline") / server.clock.now_s(), kept


@pytest.mark.slow  # that memory changes hands both ways is tested above
def test_one_decision_beats_both_fixed_intervals() -> None:
    """The large interval is in time, and the small one has the throughput; together they have both."""
    large, kept_large = throughput(8, None)
    small, kept_small = throughput(2, None)
    both, kept_both = throughput(8, 2)
    assert kept_large > 0.99
    assert kept_small < 0.9
    assert kept_both > 0.98
    assert both > max(1.2 * large, small)


def test_without_a_profile_of_steps_residency_stays() -> None:
    info = with_residencies(replace(make_info(num_blocks=20), num_layers=8, offload_interval=4), 1)
    executor = LayeredExecutor(info, DEVICE, VirtualClock())
    engine = Engine(SchedulerConfig(), executor, VirtualClock())
    engine.add(make_request(4, 4))
    plans: list[StepPlan] = []
    run = executor.run

    def noted(plan: StepPlan) -> StepOutcome:
        plans.append(plan)
        return run(plan)

    executor.run = noted  # type: ignore[method-assign]
    while engine.has_unfinished:
        engine.step()
    assert all(plan.memory is None and plan.offload_interval is None for plan in plans)


@pytest.mark.parametrize(
    "policy", ["slo", *(pytest.param(each, marks=pytest.mark.slow) for each in ("conserve", "bros"))]
)
def test_every_policy_that_predicts_steps_serves_while_memory_changes_hands(policy: PolicyName) -> None:
    server = Server(8, 1, policy)
    add_offline(server, 120, output_tokens=150)
    server.serve(14.0)
    server.add(make_request(50, 50, request_id="online", arrived_at_s=14.0, slo=SLO(1.0, 0.05)))
    server.serve(200.0)
    assert not server.engine.has_unfinished
    assert server.num_tokens("offline") == 120 * 150
    assert len({each.num_blocks for each in server.samples}) > 1


class GivenResidency(ResidencyPolicy):
    """Keeps to its target, which a test sets."""

    def choose(self, situation: Situation) -> Residency:
        return self.target


def grown(setting: Setting, *shapes: tuple[int, int]) -> tuple[Run, GivenResidency, list[Request]]:
    """A pool of 24 blocks, which has had 12, and offline requests that run in it."""
    info = setting.executor(0).info
    policy = GivenResidency(info.residencies, info.layers_of_stages)
    run = Run(setting, 0, policy)
    policy.target = policy.choices[0]
    requests = [make_request(*shape, service_class=OFFLINE) for shape in shapes]
    for request in requests:
        run.scheduler.add(request)
    while any(each.num_computed_tokens < each.num_prompt_tokens for each in requests):
        run.step()
    assert run.scheduler.kv.num_blocks == 24
    return run, policy, requests


def test_a_request_goes_on_while_its_blocks_are_moved_where_others_have_ended() -> None:
    run, policy, (ended, stays) = grown(Setting(min_interval=1, num_host_blocks=0), (36, 2), (36, 12))
    while ended.finish_reason is None:
        run.step()
    policy.target = policy.choices[-1]
    plan = run.step()
    assert len(plan.moves) == run.executor.num_moves > 5
    assert plan.memory is None, "the memory is given away in the same step"
    assert (plan := run.step()).memory is not None
    assert plan.memory.num_blocks == 12
    while stays.finish_reason is None:
        run.step()
    counters = run.scheduler.counters[OFFLINE]
    assert counters.num_preemptions == counters.num_recomputed_tokens == 0


@pytest.mark.parametrize("num_host_blocks", [0, 24])
def test_requests_that_do_not_fit_the_smaller_pool_are_preempted(num_host_blocks: int) -> None:
    setting = Setting(policy="slo", min_interval=1, num_host_blocks=num_host_blocks, completes=1.0)
    run, policy, requests = grown(setting, (36, 12), (36, 12))
    policy.target = policy.choices[-1]
    num_before = len(run.plans)
    while run.step().memory is None:
        assert len(run.plans) < num_before + 25
    assert run.scheduler.kv.num_blocks == 12
    counters = run.scheduler.counters[OFFLINE]
    assert counters.num_preemptions >= 1
    while run.scheduler.has_unfinished:
        run.step()
    assert all(len(each.output_token_ids) == 12 for each in requests)
    if num_host_blocks:
        assert counters.num_recomputed_tokens < 36, "its KV was not copied before it was dropped"


def test_a_drain_that_is_called_off_leaves_everything_in_place() -> None:
    run, policy, _ = grown(Setting(policy="slo", min_interval=1, num_host_blocks=0), (37, 9), (37, 9))
    policy.target = policy.choices[-1]
    run.step()
    assert run.scheduler.kv.resizing.num_draining > 0
    policy.target = policy.choices[0]
    run.step()
    assert (run.scheduler.kv.num_blocks, run.scheduler.kv.resizing.num_draining) == (24, 0)
    assert run.executor.num_moves == 0
    assert all(plan.memory is None for plan in run.plans[-2:])
    assert run.scheduler.counters[OFFLINE].num_preemptions == 0


def test_each_drain_waits_for_room_before_it_preempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that begins in the plan after another has ended."""
    monkeypatch.setattr(memory_division, "_MAX_SHORT_STEPS", 2)
    setting = Setting(policy="slo", min_interval=1, num_host_blocks=0)
    run, policy, _ = grown(setting, *[(20, 20)] * 3)
    kv, counters = run.scheduler.kv, run.scheduler.counters[OFFLINE]
    policy.target = policy.choices[1]
    while run.step() and kv.resizing.num_draining:
        pass
    assert (kv.num_blocks, counters.num_preemptions) == (16, 1)
    policy.target = policy.choices[-1]
    num_before = len(run.plans)
    while counters.num_preemptions == 1:
        run.step()
    assert len(run.plans) - num_before > 2


def test_offline_requests_make_room_for_cache_that_is_kept_for_online_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_division, "_MAX_SHORT_STEPS", -1)
    run, policy, _ = grown(Setting(policy="slo", min_interval=1, num_host_blocks=0), (45, 3))
    online = make_request(22, 1)
    run.scheduler.add(online)
    run.step()
    kv, counters = run.scheduler.kv, run.scheduler.counters[OFFLINE]
    assert online.finish_reason is not None and kv.counts.protected == 5
    policy.target = policy.choices[-1]
    assert len(run.step().moves) == 5, "what is kept was evicted, or nobody made room for it"
    assert counters.num_preemptions == 1
