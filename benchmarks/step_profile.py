"""Where a decode step's time goes, by operator, beside what the machine's limits allow.

Runs a batch of requests past their prefill, then times every operator of the following steps from
outside (the wrappers add about 0.2 us a call). Floors: weights and KV bytes at the memory's measured
read rate, or FLOPs at the measured bf16 rate, whichever is longer.

Usage: step_profile.py [--seqs 64] [--context 256] [--steps 96]. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from peers import measure_limits

from backfill.core.clock import WallClock
from backfill.core.config import EngineConfig, SchedulerConfig
from backfill.core.request import Request, RequestId
from backfill.core.sampling import SamplingParams
from backfill.engine.engine import Engine
from backfill.engine.environment import engine_environment
from backfill.execution.create import create_torch_executor
from backfill.execution.torch_executor import TorchExecutor
from backfill.models.config import ModelConfig
from backfill.models.resolve import resolve_model

OPERATORS = ("rms_norm", "add_rms_norm", "silu_and_mul", "rotate_and_write_kv", "attention")
PROJECTIONS = ("qkv", "output", "gate_up", "down")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seqs", type=int, default=64)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--steps", type=int, default=96)
    args = parser.parse_args()
    settings = engine_environment(os.environ)
    if settings:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **settings})
    folder = resolve_model("smollm2-135m-instruct")
    executor = create_torch_executor(EngineConfig(model_dir=str(folder), kv_bytes=1 << 30))
    times, num_steps, step_s = profile(executor, args.seqs, args.context, args.steps)
    limits = measure_limits()
    mean_context = args.context + args.steps / 2
    floors = floors_ms(ModelConfig.from_folder(folder), args.seqs, mean_context, limits)
    rows = {name: 1e3 * seconds / num_steps for name, seconds in times.items()}
    rows["other Python"] = 1e3 * step_s - sum(rows.values())
    print(f"{args.seqs} requests of {mean_context:.0f} tokens on average: {1e3 * step_s:.2f} ms a step")
    print(f"limits: {limits['bf16_gflop_s']:.0f} bf16 GFLOP/s, {limits['read_gb_s']:.1f} GB/s read\n")
    print("| part of a step | ms | floor, ms |\n| --- | --- | --- |")
    for name, value in sorted(rows.items(), key=lambda row: -row[1]):
        floor = f"{floors[name]:.2f}" if name in floors else ""
        print(f"| {name} | {value:.2f} | {floor} |")
    result = {"seqs": args.seqs, "mean_context": mean_context, "step_ms": 1e3 * step_s, **limits}
    print(json.dumps({"benchmark": "step_profile", **result, "parts_ms": rows, "floors_ms": floors}))


def profile(
    executor: TorchExecutor, num_seqs: int, context: int, num_steps: int
) -> tuple[dict[str, float], int, float]:
    """Seconds of each part over all timed steps, their number, and the mean seconds of a step."""
    times: dict[str, float] = defaultdict(float)
    engine = Engine(SchedulerConfig(max_num_seqs=num_seqs), executor, WallClock())
    for index in range(num_seqs):
        prompt = [random.randrange(1000, 40000) for _ in range(context)]
        sampling = SamplingParams(max_tokens=num_steps + 8, temperature=0.0, ignore_eos=True)
        engine.add(Request(request_id=RequestId(str(index)), prompt_token_ids=prompt, sampling=sampling))
    num_started = 0
    while num_started < num_seqs:  # until each has its first token, that is, has left its prefill
        num_started += len({output.request_id for output in engine.step() if output.first_scheduled_at_s})
    install_timers(executor, engine, times)
    started_at_s = time.perf_counter()
    for _ in range(num_steps):
        engine.step()
    return times, num_steps, (time.perf_counter() - started_at_s) / num_steps


def install_timers(executor: TorchExecutor, engine: Engine, times: dict[str, float]) -> None:
    model: Any = executor._model

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            started_at_s = time.perf_counter()
            result = call(*args, **kwargs)
            times[name] += time.perf_counter() - started_at_s
            return result

        return run

    for name in OPERATORS:
        setattr(model.kernels, name, timed(name, getattr(model.kernels, name)))
    for layer in model._layers:
        for name in PROJECTIONS:
            setattr(layer, name, timed(f"linear {name}", getattr(layer, name)))
    model._lm_head = timed("lm_head", model._lm_head)
    for owner, name, label in (
        (executor, "_batch_of", "build batch"),
        (executor._sampler, "sample", "sample"),
        (engine.scheduler, "plan_step", "plan"),
        (engine.scheduler, "commit", "commit"),
    ):
        setattr(owner, name, timed(label, getattr(owner, name)))


def floors_ms(config: ModelConfig, seqs: int, context: float, limits: dict[str, float]) -> dict[str, float]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sizes = {
        "linear qkv": hidden * (q_size + 2 * kv_size) * config.num_layers,
        "linear output": q_size * hidden * config.num_layers,
        "linear gate_up": hidden * 2 * inner * config.num_layers,
        "linear down": inner * hidden * config.num_layers,
        "lm_head": hidden * config.vocab_size,
    }
    read, rate = limits["read_gb_s"] * 1e9, limits["bf16_gflop_s"] * 1e9
    floors = {name: 1e3 * max(2 * size / read, 2 * size * seqs / rate) for name, size in sizes.items()}
    floors["attention"] = 1e3 * seqs * context * config.kv_bytes_per_token(2) / read
    return floors


if __name__ == "__main__":
    main()
