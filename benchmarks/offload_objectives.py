"""Whether the interval of ``--offload-interval auto`` holds its objective, and the next smaller does not.

A decode step without offloading is timed first; objectives are multiples of it. For each the interval is
chosen from the performance record as a server does, and decodes of the recorded load run with it and with the
next smaller one, each in a process of its own, over a link that is held to a bandwidth. Reported are P50 and
P99 of the steps over the objective, and stalls: waiting for weights, of it what makes a step exceed its
objective, over the steps' time.

Usage: offload_objectives.py [--objectives 1.5,2,3,5] [--batch 16] [--context 128] [--steps 300]
[--gib-per-s 1]. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from in_process import restart_in_engine_environment

from backfill.core.clock import WallClock
from backfill.core.config import EngineConfig, SchedulerConfig
from backfill.core.request import Request, RequestId
from backfill.core.sampling import SamplingParams
from backfill.engine.engine import Engine
from backfill.engine.interval_choice import with_chosen_interval
from backfill.execution.bus import open_bus
from backfill.execution.create import create_torch_executor
from backfill.models.resolve import resolve_model

_NO_OBJECTIVE_S = 1e3
_NUM_WARM = 20  # steps until transfers have a rhythm


def config_of(options: argparse.Namespace, interval: str, tpot_s: float = _NO_OBJECTIVE_S) -> EngineConfig:
    config = EngineConfig(
        model_dir=str(resolve_model(options.model)),
        kv_gib=options.kv_gib,
        offload_interval=interval,
        max_model_len=options.context + options.steps + 2 * _NUM_WARM,
        scheduler=SchedulerConfig(
            max_num_seqs=options.batch, ttft_slo=_NO_OBJECTIVE_S, tpot_slo=tpot_s, prefix_caching=False
        ),
    )
    if interval == "none":
        return config
    bus = str(Path(tempfile.mkdtemp()) / "bus")
    return replace(config, offload_bus=bus, offload_bus_gib_per_s=options.gib_per_s)


def decode(options: argparse.Namespace) -> dict[str, Any]:
    """Times of decode steps, and of what layers waited for their weights in each."""
    config = config_of(options, options.interval)
    engine = Engine(config.scheduler, create_torch_executor(config, open_bus(config)), WallClock())
    for index in range(options.batch):
        prompt = [3 + (7 * index + 11 * place) % 1000 for place in range(options.context)]
        sampling = SamplingParams(max_tokens=options.steps + _NUM_WARM, temperature=0.0, ignore_eos=True)
        engine.add(Request(request_id=RequestId(str(index)), prompt_token_ids=prompt, sampling=sampling))
    steps: list[tuple[float, float]] = []
    stalled_s = 0.0
    while engine.has_unfinished:
        began_s = time.perf_counter()
        engine.step()
        ended_s, stats = time.perf_counter(), engine.stats()
        if stats.step.num_tokens == options.batch:
            steps.append((ended_s - began_s, stats.weight_stall_s - stalled_s))
        stalled_s = stats.weight_stall_s
    steps = steps[_NUM_WARM:]
    return {"steps_s": [each for each, _ in steps], "stalls_s": [each for _, each in steps]}


def choose(options: argparse.Namespace) -> dict[str, Any]:
    return {"interval": with_chosen_interval(config_of(options, "auto", options.objective_s)).offload_every}


def child(job: str, **fields: Any) -> dict[str, Any]:
    given = [part for name, value in fields.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, *sys.argv, "--child", job, *given]
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


def summary(run: dict[str, Any], objective_s: float) -> dict[str, float]:
    steps_s, stalls_s = run["steps_s"], run["stalls_s"]
    excess_s = [
        min(stall_s, max(0.0, step_s - objective_s))
        for step_s, stall_s in zip(steps_s, stalls_s, strict=True)
    ]
    return {
        "p50": percentile(steps_s, 0.5) / objective_s,
        "p99": percentile(steps_s, 0.99) / objective_s,
        "stalls": sum(stalls_s) / sum(steps_s),
        "excess_stalls": sum(excess_s) / sum(steps_s),
    }


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[math.ceil(share * len(values)) - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--objectives", default="1.5,2,3,5", help="times a step without offloading")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--kv-gib", type=float, default=0.5)
    parser.add_argument("--gib-per-s", type=float, default=1.0, help="bandwidth of transfers")
    parser.add_argument("--child", choices=("decode", "choose"), help=argparse.SUPPRESS)
    parser.add_argument("--interval", default="none", help=argparse.SUPPRESS)
    parser.add_argument("--objective_s", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    restart_in_engine_environment()
    if options.child:
        print(json.dumps(decode(options) if options.child == "decode" else choose(options)))
        return
    alone_s = statistics.median(child("decode")["steps_s"])
    print(f"a step without offloading: {1e3 * alone_s:.1f} ms; steps below are in parts of the objective")
    results = []
    for times in map(float, options.objectives.split(",")):
        objective_s = times * alone_s
        interval = child("choose", objective_s=objective_s)["interval"]
        result: dict[str, Any] = {"objective_s": objective_s, "interval": interval, "runs": {}}
        for each in () if interval is None else (interval, interval - 1):
            if each:
                result["runs"][each] = summary(child("decode", interval=each), objective_s)
        results.append(result)
        print(f"objective {1e3 * objective_s:.1f} ms: interval {interval or 'none'}")
        for each, figures in result["runs"].items():
            print(
                f"  {each:>2}: P50 {figures['p50']:.3f}, P99 {figures['p99']:.3f}; of the time "
                f"{figures['stalls']:.1%} are stalls, {figures['excess_stalls']:.2%} beyond the objective"
            )
    print(json.dumps({"benchmark": "offload_objectives", **vars(options), "results": results}))


if __name__ == "__main__":
    main()
