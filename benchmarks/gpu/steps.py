"""Steps of a model on a GPU beside the least time that its memory and its matrix units allow.

    python benchmarks/gpu/steps.py FOLDER --read-gb-s 3000 --matmul-tflop-s 750

For steps of decodes and of prompts: seconds, the share of the device's limit, how long kernels ran, and
which. Then attention alone, safepoints armed and not, stops, micro-batches. Limits come from ``limits.py``.
The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from limits import seconds as device_seconds
from micro_batches import measure as measure_micro_batches
from safepoints import make_plan, stops

from backfill.core.block import pack_block_ref
from backfill.core.config import EngineConfig, SchedulerConfig
from backfill.core.plan import AdmittedRequest, Compute, Safepoints, ScheduledSlice, StepPlan
from backfill.core.request import RequestId
from backfill.core.sampling import SamplingParams
from backfill.execution.create import create_torch_executor
from backfill.execution.micro_batches import MicroBatchStreams
from backfill.execution.torch_executor import TorchExecutor

_ROUNDS = 15
_DECODES = ((1, 1024), (64, 1024), (256, 1024), (64, 4096))
_PROMPTS = ((1, 2048), (1, 8192), (8, 1024))


class Limits(argparse.Namespace):
    read_gb_s: float
    matmul_tflop_s: float


def decode_plan(
    executor: TorchExecutor, shapes: list[tuple[int, int]], temperature: float = 0.0, shared: int = 0
) -> StepPlan:
    """A step that samples a token after each (context, tokens), which have ``shared`` tokens in common.

    It can run any number of times.
    """
    size, first, slices = executor.info.block_size, 0, []
    for index, (context, count) in enumerate(shapes):
        num = -(-(context + count) // size)
        blocks = tuple(pack_block_ref(block + first * (block >= shared // size)) for block in range(num))
        first += num
        slices.append(ScheduledSlice(RequestId(f"s{index}"), context, count, blocks, samples=True))
    assert first <= executor.info.num_blocks, (
        f"{first} KV blocks are needed, {executor.info.num_blocks} are there"
    )
    sampling = SamplingParams(max_tokens=4096, temperature=temperature)
    admitted = tuple(
        AdmittedRequest(each.request_id, (5,) * (each.start + each.num_tokens), sampling) for each in slices
    )
    released = tuple(each.request_id for each in slices)
    executor.run(StepPlan(step=0, work=Compute(slices=()), released=released))
    executor.run(StepPlan(step=0, work=Compute(slices=()), admitted=admitted))
    return StepPlan(step=0, work=Compute(tuple(slices)))


def wall_seconds(work: Callable[[], object], rounds: int = _ROUNDS) -> float:
    times = []
    for _ in range(rounds + 3):
        began_s = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began_s)
    return statistics.median(times[3:])


def kernels_of(work: Callable[[], object]) -> tuple[float, dict[str, float]]:
    """Milliseconds in which the device computes, and of the longest kernels by name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    times = {each.key[:48]: each.self_device_time_total / 1000.0 for each in profile.key_averages()}
    longest = sorted(times.items(), key=lambda item: -item[1])[:8]
    return sum(times.values()), {name: round(ms, 3) for name, ms in longest}


def least_s(executor: TorchExecutor, shapes: list[tuple[int, int]], limits: Limits) -> float:
    """Bytes over the bandwidth, or operations over the matrix rate, whichever is more."""
    config, tokens = executor._model.config, sum(count for _, count in shapes)
    layer = config.hidden_size * config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    layer += 3 * config.hidden_size * config.intermediate_size
    weights, head = config.num_layers * layer, config.vocab_size * config.hidden_size
    of_token = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    num_bytes = 2 * (weights + head) + of_token * sum(context + count for context, count in shapes)
    pairs = sum(count * context + count * (count + 1) // 2 for context, count in shapes)
    flops = 2 * weights * tokens + 2 * head * len(shapes)
    flops += 4 * pairs * config.num_layers * config.num_heads * config.head_dim
    return max(num_bytes / (limits.read_gb_s * 1e9), flops / (limits.matmul_tflop_s * 1e12))


def measure_step(executor: TorchExecutor, shapes: list[tuple[int, int]], limits: Limits) -> dict[str, Any]:
    plan = decode_plan(executor, shapes)
    step_s = wall_seconds(lambda: executor.run(plan))
    device_ms, kernels = kernels_of(lambda: executor.run(plan))
    least = least_s(executor, shapes, limits)
    row = {
        "requests": len(shapes), "context": shapes[0][0], "tokens": shapes[0][1], "step_ms": 1e3 * step_s,
        "of_limit": least / step_s, "device_ms": device_ms, "device_of_limit": 1e3 * least / device_ms,
        "kernels_ms": kernels,
    }  # fmt: skip
    print(json.dumps(row), flush=True)
    return row


def measure_attention(
    executor: TorchExecutor, batch: int, context: int, count: int, shared: int = 0
) -> dict[str, float]:
    """One layer's attention: GB/s of each one's KV for decodes, TFLOP/s for prompts."""
    plan = decode_plan(executor, [(context, count)] * batch, shared=shared)
    assert isinstance(plan.work, Compute)
    attention = executor._batch_of(plan.work.slices).attention
    model, config, pool = executor._model, executor._model.config, executor._kv_pool
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    qkv = torch.randn(batch * count, width, dtype=pool.dtype, device=pool.device)

    def attend() -> None:  # all layers: one alone would be in the cache
        for layer in range(config.num_layers):
            model.kernels.attention(qkv, pool, layer, attention, config.num_heads, config.attention_scale)

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()  # without the host's launches
    with torch.cuda.graph(graph):
        attend()
    took_s = device_seconds(graph.replay, 10) / config.num_layers
    pairs = batch * (count * context + count * (count + 1) // 2)
    num_bytes = 4 * batch * (context + count) * config.num_kv_heads * config.head_dim
    return {
        "batch": batch, "context": context, "tokens": count, "shared": shared, "us": 1e6 * took_s,
        "kv_gb_s": num_bytes / took_s / 1e9,
        "tflop_s": 4 * pairs * config.num_heads * config.head_dim / took_s / 1e12,
    }  # fmt: skip


def measure_stops(executor: TorchExecutor, rounds: int) -> dict[str, float]:
    """Safepoints armed against not; from a stop's request to the host's answer and to an idle device."""
    plan = make_plan(executor, 64, 1024, 2048)
    points = Safepoints(1, suspends=True)
    armed = replace(plan, work=Compute(plan.slices, safepoints=points))
    plain_s = wall_seconds(lambda: executor.run(plan))
    armed_s = wall_seconds(lambda: executor.run(armed))
    answers, idles = [], []
    for asked_at_s, stopped_at_s in stops(executor, [plan], points, armed_s, rounds):
        torch.cuda.synchronize()
        idles.append(time.monotonic() - asked_at_s)
        answers.append(stopped_at_s - asked_at_s)
    return {
        "step_ms": 1e3 * plain_s, "armed_over_plain": armed_s / plain_s, "stops": len(answers),
        "layer_ms": 1e3 * plain_s / executor.info.num_layers,
        "answer_p50_ms": 1e3 * statistics.median(answers), "answer_max_ms": 1e3 * max(answers),
        "idle_p50_ms": 1e3 * statistics.median(idles), "idle_max_ms": 1e3 * max(idles),
    }  # fmt: skip


def measure_streams(executor: TorchExecutor) -> list[dict[str, float]]:
    """A chunk of a prompt beside 64 decodes, as one micro-batch and as two."""
    streams = MicroBatchStreams(executor._kv_pool.device, 2)
    two = TorchExecutor(executor._model, executor._kv_pool, executor.info, streams)
    rows = []
    for context in (1024, 4096):
        plans = [make_plan(each, 64, context, 2048) for each in (executor, two)]
        rows.append({"context": context, **measure_micro_batches((executor, two), plans, _ROUNDS)})
    return rows


def measure_sampled(executor: TorchExecutor) -> dict[str, Any]:
    """64 decodes that are drawn with a temperature, beside those that take the likeliest token."""
    greedy = decode_plan(executor, [(1024, 1)] * 64)
    greedy_s = wall_seconds(lambda: executor.run(greedy))
    drawn = decode_plan(executor, [(1024, 1)] * 64, temperature=0.7)
    _, kernels = kernels_of(lambda: executor.run(drawn))
    drawn_s = wall_seconds(lambda: executor.run(drawn))
    return {"greedy_ms": 1e3 * greedy_s, "drawn_ms": 1e3 * drawn_s, "kernels_ms": kernels}


def without_graphs(executor: TorchExecutor, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The same with each kernel launched by itself."""
    graphs, executor._graphs = executor._graphs, None
    try:
        return work()
    finally:
        executor._graphs = graphs


def attempt(name: str, work: Callable[[], Any]) -> Any:
    """What ``work`` finds; a failure is shown and stops nothing else."""
    try:
        found = work()
    except Exception as error:  # of one figure among many, on a machine that is lent for minutes
        found = {"error": repr(error)[:300]}
    print(name, json.dumps(found), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("folder")
    parser.add_argument("--read-gb-s", type=float, required=True)
    parser.add_argument("--matmul-tflop-s", type=float, required=True)
    parser.add_argument("--offload-interval", default="none")
    options = parser.parse_args(namespace=Limits())
    began_s = time.perf_counter()
    config = EngineConfig(
        model_dir=options.folder, device="cuda", load_format="dummy", host_kv_gib=1.0, max_model_len=16384,
        kv_gib=None if options.offload_interval == "none" else 20.0, offload_interval=options.offload_interval
        if options.offload_interval == "none" else int(options.offload_interval),
        scheduler=SchedulerConfig(max_num_batched_tokens=8192, max_num_seqs=256),
    )  # fmt: skip
    executor = create_torch_executor(config)
    result: dict[str, Any] = {
        "benchmark": "gpu-steps", "device": torch.cuda.get_device_name(),
        "start_s": time.perf_counter() - began_s, "offload_interval": options.offload_interval,
        "num_blocks": executor.info.num_blocks,
    }  # fmt: skip
    print(f"started in {result['start_s']:.1f} s; {executor.info.num_blocks} KV blocks", flush=True)
    for blocks in executor._kv_pool.split(1024):
        blocks.normal_()  # of zeros, products are faster
    if options.offload_interval != "none":
        result["decodes"] = [attempt("decode", lambda: measure_step(executor, [(1024, 1)] * 64, options))]
        result["prompts"] = [attempt("prompt", lambda: measure_step(executor, [(0, 8192)], options))]
        assert executor.streamer is not None
        times = list(executor.streamer._link.times_s)
        result["transfer_gb_s"] = executor.streamer.layer_bytes / statistics.median(times) / 1e9
    else:
        result["decodes"] = [
            attempt("decode", lambda b=b, c=c: measure_step(executor, [(c, 1)] * b, options))
            for b, c in _DECODES
        ]
        result["eager_decodes"] = [
            attempt(
                "eager",
                lambda b=b, c=c: without_graphs(
                    executor, lambda: measure_step(executor, [(c, 1)] * b, options)
                ),
            )
            for b, c in _DECODES[:3]
        ]
        result["prompts"] = [
            attempt("prompt", lambda b=b, n=n: measure_step(executor, [(0, n)] * b, options))
            for b, n in _PROMPTS
        ]
        result["mixed"] = attempt(
            "mixed", lambda: measure_step(executor, [(1024, 1)] * 64 + [(0, 2048)], options)
        )
        result["sampled"] = attempt("sampled", lambda: measure_sampled(executor))
        result["attention"] = [
            attempt("attention", lambda shape=shape: measure_attention(executor, *shape))
            for shape in (
                (64, 1024, 1),
                (256, 1024, 1),
                (64, 4096, 1),
                (64, 4096, 1, 256),
                (64, 4096, 1, 4032),
                (8, 16000, 1),
                (1, 0, 8192),
                (8, 0, 1024),
            )
        ]
        result["stops"] = attempt("stops", lambda: measure_stops(executor, 40))
        result["micro_batches"] = attempt("micro-batches", lambda: measure_streams(executor))
    executor.close()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
