"""Drawing tokens and their log probabilities: the CPU's kernels over plain torch, by what requests ask for.

    python benchmarks/sampling.py
    python benchmarks/sampling.py --scale 1 --vocab 151936

Logits are normal numbers: the smaller their scale, the more tokens top-p keeps. A model's are mostly steeper.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from in_process import restart_in_engine_environment

from backfill.core.plan import AdmittedRequest
from backfill.core.request import RequestId
from backfill.core.sampling import SamplingParams
from backfill.execution.sampler import RequestState, row_sampling
from backfill.kernels.cpu import CpuKernels
from backfill.kernels.sampling import sample_rows
from backfill.kernels.scoring import score_rows

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {"temperature": 1.0},
    "top-p 0.95": {"temperature": 0.7, "top_p": 0.95},
    "top-k 40": {"temperature": 0.7, "top_k": 40},
    "min-p 0.05": {"temperature": 0.7, "min_p": 0.05},
}


def states_of(num_rows: int, case: dict[str, Any]) -> list[RequestState]:
    return [
        RequestState(
            AdmittedRequest(RequestId(f"r{row}"), (5, 6), SamplingParams(max_tokens=1, seed=row, **case))
        )
        for row in range(num_rows)
    ]


def seconds(call: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds + 2):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--scale", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    restart_in_engine_environment()
    kernels, generator = CpuKernels(), torch.Generator().manual_seed(0)
    for num_rows in options.rows:
        logits = torch.randn(num_rows, options.vocab, generator=generator).mul_(options.scale).bfloat16()
        cases: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {}
        for name, case in CASES.items():
            how = row_sampling(states_of(num_rows, case))
            cases[name] = partial(kernels.sample, logits, how), partial(sample_rows, logits.float(), how)
        for num_top in (0, 5, 20):
            asked = [7] * num_rows, [num_top] * num_rows
            name = f"log probabilities, {num_top} most likely"
            cases[name] = partial(kernels.score, logits, *asked), partial(score_rows, logits.float(), *asked)
        for name, (of_ours, of_torch) in cases.items():
            ours, torchs = seconds(of_ours, options.rounds), seconds(of_torch, options.rounds)
            print(f"{num_rows} rows, {name}: {ours * 1e3:.2f} ms, torch {torchs * 1e3:.2f}")
            print(json.dumps({"benchmark": "sampling", "isa": kernels.isa, "rows": num_rows, "case": name,
                              "scale": options.scale, "seconds": ours, "torch_seconds": torchs}))  # fmt: skip


if __name__ == "__main__":
    main()
