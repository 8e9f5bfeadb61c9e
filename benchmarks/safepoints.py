"""The cost of safepoints to a step, and the latency of a stop.

    python benchmarks/safepoints.py
    python benchmarks/safepoints.py --tensor-parallel-size 3
    python benchmarks/safepoints.py --pipeline-parallel-size 2

Steps of 64 decodes and a chunk of a prompt alternate with and without safepoints on the real model. Then
another thread stops all steps in flight, as many as there are stages, at random instants, as an arrival does.
Each of them is resumed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from in_process import restart_in_engine_environment

from backfill.core.block import pack_block_ref
from backfill.core.config import EngineConfig
from backfill.core.plan import AdmittedRequest, Compute, Resume, Safepoints, ScheduledSlice, StepPlan
from backfill.core.request import RequestId
from backfill.core.sampling import SamplingParams
from backfill.execution.torch_executor import TorchExecutor
from backfill.models.resolve import resolve_model
from backfill.parallel.create import create_executor
from backfill.parallel.executor import ParallelExecutor

_NUM_DECODES, _CONTEXT, _CHUNK = 64, 256, 256
_MAX_STOP_S = 0.005


def make_plan(
    executor: TorchExecutor | ParallelExecutor,
    num_decodes: int = _NUM_DECODES,
    context: int = _CONTEXT,
    chunk: int = _CHUNK,
    copy: int = 0,
) -> StepPlan:
    """Offline decodes and a chunk of a prompt. None samples, so the plan can run any number of times.

    Plans of different copies have other requests and blocks, and may be in flight together.
    """
    blocks_each = -(-max(context + 1, chunk) // executor.info.block_size)
    shapes = [(context, 1)] * num_decodes + [(0, chunk)]
    first_block = copy * len(shapes) * blocks_each
    slices = tuple(
        ScheduledSlice(
            RequestId(f"r{copy}-{index}"),
            start,
            count,
            tuple(pack_block_ref(first_block + index * blocks_each + block) for block in range(blocks_each)),
            samples=False,
            stoppable=True,
        )
        for index, (start, count) in enumerate(shapes)
    )
    admitted = tuple(
        AdmittedRequest(
            scheduled.request_id,
            (5,) * (scheduled.start + scheduled.num_tokens),
            SamplingParams(max_tokens=1),
        )
        for scheduled in slices
    )
    executor.fill_kv_pool(executor.info.num_blocks)
    executor.run(StepPlan(step=0, work=Compute(slices=()), admitted=admitted))
    return StepPlan(step=0, work=Compute(slices))


def seconds(executor: TorchExecutor | ParallelExecutor, plan: StepPlan) -> float:
    began = time.perf_counter()
    executor.run(plan)
    return time.perf_counter() - began


def overhead(executor: TorchExecutor | ParallelExecutor, plan: StepPlan, rounds: int) -> tuple[float, float]:
    """Median seconds of a step without safepoints, and the median ratio of steps with and without them."""
    armed = replace(plan, work=Compute(plan.slices, safepoints=Safepoints(1, suspends=True)))
    plain_s, ratios = [], []
    for number in range(rounds):
        first, second = (plan, armed) if number % 2 else (armed, plan)
        one, two = seconds(executor, first), seconds(executor, second)
        plain, with_points = (one, two) if number % 2 else (two, one)
        plain_s.append(plain)
        ratios.append(with_points / plain)
    return statistics.median(plain_s), statistics.median(ratios)


def stops(
    executor: TorchExecutor | ParallelExecutor,
    plans: Sequence[StepPlan],
    points: Safepoints,
    step_s: float,
    rounds: int,
) -> Iterator[tuple[float, float]]:
    """Stop steps in flight at random times. Of each that stopped: when it was asked to, and when it did."""
    rng, num_layers = random.Random(0), executor.info.num_layers
    span_s = 0.7 * step_s * (1 + len(plans)) / 2
    for first in range(0, 2 * rounds * len(plans), 2 * len(plans)):
        numbers = range(first + 1, first + 1 + len(plans))
        asked: list[float] = []

        def ask(numbers: range = numbers, asked: list[float] = asked) -> None:
            time.sleep(rng.uniform(0.0, span_s))
            asked.append(time.monotonic())
            for number in numbers:
                executor.request_stop(number)

        thread = threading.Thread(target=ask)
        thread.start()
        for number, plan in zip(numbers, plans, strict=True):
            executor.submit(StepPlan(number, Compute(plan.slices, safepoints=points)))
        outcomes = [executor.collect() for _ in plans]
        thread.join()
        for number, plan, outcome in zip(numbers, plans, outcomes, strict=True):
            if outcome.stopped_at_s is not None:
                yield asked[0], outcome.stopped_at_s
                left = num_layers - outcome.layers_done
                resumed = Resume(plan.slices, left, step_s * left / num_layers, points)
                executor.run(StepPlan(number + len(plans), resumed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-parallel-size", type=int, default=1)
    options = parser.parse_args()
    restart_in_engine_environment()
    executor = create_executor(
        EngineConfig(
            model_dir=str(resolve_model(options.model)),
            tensor_parallel_size=options.tensor_parallel_size,
            pipeline_parallel_size=options.pipeline_parallel_size,
        )
    )
    plan = make_plan(executor)
    step_s, ratio = overhead(executor, plan, options.rounds)
    apart = max(1, int(_MAX_STOP_S / (step_s / executor.info.num_layers)))
    points = Safepoints(apart, suspends=True)
    plans = [plan, *(make_plan(executor, copy=copy) for copy in range(1, options.pipeline_parallel_size))]
    latencies = [stopped - asked for asked, stopped in stops(executor, plans, points, step_s, options.rounds)]
    group_s = apart * step_s / executor.info.num_layers
    p50, p99 = np.percentile(latencies, [50, 99])
    print(f"step of {_NUM_DECODES} decodes and {_CHUNK} prompt tokens: {step_s * 1000:.1f} ms")
    print(f"with a safepoint before every layer: {ratio - 1:+.2%} (goal: under 1 %)")
    print(f"stop: P50 {p50 * 1000:.2f} ms, P99 {p99 * 1000:.2f} ms of {len(latencies)}; "
          f"{apart} layers apart, {group_s * 1000:.2f} ms")  # fmt: skip
    print(json.dumps({
        "benchmark": "safepoints", "step_s": step_s, "armed_over_plain": ratio, "layers_apart": apart,
        "layer_group_s": group_s, "tensor_parallel_size": options.tensor_parallel_size,
        "pipeline_parallel_size": options.pipeline_parallel_size,
        "stop_p50_s": p50, "stop_p99_s": p99, "num_stops": len(latencies),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
