"""How well the simulator predicts the real engine: the same workload on both.

    python benchmarks/simulation_fidelity.py [--duration 300] [--kv-gib 0.2]

Online requests of 256 tokens in and 64 out with gamma arrivals run beside a flood of offline requests under
the ``slo`` policy. They arrive inside steps, and the KV pool is so small that requests are preempted,
checkpointed and restored. The real run is in this process, without HTTP.

What the simulated device does is observed on this machine, not in the run that is compared: another workload
runs before it and after it, half as long each. The engine predicts with the saved profile in all runs.
Two more columns tell where a difference comes from: ``own`` simulates the device as it was observed in the
real run itself, so without a drift of the machine's speed; ``exact`` takes the profile for the truth.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict

import clone  # noqa: F401
import numpy as np
from in_process import check_no_prefix_hits, restart_in_engine_environment
from live_replay import LiveReplay
from observation import ObservedExecutor, observed_behaviour
from safepoints import make_plan, overhead

from backfill.core.clock import VirtualClock, WallClock
from backfill.core.config import EngineConfig, SchedulerConfig
from backfill.core.plan import Compute, StepPlan
from backfill.core.slo import SLO
from backfill.costs.load import StepLoad
from backfill.costs.profile import CostProfile
from backfill.costs.profiler import FULL
from backfill.engine.engine import Engine
from backfill.execution.create import create_torch_executor
from backfill.execution.executor import ExecutorInfo
from backfill.execution.profile import load_or_measure_profile, step_capacity
from backfill.execution.torch_executor import TorchExecutor
from backfill.models.resolve import resolve_model
from backfill.simulation.metrics import PolicyMetrics, metrics_of
from backfill.simulation.replay import Lengths, Replay, ReplayResult, Workload
from experiments.layered_device import LayeredDevice, LayeredExecutor
from experiments.workloads import gamma_workload

_SLO = SLO(ttft_s=1.0, tpot_s=0.15)
_ROWS = (
    ("total tokens/s", "total_tok_s", 0.05),
    ("TTFT P50, s", "ttft_p50_s", 0.10),
    ("ITL P50, s", "itl_p50_s", 0.10),
    ("TTFT P99, s", "ttft_p99_s", 0.15),
    ("ITL P99, s", "itl_p99_s", 0.15),
)
_COUNTS = ("num_stopped_steps", "num_preemptions", "checkpointed_token_share", "restored_token_share")
# The compared run has the first reported seed; the device is observed under others.
_SEED, _OBSERVED_SEEDS = 1, (101, 102)
_BLOCKS_EACH = 17  # of the decodes that time safepoints
_SAFEPOINT_ROUNDS = 20


def make_workload(rate_per_s: float, duration_s: float, seed: int) -> Workload:
    rng = np.random.default_rng(seed)
    offline = tuple(
        Lengths(int(i), int(o))
        for i, o in zip(rng.integers(256, 513, 4000), rng.integers(32, 129, 4000), strict=True)
    )
    return gamma_workload(rate_per_s, 1.0, duration_s, Lengths(256, 64), offline=offline, seed=seed)


def run_live(
    config: EngineConfig, profile: CostProfile, workload: Workload
) -> tuple[ReplayResult, ObservedExecutor]:
    """On an executor of its own: a new engine counts its steps from 0, and so must the executor."""
    clock = WallClock()
    executor = create_torch_executor(config)
    executor.fill_kv_pool(executor.info.num_blocks)
    observed = ObservedExecutor(executor, clock, profile.copies)
    engine = Engine(config.scheduler, observed, clock, profile)
    result = LiveReplay(engine, clock, workload).run()
    check_no_prefix_hits(engine.scheduler.counters.values())
    return result, observed


def run_simulated(
    config: EngineConfig,
    info: ExecutorInfo,
    profile: CostProfile,
    behaviour: LayeredDevice,
    workload: Workload,
) -> ReplayResult:
    clock = VirtualClock()
    executor = LayeredExecutor(info, behaviour, clock, seed=_SEED)
    engine = Engine(config.scheduler, executor, clock, profile)
    replay = Replay(engine, clock, workload, host_s=behaviour.host_s)
    executor.events = replay
    result = replay.run()
    check_no_prefix_hits(engine.scheduler.counters.values())
    return result


def time_safepoint_s(executor: TorchExecutor) -> float:
    """Seconds that one safepoint adds to a step; 0 where it is lost in the noise."""
    plan = make_plan(executor, min(64, executor.info.num_blocks // _BLOCKS_EACH - 1))
    step_s, ratio = overhead(executor, plan, _SAFEPOINT_ROUNDS)
    released = tuple(scheduled.request_id for scheduled in plan.slices)
    executor.run(StepPlan(step=0, work=Compute(slices=()), released=released))
    return max(0.0, ratio - 1.0) * step_s / max(1, executor.info.num_layers - 1)


def observe(
    config: EngineConfig,
    info: ExecutorInfo,
    profile: CostProfile,
    safepoint_s: float,
    runs: list[ObservedExecutor],
) -> LayeredDevice:
    return observed_behaviour(
        [step for run in runs for step in run.steps],
        [gap_s for run in runs for gap_s in run.gaps_s],
        profile,
        (StepLoad.of(shape) for shape in FULL.shapes(step_capacity(config, info))),
        safepoint_s=safepoint_s,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--duration", type=_positive(10.0), default=300.0, help="seconds, at least 10")
    parser.add_argument("--rate", type=_positive(0.01), default=0.7, help="online requests a second")
    parser.add_argument("--kv-gib", type=_positive(0.02), default=0.2, help="size of the KV pool")
    options = parser.parse_args()
    restart_in_engine_environment()
    scheduler = SchedulerConfig(policy="slo", ttft_slo=_SLO.ttft_s, tpot_slo=_SLO.tpot_s)
    config = EngineConfig(
        model_dir=str(resolve_model(options.model)), kv_gib=options.kv_gib, scheduler=scheduler
    ).with_checkpointing()
    executor = create_torch_executor(config)
    info, profile = executor.info, load_or_measure_profile(config, executor)
    if profile.copies is None:
        raise SystemExit("The saved profile has no copy speeds: run `backfill profile` for this model.")
    safepoint_s = time_safepoint_s(executor)
    del executor

    observed = []

    def watch(seed: int) -> None:
        print(f"observing the device, seed {seed}", flush=True)
        load = make_workload(options.rate, options.duration / 2, seed)
        observed.append(run_live(config, profile, load)[1])

    watch(_OBSERVED_SEEDS[0])
    workload = make_workload(options.rate, options.duration, _SEED)
    print(f"the real run, seed {_SEED}", flush=True)
    live, live_steps = run_live(config, profile, workload)
    watch(_OBSERVED_SEEDS[1])
    behaviour = observe(config, info, profile, safepoint_s, observed)
    devices = {
        "simulated": behaviour,
        "own": observe(config, info, profile, safepoint_s, [live_steps]),
        "exact": LayeredDevice(profile.cost, profile.copies),
    }
    figures = {"real": metrics_of(live, _SLO)}
    for name, device in devices.items():
        figures[name] = metrics_of(run_simulated(config, info, profile, device, workload), _SLO)
    mean = np.mean(
        [
            step.seconds / behaviour.cost.step_time_s(StepLoad.of_slices(step.plan.slices))
            for step in live_steps.steps
        ]
    )
    print(f"steps of the real run took {mean / behaviour.noise.mean:.2f} of what was observed, on average")
    report(figures, profile, behaviour, info)


def report(
    figures: dict[str, PolicyMetrics], profile: CostProfile, behaviour: LayeredDevice, info: ExecutorInfo
) -> None:
    noise = behaviour.noise
    low, middle, high = np.interp([0.05, 0.5, 0.95], noise.probabilities, noise.ratios)
    print(f"profile: {profile.quality}, median error {profile.error.median:.1%}, P95 {profile.error.p95:.1%}")
    print(
        f"device: steps {low:.2f}, {middle:.2f}, {high:.2f} of typical (P5, P50, P95), correlation "
        f"{noise.correlation:.2f}; host {behaviour.host_s * 1e3:.2f} ms a step; safepoint "
        f"{behaviour.safepoint_s * 1e6:.1f} us; {behaviour.copy_slowdown:.1%} slower beside copies"
    )
    print(f"{info.num_blocks} blocks of KV, {info.num_host_blocks} in host memory")
    header = ("real", "simulated", "off by", "goal", "", "own", "exact")
    widths = (9, 10, 8, 5, 7, 9, 9)
    print(" " * 26, *(f"{name:>{width}s}" for name, width in zip(header, widths, strict=True)))
    for label, attribute, goal in _ROWS:
        real, predicted, own, exact = (getattr(each, attribute) for each in figures.values())
        off_by = predicted / real - 1.0
        verdict = "met" if abs(off_by) <= goal else "missed"
        print(
            f"{label:26s} {real:9.4g} {predicted:10.4g} {off_by:+8.1%} {goal:5.0%} {verdict:>7s} "
            f"{own:9.4g} {exact:9.4g}"
        )
    for name in _COUNTS:
        real, predicted, own, exact = (getattr(each, name) for each in figures.values())
        print(f"{name:26s} {real:9.4g} {predicted:10.4g} {'':22s} {own:9.4g} {exact:9.4g}")
    print(f"{figures['real'].num_online} online requests")
    if not all(getattr(figures["real"], name) for name in _COUNTS):
        print("The real run lacked some of these: a smaller --kv-gib or a longer --duration has them.")
    content = {
        "benchmark": "simulation_fidelity",
        "behaviour": asdict(behaviour),
        "figures": {name: asdict(each) for name, each in figures.items()},
    }
    print(json.dumps(content))


def _positive(least: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = float(text)
        if not least <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"must be a number of at least {least:g}, got {text}")
        return value

    return number


if __name__ == "__main__":
    main()
