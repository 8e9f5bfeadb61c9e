"""How well the simulator predicts the real engine: the same workload on both, with the engine's own profile.

    python benchmarks/simulation_fidelity.py [--duration 300] [--model smollm2-135m-instruct]

Online requests of 256 tokens in and 64 out with gamma arrivals run beside a flood of offline requests under
the ``slo`` policy. The real run is in this process, without HTTP. Only the executor and the clock differ.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

import numpy as np
from in_process import check_no_prefix_hits, restart_in_engine_environment

from backfill.core.clock import VirtualClock, WallClock
from backfill.core.config import EngineConfig, SchedulerConfig
from backfill.core.slo import SLO
from backfill.engine.engine import Engine
from backfill.execution.create import create_torch_executor
from backfill.execution.executor import Executor
from backfill.execution.profile import load_or_measure_profile
from backfill.execution.simulated_executor import SimulatedExecutor
from backfill.models.resolve import resolve_model
from backfill.simulation.metrics import PolicyMetrics, metrics_of
from backfill.simulation.replay import Lengths, Replay
from backfill.simulation.workloads import gamma_workload

_SLO = SLO(ttft_s=1.0, tpot_s=0.15)
_ROWS = (
    ("total tokens/s", "total_tok_s", 0.07),
    ("TTFT P50, s", "ttft_p50_s", 0.10),
    ("ITL P50, s", "itl_p50_s", 0.10),
    ("TTFT P99, s", "ttft_p99_s", 0.20),
    ("ITL P99, s", "itl_p99_s", 0.20),
)


def offline_lengths(count: int, seed: int) -> tuple[Lengths, ...]:
    rng = np.random.default_rng(seed)
    return tuple(
        Lengths(int(i), int(o))
        for i, o in zip(rng.integers(256, 513, count), rng.integers(32, 129, count), strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--duration", type=float, default=300.0, help="seconds")
    parser.add_argument("--rate", type=float, default=0.7, help="online requests a second")
    options = parser.parse_args()
    restart_in_engine_environment()
    config = EngineConfig(
        model_dir=str(resolve_model(options.model)),
        scheduler=SchedulerConfig(policy="slo", ttft_slo=_SLO.ttft_s, tpot_slo=_SLO.tpot_s),
    )
    executor = create_torch_executor(config)
    profile = load_or_measure_profile(config, executor)
    workload = gamma_workload(
        options.rate, 1.0, options.duration, Lengths(256, 64), offline=offline_lengths(4000, 1), seed=0
    )
    virtual = VirtualClock()
    simulated: Executor = SimulatedExecutor(executor.info, profile.cost, virtual, profile.copies)
    figures: dict[str, PolicyMetrics] = {}
    for name, runs, clock in (("simulated", simulated, virtual), ("real", executor, WallClock())):
        engine = Engine(config.scheduler, runs, clock, profile)
        result = Replay(engine, clock, workload).run()
        check_no_prefix_hits(engine.scheduler.counters.values())
        figures[name] = metrics_of(result, _SLO)
    print(f"profile: median error {profile.error.median:.1%}, P95 {profile.error.p95:.1%}")
    print(f"{'':16s} {'real':>9s} {'simulated':>10s} {'off by':>8s} {'goal':>6s}")
    for label, attribute, goal in _ROWS:
        real, predicted = (getattr(figures[name], attribute) for name in ("real", "simulated"))
        print(f"{label:16s} {real:9.4g} {predicted:10.4g} {predicted / real - 1:+8.1%} {goal:6.0%}")
    print(json.dumps({name: asdict(metrics) for name, metrics in figures.items()}))


if __name__ == "__main__":
    main()
