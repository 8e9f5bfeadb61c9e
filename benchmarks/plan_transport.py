"""Time of a plan's way to the ranks' processes and of the outcome's way back; they compute nothing.

Every request decodes one token a step, and one in ``block_size`` gets a new block. A step is timed from the
plan object to the outcome object: encoding, transport, decoding on all ranks, and the way back. Between two
steps the ranks sleep for ``--pause``. With ``--executor ray`` each rank is a stage of its own, in an actor of
Ray, and what is sent goes over TCP. Prints a table, and one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial

from idle_ranks import BLOCK_SIZE, load_idle_rank

from backfill.core.block import pack_block_ref
from backfill.core.config import EngineConfig
from backfill.core.plan import AdmittedRequest, Compute, ScheduledSlice, StepPlan
from backfill.core.request import RequestId
from backfill.core.sampling import SamplingParams
from backfill.parallel.executor import ParallelExecutor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--requests", type=int, nargs="*", default=[1, 64, 256])
    parser.add_argument("--context", type=int, default=2048, help="tokens of each request's block table")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--pause", type=float, default=0.002, help="seconds between two steps")
    parser.add_argument("--executor", choices=["process", "ray"], default="process")
    args = parser.parse_args()
    results = []
    for num_ranks in args.ranks:
        executor = created(num_ranks, args.executor)
        try:
            for num_requests in args.requests:
                times = sorted(step_times(executor, num_requests, args.context, args.steps, args.pause))
                median_s, p99_s = statistics.median(times), times[int(0.99 * len(times))]
                results.append(
                    {"ranks": num_ranks, "requests": num_requests, "median_s": median_s, "p99_s": p99_s}
                )
                print(
                    f"{num_ranks} ranks, {num_requests:3} requests: median {median_s * 1e3:.3f} ms, "
                    f"P99 {p99_s * 1e3:.3f} ms"
                )
        finally:
            executor.close()
    print(json.dumps({"arguments": vars(args), "steps": results}))


def created(num_ranks: int, executor: str) -> ParallelExecutor:
    if executor == "process":
        return ParallelExecutor(EngineConfig(tensor_parallel_size=num_ranks), 1, load_idle_rank)
    from backfill.parallel.ray_stages import plan_stages, start_stages

    config = EngineConfig(executor="ray", pipeline_parallel_size=num_ranks, threads=num_ranks)
    return ParallelExecutor(config, 1, load_idle_rank, start=partial(start_stages, plan_stages(config)))


def step_times(
    executor: ParallelExecutor, num_requests: int, context: int, num_steps: int, pause_s: float
) -> list[float]:
    """Seconds of each step, without the first one, which admits the requests."""
    ids = [RequestId(f"chatcmpl-{number:032x}") for number in range(num_requests)]
    # Staggered, so that in each step as many requests get a new block.
    starts = [context + number % BLOCK_SIZE for number in range(num_requests)]
    tables = [
        tuple(pack_block_ref(number * 1000 + index) for index in range(-(-start // BLOCK_SIZE)))
        for number, start in enumerate(starts)
    ]
    sampling = SamplingParams(max_tokens=1 << 16)
    admitted = tuple(AdmittedRequest(each, (1,) * context, sampling) for each in ids)
    times = []
    for step in range(num_steps + 1):
        for number, table in enumerate(tables):
            if starts[number] + step >= len(table) * BLOCK_SIZE:
                tables[number] = (*table, pack_block_ref(number * 1000 + len(table)))
        slices = tuple(
            ScheduledSlice(each, start + step, 1, table, samples=True)
            for each, start, table in zip(ids, starts, tables, strict=True)
        )
        plan = StepPlan(step, Compute(slices), admitted=admitted if step == 0 else ())
        time.sleep(pause_s)
        began = time.perf_counter()
        outcome = executor.run(plan)
        times.append(time.perf_counter() - began)
        assert len(outcome.sampled) == num_requests
    executor.run(StepPlan(num_steps + 1, Compute(()), released=tuple(ids)))
    return times[1:]


if __name__ == "__main__":
    main()
