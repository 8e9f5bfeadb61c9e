from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from backfill.core.clock import VirtualClock
from backfill.core.config import SchedulerConfig
from backfill.core.plan import StepOutcome, StepPlan
from backfill.core.request import ServiceClass
from backfill.core.slo import SLO
from backfill.costs.behaviour import DeviceBehaviour, StepNoise
from backfill.costs.hardware import HardwareProfile
from backfill.costs.profile import FitError
from backfill.engine.engine import Engine
from backfill.execution.simulated_executor import SimulatedExecutor
from backfill.simulation.metrics import metrics_of
from backfill.simulation.replay import (
    BIN_S,
    Arrival,
    Lengths,
    Replay,
    ReplayResult,
    Workload,
    simulate,
    unique_prompt,
)
from experiments.workloads import gamma_workload
from tests.builders import linear_cost, make_info, make_profile

LOOSE = SLO(ttft_s=5.0, tpot_s=0.2)
PROFILE = make_profile()


def workload(rate_per_s: float = 2.0, duration_s: float = 20.0) -> Workload:
    return gamma_workload(
        rate_per_s, 2.0, duration_s, Lengths(200, 20), offline=(Lengths(600, 40), Lengths(90, 90)), seed=3
    )


def run(
    policy: str,
    load: Workload,
    slo: SLO = LOOSE,
    *,
    kv_tokens: int = 8000,
    host_kv_tokens: int = 0,
    kv_bytes_per_token: int = 1000,
    behaviour: DeviceBehaviour | None = None,
    seed: int = 0,
    **settings: Any,
) -> ReplayResult:
    config = SchedulerConfig(
        policy=policy,  # type: ignore[arg-type]
        ttft_slo=slo.ttft_s,
        tpot_slo=slo.tpot_s,
        **settings,
    )
    hardware = HardwareProfile("test", PROFILE, kv_tokens, kv_bytes_per_token, max_model_len=4000)
    return simulate(config, load, hardware, host_kv_tokens, behaviour=behaviour, seed=seed)


BRIEF = workload(duration_s=5.0)


def test_two_runs_are_equal_to_the_last_digit() -> None:
    first, second = (metrics_of(run("slo", BRIEF), LOOSE) for _ in range(2))
    assert replace(first, scheduling_time_share=0.0) == replace(second, scheduling_time_share=0.0)


def same(first: ReplayResult, second: ReplayResult) -> bool:
    """Whether every token came at the same instant."""
    return [record.token_at_s for record in first.online] == [record.token_at_s for record in second.online]


NOISY = DeviceBehaviour(PROFILE.cost, noise=StepNoise.of_error(FitError(0.05, 0.2, 100)), host_s=0.001)


def test_noise_is_the_same_for_one_seed_and_differs_between_seeds() -> None:
    first, again, other = (run("slo", BRIEF, behaviour=NOISY, seed=seed) for seed in (1, 1, 2))
    assert same(first, again)
    assert not same(first, other)


@pytest.mark.parametrize("policy", ["slo", "priority"])
def test_the_engine_does_not_know_the_noise(policy: str) -> None:
    """It keeps its objectives all the same, and serves every request."""
    result = run(policy, BRIEF, behaviour=NOISY)
    assert all(len(record.token_at_s) == 20 for record in result.online)
    assert not same(result, run(policy, BRIEF))


def test_the_host_takes_its_time_between_steps() -> None:
    alone = Workload((Arrival(1.0, Lengths(100, 3)),), 2.0, ())
    (record,) = run("online-only", alone, behaviour=DeviceBehaviour(PROFILE.cost, host_s=0.25)).online
    assert record.ttft_s == pytest.approx(0.25 + 5e-3 + 100 * 1e-4)
    assert record.gaps_s() == [pytest.approx(0.25 + 5e-3 + 1e-4 + at * 1e-6) for at in (100, 101)]


def test_what_a_device_does_counts_and_not_what_is_predicted() -> None:
    alone = Workload((Arrival(1.0, Lengths(100, 3)),), 2.0, ())
    twice = linear_cost(token_s=2e-4, step_s=1e-2, context_s=2e-6)
    (record,) = run("online-only", alone, behaviour=DeviceBehaviour(twice)).online
    assert record.ttft_s == pytest.approx(1e-2 + 100 * 2e-4)


def test_every_online_token_is_recorded_and_the_timeline_adds_up() -> None:
    result = run("slo", BRIEF)
    assert len(result.online) == 10
    assert all(len(record.token_at_s) == 20 for record in result.online)
    within = [tokens for i, tokens in enumerate(result.timeline) if (i + 1) * BIN_S <= BRIEF.duration_s]
    offline = result.counters[ServiceClass.OFFLINE]
    assert sum(tokens[ServiceClass.OFFLINE] for tokens in within) == pytest.approx(
        offline.num_computed_tokens - offline.num_recomputed_tokens, rel=0.02
    )


def test_offline_requests_completed_within_the_duration_are_counted() -> None:
    one_kind = Workload((Arrival(0.5, Lengths(10, 2)),), 4.0, (Lengths(600, 40),))
    few = run("slo", one_kind, kv_tokens=700)
    computed = few.counters[ServiceClass.OFFLINE].num_computed_tokens
    num_each = 600 + 40 - 1  # the last output token is not computed
    assert few.num_offline_completed == computed // num_each > 5
    assert run("online-only", one_kind).num_offline_completed == 0


def test_a_lone_request_takes_its_own_time() -> None:
    alone = Workload((Arrival(1.0, Lengths(100, 3)),), 2.0, ())
    (record,) = run("online-only", alone).online
    assert record.ttft_s == pytest.approx(5e-3 + 100 * 1e-4)
    assert record.gaps_s() == [pytest.approx(5e-3 + 1e-4 + at * 1e-6) for at in (100, 101)]


class Noting(SimulatedExecutor):
    """Keeps the prompts and the sampled tokens that it sees, by request."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(make_info(num_blocks=4000, block_size=16), DeviceBehaviour(PROFILE.cost), clock)
        self.tokens: dict[str, list[int]] = {}
        self.prompts: dict[str, tuple[int, ...]] = {}

    def run(self, plan: StepPlan) -> StepOutcome:
        outcome = super().run(plan)
        self.prompts |= {each.request_id: each.prompt_token_ids for each in plan.admitted}
        for each in outcome.sampled:
            self.tokens.setdefault(each.request_id, []).append(each.token_id)
        return outcome


def test_no_two_requests_share_a_block_of_tokens() -> None:
    clock = VirtualClock()
    executor = Noting(clock)
    Replay(Engine(SchedulerConfig(policy="priority"), executor, clock), clock, workload()).run()
    prompts = executor.prompts
    assert {name.split("-")[0] for name in prompts} == {"online", "offline"}
    assert len(prompts) > 80
    assert len({prompt[:16] for prompt in prompts.values()}) == len(prompts)
    assert max(map(max, prompts.values())) < executor.info.vocab_size
    outputs = [tuple(tokens[:10]) for tokens in executor.tokens.values() if len(tokens) >= 10]
    assert len(set(outputs)) == len(outputs) > 40


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 40])
def test_unique_prompts_have_the_length_asked_for(num_tokens: int) -> None:
    numbers = range(10 if num_tokens == 1 else 100)  # one token holds one digit
    prompts = [unique_prompt(number, num_tokens, vocab_size=10) for number in numbers]
    assert {len(prompt) for prompt in prompts} == {num_tokens}
    assert len({prompt[:2] for prompt in prompts}) == len(prompts)
    assert all(0 <= token_id < 10 for prompt in prompts for token_id in prompt)


@pytest.mark.parametrize("service_class", ServiceClass)
@pytest.mark.parametrize("counter", ["num_prefix_hit_tokens", "num_host_prefix_hit_tokens"])
def test_prefix_hits_of_every_class_and_tier_count(service_class: ServiceClass, counter: str) -> None:
    clock = VirtualClock()
    engine = Engine(SchedulerConfig(policy="priority"), Noting(clock), clock)
    setattr(engine.scheduler.counters[service_class], counter, 16)
    assert Replay(engine, clock, workload(duration_s=2.0)).run().num_prefix_hit_tokens == 16


@pytest.mark.slow  # what each does: tests/scheduling/test_policies.py and test_slo_policy.py
def test_policies_differ_as_they_should() -> None:
    figures = {
        name: metrics_of(run(name, workload(duration_s=10.0)), LOOSE)
        for name in ("online-only", "fcfs", "priority", "round-robin", "slo")
    }
    assert figures["online-only"].offline_tok_s == 0
    assert figures["slo"].ttft_p99_s < figures["priority"].ttft_p99_s < figures["fcfs"].ttft_p99_s
    assert figures["slo"].total_tok_s > 2 * figures["online-only"].total_tok_s
    assert figures["round-robin"].offline_tok_s > 0


@pytest.mark.slow  # of the scheduler alone: tests/scheduling/test_arrival.py and test_suspension.py
def test_an_arrival_stops_an_offline_step_that_would_make_it_late() -> None:
    sparse = workload(rate_per_s=1.0)
    tight = SLO(ttft_s=0.065, tpot_s=0.2)
    suspended, discarded, priority = (
        run(policy, sparse, tight, preemption=preemption, prefix_caching=False)
        for policy, preemption in (("slo", "suspend"), ("slo", "discard"), ("priority", "suspend"))
    )
    assert 0 < discarded.num_stopped_steps <= suspended.num_stopped_steps <= len(suspended.online)
    lost, kept, unstopped = (metrics_of(each, tight) for each in (discarded, suspended, priority))
    assert kept.ttft_attainment >= 0.95
    assert lost.ttft_attainment >= 0.95 > unstopped.ttft_attainment
    assert lost.discarded_token_share > 0
    assert kept.discarded_token_share == 0


def test_what_a_full_pool_makes_compute_twice_is_counted_once() -> None:
    result = run("priority", workload(rate_per_s=4.0), kv_tokens=2000)
    figures = metrics_of(result, LOOSE)
    assert figures.recomputed_token_share > 0
    computed = sum(c.num_computed_tokens for c in result.counters.values())
    assert figures.total_tok_s * result.duration_s == pytest.approx(
        computed * (1 - figures.recomputed_token_share)
    )


@pytest.mark.slow  # of the scheduler alone: tests/scheduling/test_two_tier_schedules.py
def test_checkpoints_save_what_preemptions_would_lose() -> None:
    load = workload(rate_per_s=4.0)
    # Where blocks are shared, who gives way computes a few tokens again.
    settings: dict[str, Any] = {"kv_tokens": 2000, "kv_layout": "unidirectional"}
    lost = metrics_of(run("slo", load, **settings), LOOSE)
    assert lost.recomputed_token_share > 0.01
    for checkpointing in ("adaptive", "eager"):
        result = run("slo", load, host_kv_tokens=8000, checkpointing=checkpointing, **settings)
        saved = metrics_of(result, LOOSE)
        assert saved.recomputed_token_share < 0.1 * lost.recomputed_token_share, checkpointing
        assert saved.offline_tok_s > lost.offline_tok_s
        assert saved.restored_token_share > 0
        offline = result.counters[ServiceClass.OFFLINE]
        assert offline.num_reclaimed_tokens >= offline.num_restored_tokens


def test_nothing_is_copied_while_half_the_pool_is_free() -> None:
    pools = {"kv_tokens": 400_000, "host_kv_tokens": 8000}
    result = run("slo", workload(rate_per_s=4.0, duration_s=5.0), checkpointing="adaptive", **pools)
    assert metrics_of(result, LOOSE).checkpointed_token_share == 0


@pytest.mark.slow  # of the scheduler alone: tests/scheduling/test_copy_limits.py
def test_steps_that_wait_for_copies_take_longer() -> None:
    """Swapping 10 MB a block at 10 GB/s: what is kept is the same, what it costs is not."""
    settings: dict[str, Any] = {"kv_tokens": 2000, "host_kv_tokens": 8000, "kv_bytes_per_token": 625_000}
    settings["kv_layout"] = "unidirectional"
    load = workload(rate_per_s=4.0, duration_s=10.0)
    swapped = metrics_of(run("slo", load, checkpointing="swap", kv_restore="blocking", **settings), LOOSE)
    hidden = metrics_of(run("slo", load, checkpointing="adaptive", **settings), LOOSE)
    assert swapped.num_preemptions > 0
    assert swapped.recomputed_token_share == 0
    assert hidden.ttft_p50_s < swapped.ttft_p50_s
    assert hidden.offline_tok_s > swapped.offline_tok_s
