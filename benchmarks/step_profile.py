"""Where a decode step's time goes, by operator, beside what the machine's limits allow.

Runs a batch of requests past their prefill and times the following steps, twice over the same contexts:

- whole: times only ``Engine.step`` and the model's forward pass in it (embedding to logits). The
  difference is the time outside the model. A served step also sends its report to the serving process: state,
  encoding, ZeroMQ, decoding. These are measured separately with the last step's report (``ipc.py``). In
  service ZeroMQ and decoding overlap with the next step, so their sum is an upper bound.
- by part: times every operator from outside (the wrappers add about 0.2 us a call). On a CPU the operators of
  half a layer are otherwise one call (docs/kernels.md), so their sum is longer than the step. ``gate_up``
  has its silu in it there.

A floor is the longer of two times: weights and KV bytes at the measured read rate of memory, and FLOPs at the
measured matrix rate.

Usage: step_profile.py [--seqs 64] [--context 256] [--steps 96]. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from in_process import check_no_prefix_hits, restart_in_engine_environment
from ipc import measure_ipc
from machine_limits import kept_bytes_per_weight, measure_limits

from backfill.core.clock import WallClock
from backfill.core.config import EngineConfig, SchedulerConfig
from backfill.core.request import Request, RequestId
from backfill.core.sampling import SamplingParams
from backfill.engine.engine import Engine
from backfill.engine.messages import StepReport
from backfill.execution.create import create_torch_executor
from backfill.execution.torch_executor import TorchExecutor
from backfill.models.config import ModelConfig
from backfill.models.resolve import resolve_model

OPERATORS = ("rms_norm", "add_rms_norm", "silu_and_mul", "rotate_and_write_kv", "attention")
FORWARD_PASS = ("embed", "run_layers", "logits")
PROJECTIONS = ("qkv", "output", "gate_up", "down")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seqs", type=int, default=64)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--steps", type=int, default=96)
    args = parser.parse_args()
    restart_in_engine_environment()
    folder = resolve_model("smollm2-135m-instruct")
    executor = create_torch_executor(EngineConfig(model_dir=str(folder), kv_gib=1.0))
    whole = profile_whole(executor, args.seqs, args.context, args.steps)
    parts, step_s = profile_parts(executor, args.seqs, args.context, args.steps)
    limits = measure_limits()
    mean_context = args.context + args.steps / 2
    floors = floors_ms(folder, args.seqs, mean_context, limits)
    rows = {name: 1e3 * seconds for name, seconds in parts.items()}
    rows["other Python"] = 1e3 * step_s - sum(rows.values())
    print(f"{args.seqs} requests of {mean_context:.0f} tokens on average, {args.steps} steps")
    print(f"limits: {limits['matrix_gflop_s']:.0f} GFLOP/s, {limits['read_gb_s']:.1f} GB/s read\n")
    print_whole(whole)
    print(f"\n| part of a step of {1e3 * step_s:.2f} ms | ms | floor, ms |\n| --- | --- | --- |")
    for name, value in sorted(rows.items(), key=lambda row: -row[1]):
        floor = f"{floors[name]:.2f}" if name in floors else ""
        print(f"| {name} | {value:.2f} | {floor} |")
    result = {"seqs": args.seqs, "mean_context": mean_context, "step_ms": 1e3 * step_s, **limits}
    print(
        json.dumps(
            {"benchmark": "step_profile", **result, "whole": whole, "parts_ms": rows, "floors_ms": floors}
        )
    )


def profile_whole(executor: TorchExecutor, num_seqs: int, context: int, num_steps: int) -> dict[str, float]:
    """Mean seconds of a step, of the model in it and of the report, and the report's ``num_bytes``."""
    engine = started_engine(executor, num_seqs, context, num_steps)
    times: dict[str, float] = defaultdict(float)
    model: Any = executor._model
    passes = {name: getattr(model, name) for name in FORWARD_PASS}
    for name, call in passes.items():
        setattr(model, name, timed(times, "model", call))
    step, stats = timed(times, "step", engine.step), timed(times, "stats", engine.stats)
    try:
        for _ in range(num_steps):
            report = StepReport(step(), stats())
    finally:
        for name, call in passes.items():
            setattr(model, name, call)
    assert len(report.outputs) == num_seqs, f"{len(report.outputs)} outputs of {num_seqs} requests"
    means = {f"{name}_s": seconds / num_steps for name, seconds in times.items()}
    return {**means, "outside_s": means["step_s"] - means["model_s"], **measure_ipc(report)}


def print_whole(whole: dict[str, float]) -> None:
    outside_s, step_s = whole["outside_s"], whole["step_s"]
    ipc_s = whole["stats_s"] + whole["encode_s"] + whole["decode_s"] + whole["round_trip_s"] / 2
    print("| a step, measured whole | ms | of the step |\n| --- | --- | --- |")
    for name, seconds in (
        ("Engine.step", step_s),
        ("the model, embedding to logits", whole["model_s"]),
        ("outside the model", outside_s),
        ("its report: state", whole["stats_s"]),
        (f"encoding {whole['num_bytes']:.0f} bytes", whole["encode_s"]),
        ("ZeroMQ, half of a round trip", whole["round_trip_s"] / 2),
        ("decoding", whole["decode_s"]),
        ("outside the model, report included", outside_s + ipc_s),
    ):
        print(f"| {name} | {1e3 * seconds:.3f} | {100 * seconds / step_s:.1f} % |")


def profile_parts(
    executor: TorchExecutor, num_seqs: int, context: int, num_steps: int
) -> tuple[dict[str, float], float]:
    """Mean seconds of each part of a step, and of the whole step."""
    times: dict[str, float] = defaultdict(float)
    engine = started_engine(executor, num_seqs, context, num_steps)
    install_timers(executor, engine, times)
    started_at_s = time.perf_counter()
    for _ in range(num_steps):
        engine.step()
    step_s = (time.perf_counter() - started_at_s) / num_steps
    return {name: seconds / num_steps for name, seconds in times.items()}, step_s


def started_engine(executor: TorchExecutor, num_seqs: int, context: int, num_steps: int) -> Engine:
    """An engine whose requests have ended their prefill and have at least ``num_steps`` steps to go."""
    engine = Engine(SchedulerConfig(max_num_seqs=num_seqs), executor, WallClock())
    for index in range(num_seqs):
        prompt = [random.randrange(executor.info.vocab_size) for _ in range(context)]
        # The first request decodes while the others prefill, at most a step for each.
        sampling = SamplingParams(max_tokens=num_steps + num_seqs + 8, temperature=0.0, ignore_eos=True)
        engine.add(Request(request_id=RequestId(str(index)), prompt_token_ids=prompt, sampling=sampling))
    num_started = 0
    while num_started < num_seqs:  # until each has its first token
        num_started += len({output.request_id for output in engine.step() if output.first_scheduled_at_s})
    check_no_prefix_hits(engine.scheduler.counters.values())
    return engine


def timed(times: dict[str, float], name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, whose seconds are added to ``times[name]``."""

    def run(*args: Any, **kwargs: Any) -> Any:
        started_at_s = time.perf_counter()
        result = call(*args, **kwargs)
        times[name] += time.perf_counter() - started_at_s
        return result

    return run


def install_timers(executor: TorchExecutor, engine: Engine, times: dict[str, float]) -> None:
    model: Any = executor._model

    for name in OPERATORS:
        setattr(model.kernels, name, timed(times, name, getattr(model.kernels, name)))
    for index, layer in model.layers.items():
        timers = {name: timed(times, f"linear {name}", getattr(layer, name)) for name in PROJECTIONS}
        model.layers[index] = replace(layer, **timers)
    model._lm_head = timed(times, "lm_head", model._lm_head)
    for owner, name, label in (
        (executor, "_batch_of", "build batch"),
        (executor._sampler, "sample", "sample"),
        (engine.scheduler, "plan_step", "plan"),
        (engine.scheduler, "commit", "commit"),
    ):
        setattr(owner, name, timed(times, label, getattr(owner, name)))


def floors_ms(folder: Path, seqs: int, context: float, limits: dict[str, float]) -> dict[str, float]:
    config = ModelConfig.from_folder(folder)
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sizes = {
        "linear qkv": hidden * (q_size + 2 * kv_size) * config.num_layers,
        "linear output": q_size * hidden * config.num_layers,
        "linear gate_up": hidden * 2 * inner * config.num_layers,
        "linear down": inner * hidden * config.num_layers,
        "lm_head": hidden * config.vocab_size,
    }
    read, rate = limits["read_gb_s"] * 1e9, limits["matrix_gflop_s"] * 1e9
    width = kept_bytes_per_weight(folder, config)
    floors = {name: 1e3 * max(width * size / read, 2 * size * seqs / rate) for name, size in sizes.items()}
    floors["attention"] = 1e3 * seqs * context * config.kv_bytes_per_token(2) / read
    return floors


if __name__ == "__main__":
    main()
