"""Whether the interval of ``--offload-interval auto`` holds its objective, and the next smaller does not.

A decode step without offloading is timed first; objectives are multiples of it. The performance record is
measured, quickly as a start does or thoroughly. For each objective the interval is chosen from it as a server
does, and decodes run with it and with the next smaller one, each in a process of its own, over a link that is
held to a bandwidth. Reported are P50 and P99 of the steps over the objective, what the record predicted that
few exceed, and stalls: waiting for weights, of it what makes a step exceed its objective, over the steps'
time. Beside them is the P99 without offloading: what the machine is late by in any case.

Usage: offload_objectives.py [--objectives 1.5,2,3,5] [--batch 16] [--context 128] [--steps 300]
[--gib-per-s 1] [--record quick|full|saved] [--choose-only]. The last line is a JSON object.
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

from backfill.bus.throttle import open_bus
from backfill.core.clock import WallClock
from backfill.core.config import EngineConfig, SchedulerConfig
from backfill.core.request import Request, RequestId
from backfill.core.sampling import SamplingParams
from backfill.engine.analyzer import analyze, load_or_measure_record, record_path
from backfill.engine.engine import Engine
from backfill.engine.interval_choice import on_bus, with_chosen_interval
from backfill.execution.create import create_torch_executor
from backfill.models.resolve import resolve_model
from backfill.offloading.loads import FULL_LOADS, QUICK_LOADS

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


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Replaces the record by one of this moment."""
    config = config_of(options, "auto")
    record = analyze(config, FULL_LOADS if options.record == "full" else QUICK_LOADS).record
    record.save(record_path(record.key))
    return {
        "transfer_s": record.transfer_s,
        "transfer_runs_s": record.transfer_runs_s,
        "delays_s": record.delays_s,
        "others_share": record.others_share,
    }


def choose(options: argparse.Namespace) -> dict[str, Any]:
    """The interval, and the steps that few exceed with it and the next smaller one, by the record."""
    config = config_of(options, "auto", options.objective_s)
    interval = with_chosen_interval(config).offload_every
    record = on_bus(load_or_measure_record(config), config)
    load = record.find("decode", options.batch, options.context + options.steps)
    predicted = {}
    for each in (interval, (interval or 1) - 1, None):
        if load is not None and each != 0:
            predicted[str(each)] = record.step_s(load, each)
    return {"interval": interval, "predicted_s": predicted}


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
    parser.add_argument("--record", choices=("quick", "full", "saved"), default="quick")
    parser.add_argument("--choose-only", action="store_true", help="run no steps with the chosen intervals")
    parser.add_argument("--child", choices=("decode", "choose", "measure"), help=argparse.SUPPRESS)
    parser.add_argument("--interval", default="none", help=argparse.SUPPRESS)
    parser.add_argument("--objective_s", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    restart_in_engine_environment()
    if options.child:
        print(json.dumps({"decode": decode, "choose": choose, "measure": measure}[options.child](options)))
        return
    alone = child("decode")["steps_s"]
    alone_s = statistics.median(alone)
    print(
        f"a step without offloading: {1e3 * alone_s:.1f} ms, P99 {1e3 * percentile(alone, 0.99):.1f}; steps "
        "below are in parts of the objective"
    )
    record = {} if options.record == "saved" else child("measure")
    if record:
        delays = ", ".join(f"{1e3 * each:.1f}" for each in record["delays_s"])
        print(
            f"{options.record} record: 99 % of transfers within {1e3 * record['transfer_s']:.1f} ms; delays "
            f"of {delays} ms in 1, 2, 4 ... ms; others used {record['others_share']:.0%} of the processors",
            flush=True,
        )
    results = []
    for times in map(float, options.objectives.split(",")):
        objective_s = times * alone_s
        chosen = child("choose", objective_s=objective_s)
        interval = chosen["interval"]
        result: dict[str, Any] = {"objective_s": objective_s, **chosen, "runs": {}}
        for each in () if interval is None or options.choose_only else (interval, interval - 1):
            if each:
                result["runs"][each] = summary(child("decode", interval=each), objective_s)
        results.append(result)
        predicted = ", ".join(
            f"{each} {seconds / objective_s:.3f}" for each, seconds in chosen["predicted_s"].items()
        )
        late = percentile(alone, 0.99) / objective_s
        print(
            f"objective {1e3 * objective_s:.1f} ms: interval {interval or 'none'}; by the record few exceed: "
            f"{predicted}; without offloading P99 {late:.3f}",
            flush=True,
        )
        for each, figures in result["runs"].items():
            print(
                f"  {each:>2}: P50 {figures['p50']:.3f}, P99 {figures['p99']:.3f}; of the time "
                f"{figures['stalls']:.1%} are stalls, {figures['excess_stalls']:.2%} beyond the objective"
            )
    figures = {"alone_s": alone_s, "alone_p99_s": percentile(alone, 0.99), "of_record": record}
    print(json.dumps({"benchmark": "offload_objectives", **vars(options), **figures, "results": results}))


if __name__ == "__main__":
    main()
