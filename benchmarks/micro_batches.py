"""Whether a step is faster as two micro-batches, its prefill beside its decodes (``--num-micro-batches 2``).

    python benchmarks/micro_batches.py --device cuda --model MODEL

Steps of decodes and a chunk of a prompt run alternately as one micro-batch and as two, on one model and one
KV pool. Two read the weights twice, so only steps can gain whose decodes read much KV. For each context of
the decodes prints both times and the median of their ratios (gain, above 1: two are faster), and one JSON
object as the last line. On a CPU the micro-batches take turns, and the ratio is what the split costs.
"""

from __future__ import annotations

import argparse
import json
import statistics

from in_process import restart_in_engine_environment
from safepoints import make_plan, seconds

from backfill.core.config import EngineConfig
from backfill.core.plan import StepPlan
from backfill.execution.create import create_torch_executor
from backfill.execution.micro_batches import MicroBatchStreams
from backfill.execution.torch_executor import TorchExecutor
from backfill.models.resolve import resolve_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--kv-gib", type=float, help="default: 1 on CPU, what is free on CUDA")
    parser.add_argument("--decodes", type=int, default=64)
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--chunk", type=int, default=512, help="tokens of the prefill")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    restart_in_engine_environment()
    folder = str(resolve_model(args.model))
    one = create_torch_executor(EngineConfig(model_dir=folder, device=args.device, kv_gib=args.kv_gib))
    two = TorchExecutor(one._model, one._kv_pool, one.info, MicroBatchStreams(one._kv_pool.device, 2))
    print(f"{one.info.device}, {one.info.dtype}, {args.decodes} decodes and a chunk of {args.chunk} tokens")
    print(f"{'context':>8} {'one, ms':>9} {'two, ms':>9} {'gain':>6}")
    table = []
    for context in args.contexts:
        num_blocks = (args.decodes + 1) * -(-max(context + 1, args.chunk) // one.info.block_size)
        if num_blocks > one.info.num_blocks:
            parser.error(
                f"context {context} needs {num_blocks} KV blocks, and there are {one.info.num_blocks}"
            )
        plans = [make_plan(each, args.decodes, context, args.chunk) for each in (one, two)]
        row = {"context": float(context), **measure((one, two), plans, args.rounds)}
        print(f"{context:8d} {row['one_ms']:9.2f} {row['two_ms']:9.2f} {row['gain']:6.2f}", flush=True)
        table.append(row)
    print(json.dumps({"benchmark": "micro_batches", "arguments": vars(args), "steps": table}))


def measure(
    executors: tuple[TorchExecutor, TorchExecutor], plans: list[StepPlan], rounds: int
) -> dict[str, float]:
    """Medians over rounds that alternate; the first warms up and does not count."""
    times: tuple[list[float], list[float]] = [], []
    for number in range(rounds + 1):
        for index in (0, 1) if number % 2 else (1, 0):
            times[index].append(seconds(executors[index], plans[index]))
    one_s, two_s = (each[1:] for each in times)
    return {
        "one_ms": 1e3 * statistics.median(one_s),
        "two_ms": 1e3 * statistics.median(two_s),
        "gain": statistics.median(one / two for one, two in zip(one_s, two_s, strict=True)),
    }


if __name__ == "__main__":
    main()
