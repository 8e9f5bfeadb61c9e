"""Two engines whose weights share a bus of too little bandwidth: coordinated intervals against static ones.

Each engine is a process with one thread and a model whose layers do not fit, so that one in so many must be
offloaded. The bus is emulated (``--offload-bus``). One engine has a tight objective for its steps, the other
a loose one. Objectives and bandwidth are multiples of what this machine does:

- a step without offloading is measured with both engines at work; objectives are ``--objectives`` of it;
- the tight engine needs ``--tight-share`` of the bandwidth at the largest interval that fits in its memory.

What is compared are ways to decide, before the start, how many layers each engine keeps in memory, and then
who gets how much of the bus. Each engine starts with its interval and keeps it. Variants, each with both
engines decoding all the time:

- static: an estimate before the start, as FlexGen's in Select-N's section 3: an equal part of the bus, and
  computation at its peak, the fastest step that was measured. The bus is shared equally;
- uncoordinated: the smallest interval that meets the objective if the whole bus were free. Shared equally;
- coordinated: the intervals that the coordinator gives both for a step without offloading, which save the
  most memory within the bandwidth; and shares as the engines of ``backfill serve --offload-bus`` choose them.

For each: percentiles of steps, which here are the gaps between a request's tokens, the part of them within
the objective, what layers waited, intervals, and the device memory that they save. Then the time that
the coordinator takes for several engines with layers of random sizes.

Usage: offload_contention.py [--seconds 12] [--batch 8] [--context 64]. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from in_process import restart_in_engine_environment

from backfill.bus.member import OBJECTIVE_SHARE
from backfill.bus.throttle import open_bus
from backfill.core.clock import WallClock
from backfill.core.config import GIB, EngineConfig, SchedulerConfig
from backfill.core.plan import Compute, StepPlan
from backfill.core.request import Request, RequestId
from backfill.core.sampling import SamplingParams
from backfill.engine.engine import Engine
from backfill.engine.process import load_engine
from backfill.execution.create import create_torch_executor
from backfill.execution.torch_executor import TorchExecutor
from backfill.models.resolve import resolve_model
from backfill.offloading.coordinator import BusInstance, coordinate
from backfill.offloading.interval import LayerTimes, smallest_interval

_ENGINES = ("tight", "loose")
_SETTLING_S = 1.5  # prompts, and the first steps' measurements

Job = dict[str, Any]


def measure(options: argparse.Namespace, job: Job) -> dict[str, Any]:
    """One engine, in its process: wait for the others, then decode for some seconds."""
    config = EngineConfig(
        model_dir=str(resolve_model(options.model)),
        kv_gib=0.25,
        threads=1,
        offload_interval=job["interval"],
        offload_bus=job["bus"],
        offload_bus_gib_per_s=job["gib_per_s"],
        scheduler=SchedulerConfig(prefix_caching=False, tpot_slo=job["objective_s"]),
    )
    if job["variant"] == "coordinated":
        engine = load_engine(config)
    else:
        engine = with_fixed_share(config, job["share"])
    for index in range(options.batch):
        prompt = [3 + (7 * index + 11 * place) % 1000 for place in range(options.context)]
        sampling = SamplingParams(max_tokens=1500, temperature=0.0, ignore_eos=True)
        engine.add(Request(request_id=RequestId(str(index)), prompt_token_ids=prompt, sampling=sampling))
    executor = engine.executor
    assert isinstance(executor, TorchExecutor)
    streamer = executor.streamer
    assert streamer is not None
    info = executor.info
    print("ready", flush=True)
    sys.stdin.readline()
    began_s = time.perf_counter()
    steps: list[float] = []
    intervals: Counter[int] = Counter()
    before = engine.stats()
    while (now_s := time.perf_counter()) < began_s + job["seconds"] and engine.has_unfinished:
        engine.step()
        if now_s < began_s + _SETTLING_S:
            before = engine.stats()
            continue
        steps.append(time.perf_counter() - now_s)
        intervals[engine.stats().offload_interval] += 1
    after = engine.stats()
    return {
        "steps_s": steps,
        "intervals": dict(intervals),
        "stall_s": (after.weight_stall_s - before.weight_stall_s) / len(steps),
        "transferred_bytes": after.num_transferred_weight_bytes - before.num_transferred_weight_bytes,
        "bus_share": after.bus_share,
        "bus_load": after.bus_load,
        "num_layers": info.num_layers,
        "layer_bytes": streamer.layer_bytes,
    }


def with_fixed_share(config: EngineConfig, share: float) -> Engine:
    """An engine whose transfers are held to the bus, and that does not coordinate."""
    executor = create_torch_executor(config, open_bus(config))
    executor.run(StepPlan(0, Compute(()), bus_share=share))
    return Engine(config.scheduler, executor, WallClock())


def run_together(jobs: list[Job]) -> list[dict[str, Any]]:
    """All jobs at the same time, each in a process of its own."""
    children = [
        subprocess.Popen(
            [sys.executable, *sys.argv, "--child", json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for job in jobs
    ]
    try:
        for child in children:
            assert child.stdout is not None
            if child.stdout.readline().strip() != "ready":
                raise SystemExit("an engine did not start; its message is above")
        for child in children:
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()
        return [json.loads(child.communicate()[0].splitlines()[-1]) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()


def summary(result: dict[str, Any], objective_s: float) -> dict[str, Any]:
    steps = sorted(result.pop("steps_s"))
    instance = BusInstance("", result["num_layers"], result["layer_bytes"], objective_s)
    saved = sum(number * instance.saved_bytes(int(of)) for of, number in result["intervals"].items())
    return result | {
        "objective_s": objective_s,
        "num_steps": len(steps),
        "mean_s": statistics.mean(steps),
        "p50_s": steps[len(steps) // 2],
        "p99_s": steps[len(steps) * 99 // 100],
        "within_objective": sum(each <= objective_s for each in steps) / len(steps),
        "saved_mib": saved / len(steps) / (1 << 20),
    }


def print_row(variant: str, engine: str, row: dict[str, Any]) -> None:
    print(
        f"{variant:>13} {engine}: step {1e3 * row['mean_s']:.1f} ms mean, {1e3 * row['p50_s']:.1f} P50, "
        f"{1e3 * row['p99_s']:.1f} P99 of {row['num_steps']}; {100 * row['within_objective']:.0f} % within "
        f"{1e3 * row['objective_s']:.1f}; stalls {1e3 * row['stall_s']:.1f}; intervals {row['intervals']}; "
        f"saves {row['saved_mib']:.0f} MiB; {row['transferred_bytes'] / 1e9:.2f} GB transferred",
        flush=True,
    )


def coordinator_s(num_engines: int) -> tuple[float, float]:
    """Median and longest time for engines of 32 to 80 layers, on a bus of 30 % of what they could use."""
    generator = random.Random(num_engines)
    took_s = []
    for _ in range(40):
        instances = []
        for index in range(num_engines):
            num_layers, compute_s = generator.choice([32, 40, 48, 60, 64, 80]), generator.uniform(2e-4, 2e-3)
            step_s = generator.uniform(1.1, 3.0) * (num_layers + 1) * compute_s
            layer_bytes = generator.randint(100 << 20, 900 << 20)
            instances.append(
                BusInstance(str(index), num_layers, layer_bytes, step_s, compute_s, compute_s, 1, num_layers)
            )
        least = sum(each.demand(each.num_layers) for each in instances)
        most = sum(each.demand(1) for each in instances if each.demand(1) < float("inf"))
        bandwidth = least + 0.3 * max(0.0, most - least)
        coordinate(instances, bandwidth)  # fills the cache of each engine's choices
        took_s.append(min(timed(lambda i=instances, b=bandwidth: coordinate(i, b)) for _ in range(5)))  # type: ignore[misc]
    return statistics.median(took_s), max(took_s)


def timed(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--seconds", type=float, default=12.0, help="of each variant")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--objectives", default="1.5,3", help="of the tight and the loose engine, in steps")
    parser.add_argument("--max-intervals", default="2,4", help="largest ones that their memory allows")
    parser.add_argument("--tight-share", type=float, default=0.65, help="of the bus, at its largest interval")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    restart_in_engine_environment()
    if options.child:
        print(json.dumps(measure(options, json.loads(options.child))))
        return
    max_intervals = [int(each) for each in options.max_intervals.split(",")]
    resident = measure_resident(options)
    num_layers, layer_bytes = resident[0]["num_layers"], resident[0]["layer_bytes"]
    steps = [step_s for each in resident for step_s in each["steps_s"]]
    step_s, fastest_s = statistics.median(steps), min(steps)
    objectives = [float(each) * step_s for each in options.objectives.split(",")]
    tight = BusInstance("", num_layers, layer_bytes, OBJECTIVE_SHARE * objectives[0], step_s / num_layers)
    bytes_per_s = tight.demand(max_intervals[0]) / options.tight_share
    print(
        f"a step without offloading takes {1e3 * step_s:.1f} ms, at best {1e3 * fastest_s:.1f}; a bus of "
        f"{bytes_per_s / GIB:.2f} GiB/s; a layer of {layer_bytes / (1 << 20):.2f} MiB takes "
        f"{1e3 * layer_bytes / bytes_per_s:.1f} ms alone",
        flush=True,
    )
    estimates = {
        "static": LayerTimes(num_layers, fastest_s / num_layers, 2 * layer_bytes / bytes_per_s),
        "uncoordinated": LayerTimes(num_layers, step_s / num_layers, layer_bytes / bytes_per_s),
    }
    coordinated = coordinated_intervals(estimates["uncoordinated"], layer_bytes, objectives, max_intervals)
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for variant in (*estimates, "coordinated"):
            jobs = []
            for index, (objective_s, most) in enumerate(zip(objectives, max_intervals, strict=True)):
                interval = coordinated[index]
                if variant in estimates:
                    smallest = smallest_interval(estimates[variant], OBJECTIVE_SHARE * objective_s)
                    interval = min(most, smallest or most)
                jobs.append(
                    {
                        "variant": variant,
                        "seconds": _SETTLING_S + options.seconds,
                        "bus": str(Path(folder) / "bus"),
                        "gib_per_s": bytes_per_s / GIB,
                        "interval": interval,
                        "share": 1 / 2,
                        "objective_s": objective_s,
                    }
                )
            found = zip(_ENGINES, run_together(jobs), objectives, strict=True)
            results[variant] = {name: summary(result, objective_s) for name, result, objective_s in found}
            for name, row in results[variant].items():
                print_row(variant, name, row)
    coordinator = {number: coordinator_s(number) for number in (2, 4, 8, 16)}
    for number, (median_s, longest_s) in coordinator.items():
        print(f"intervals of {number} engines: {1e6 * median_s:.0f} us, at most {1e6 * longest_s:.0f}")
    print(
        json.dumps(
            {"benchmark": "offload_contention", **vars(options), "step_s": step_s, "fastest_s": fastest_s,
             "bytes_per_s": bytes_per_s, "results": results, "coordinator_s": coordinator}
        )
    )  # fmt: skip


def measure_resident(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Steps of both engines with memory for all layers. One layer is offloaded, so that its size is known."""
    job: Job = {
        "variant": "resident", "seconds": _SETTLING_S + options.seconds / 2, "bus": None, "gib_per_s": None,
        "interval": num_layers_of(options), "objective_s": 1.0, "share": 1.0,
    }  # fmt: skip
    return run_together([job] * 2)


def coordinated_intervals(
    alone: LayerTimes, layer_bytes: int, objectives: list[float], max_intervals: list[int]
) -> list[int]:
    """What the coordinator gives the engines, from the times of a layer if the whole bus were free."""
    instances = []
    for index, (objective_s, most) in enumerate(zip(objectives, max_intervals, strict=True)):
        step_s = max(OBJECTIVE_SHARE * objective_s, alone.resident_step_s)
        smallest = smallest_interval(alone, step_s) or alone.num_layers
        instances.append(
            BusInstance(
                str(index), alone.num_layers, layer_bytes, step_s, alone.compute_s,
                min_interval=smallest, max_interval=most,
            )
        )  # fmt: skip
    plan = coordinate(instances, layer_bytes / alone.transfer_s)
    return [plan.of[str(index)].interval or alone.num_layers for index in range(len(instances))]


def num_layers_of(options: argparse.Namespace) -> int:
    config = json.loads((Path(resolve_model(options.model)) / "config.json").read_text())
    num_layers: int = config["num_hidden_layers"]
    return num_layers


if __name__ == "__main__":
    main()
