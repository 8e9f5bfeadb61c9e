"""Co-serving on an A100 and on devices a tenth and a hundredth as fast, at five loads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backfill.core.config import SchedulerConfig
from backfill.core.slo import SLO
from backfill.costs.hardware import load_hardware_profile
from backfill.scheduling.objectives import server_slo
from backfill.simulation.goodput import GoodputSweep, run_goodput
from backfill.simulation.metrics import PolicyMetrics
from backfill.simulation.scenarios import run_scenario
from experiments.conserve.figures import Inputs, build_scenario

HARDWARE = "a100-40g-llama-2-7b"


def co_serving(slowness: int) -> list[tuple[float, dict[str, PolicyMetrics]]]:
    """By load, of each policy."""
    scenario = build_scenario(f"slow-{slowness}", Inputs(seed=1))
    result = run_scenario(scenario, scenario.policies, lambda *_: None)
    return [(point.setting["load"], point.metrics) for point in result.points]


@pytest.mark.parametrize("slowness", [1, 10, 100])
def test_the_default_keeps_up_with_no_safepoints(slowness: int) -> None:
    """A P99 of 150 chats is the second slowest: it moves by a tenth from seed to seed (docs/coserving.md)."""
    points = co_serving(slowness)
    assert len(points) == 5
    for load, policies in points:
        default, unstopped = policies["slo"], policies["slo-no-safepoints"]
        assert default.ttft_p99_s <= 1.15 * unstopped.ttft_p99_s, load
        assert default.itl_attainment >= min(0.99, unstopped.itl_attainment), load
        assert default.offline_tok_s >= 0.95 * unstopped.offline_tok_s, load
    lightest = points[0][1]
    assert lightest["slo"].ttft_p99_s <= 1.3 * lightest["online-only"].ttft_p99_s
    assert lightest["slo"].itl_attainment >= 0.99


def test_a_slower_device_takes_longer_for_everything() -> None:
    fast = load_hardware_profile(HARDWARE)
    slow = fast.slowed(10)
    assert slow.slowness == 10 and slow.kv_tokens == fast.kv_tokens
    assert slow.costs.cost.rows_s(100) == pytest.approx(10 * fast.costs.cost.rows_s(100))
    assert slow.costs.cost.decode_context_s == pytest.approx(10 * fast.costs.cost.decode_context_s)
    assert slow.costs.copies is not None and fast.costs.copies is not None
    assert slow.costs.copies.to_host_bytes_per_s == pytest.approx(fast.costs.copies.to_host_bytes_per_s / 10)


def test_default_objectives_of_a_slow_device_are_attainable_by_ordinary_prompts() -> None:
    config, costs = SchedulerConfig(policy="slo"), load_hardware_profile(HARDWARE).slowed(100).costs
    assert server_slo(config, costs.cost).ttft_s >= 4 * costs.cost.prefill_time_s(512, 2048)
    fast = load_hardware_profile(HARDWARE).costs
    assert server_slo(config, fast.cost) == SLO(1.0, 0.15)


def test_the_goodput_of_a_slow_device_falls_with_its_speed() -> None:
    sweep = GoodputSweep(
        workloads=("conversation",),
        cvs=(1.0,),
        loads=(0.5,),
        policies=("slo",),
        num_requests=60,
        num_for_capacity=300,
    )
    fast, slow = (run_goodput(each) for each in (sweep, replace(sweep, slowness=10.0)))
    assert slow.capacities["conversation"] == pytest.approx(fast.capacities["conversation"] / 10, rel=0.05)
    figures = slow.points[1].policies["slo"]
    assert figures["attainment"] == 1.0 and figures["itl_attainment"] >= 0.99
