"""Time of the CPU's linear layers beside torch's, and against the machine's limits, by instruction set.

Each instruction set runs in a process of its own, in which oneDNN and MKL keep to it as well. Shapes are
those of SmolLM2-135M, thirty weights of each, used in turn as a model's layers are. Ours and torch's
alternate, and figures are medians. Torch computes in the faster of float32 and bfloat16, and its large
products are the matrix rate; the read rate is that of a large matrix-vector product. Layers of weights of 4
and 8 bits alternate with ours in bfloat16. Prints a table, and one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from machine_limits import fastest_dtype, measure_limits, processor_name

from backfill.engine.environment import engine_environment
from backfill.kernels.cpu import CpuKernels, available_isas
from backfill.kernels.isa import ISA_VARIABLE
from backfill.kernels.linears import Linear
from backfill.kernels.quantized import quantize, rounded_format

SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))  # outputs, inputs
COPIES = 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--isa", action="append", choices=available_isas(), help="default: all of this machine"
    )
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16", "float32"])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 64, 512])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--here", action="store_true", help="this process's instruction set alone")
    args = parser.parse_args()
    if args.here:
        print(json.dumps(measure(args)))
        return
    results = {isa: measure_apart(isa) for isa in args.isa or available_isas()}
    print(f"{processor_name()}, {torch.get_num_threads()} threads; medians; torch's time over ours")
    for isa, result in results.items():
        limits = result["limits"]
        print(f"{isa}: products {limits['matrix_gflop_s']:.0f} GFLOP/s, reads {limits['read_gb_s']:.1f} GB/s")
        for each in result["figures"]:
            print(
                f"  {each['dtype']:9} {each['rows']:4} rows: {each['gflop_s']:7.0f} GFLOP/s "
                f"({each['of_matrix_rate']:.2f} of the rate), {each['gb_s']:5.1f} GB/s "
                f"({each['of_read_rate']:.2f}); torch {each['torch_over_ours']:.2f} x"
            )
        for each in result["codes"]:
            print(
                f"  int{each['bits']} {each['rows']:8} rows: {each['gb_s']:5.1f} GB/s "
                f"({each['of_read_rate']:.2f}); {each['over_bfloat16']:.2f} x as fast as bfloat16"
            )
    print(json.dumps({"benchmark": "linear", "date": time.strftime("%Y-%m-%d"), "results": results}))


def measure_apart(isa: str) -> dict[str, object]:
    environment = {**os.environ, ISA_VARIABLE: isa}
    result: dict[str, object] = json.loads(
        subprocess.run(
            [sys.executable, __file__, "--here", *sys.argv[1:]],
            env={**environment, **engine_environment(environment)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout
    )
    return result


def measure(args: argparse.Namespace) -> dict[str, object]:
    limits, fastest = measure_limits(), fastest_dtype()
    figures = []
    for name in args.dtypes:
        dtype = getattr(torch, name)
        weights = [
            [torch.randn(out, size).div(size**0.5).to(dtype) for _ in range(COPIES)] for out, size in SHAPES
        ]
        for_torch = [[weight.to(fastest) for weight in of_shape] for of_shape in weights]
        kernels = CpuKernels()
        ours = [[kernels.linear(weight) for weight in of_shape] for of_shape in weights]
        num_weights = COPIES * sum(out * size for out, size in SHAPES)
        for rows in args.rows:
            inputs = [torch.randn(rows, size).to(dtype) for _, size in SHAPES]
            of_torch = [x.to(fastest) for x in inputs]

            def run_ours(inputs: list[torch.Tensor] = inputs, ours: list[list[object]] = ours) -> None:
                for x, of_shape in zip(inputs, ours, strict=True):
                    for linear in of_shape:
                        linear(x)  # type: ignore[operator]

            def run_torch(
                inputs: list[torch.Tensor] = of_torch, weights: list[list[torch.Tensor]] = for_torch
            ) -> None:
                for x, of_shape in zip(inputs, weights, strict=True):
                    for weight in of_shape:
                        F.linear(x, weight)

            ours_s, torch_s = alternating_s(run_ours, run_torch, args.runs)
            gflop_s, gb_s = 2e-9 * rows * num_weights / ours_s, 1e-9 * num_weights * dtype.itemsize / ours_s
            figures.append(
                {
                    "dtype": name,
                    "rows": rows,
                    "gflop_s": gflop_s,
                    "of_matrix_rate": gflop_s / limits["matrix_gflop_s"],
                    "gb_s": gb_s,
                    "of_read_rate": gb_s / limits["read_gb_s"],
                    "torch_over_ours": torch_s / ours_s,
                }
            )
    return {"limits": limits, "figures": figures, "codes": measure_codes(args, limits["read_gb_s"])}


def measure_codes(args: argparse.Namespace, read_gb_s: float) -> list[dict[str, float]]:
    """Layers of weights of 4 and 8 bits, in groups of 32, beside those in bfloat16."""
    kernels, figures = CpuKernels(), []
    weights = [torch.randn(out, size).bfloat16() for out, size in SHAPES for _ in range(COPIES)]
    plain = [kernels.linear(weight) for weight in weights]
    num_weights = sum(weight.numel() for weight in weights)
    for bits in (4, 8):
        codes = [kernels.linear(quantize(weight, bits)) for weight in weights]
        for rows in args.rows:
            inputs = {size: torch.randn(rows, size).bfloat16() for _, size in SHAPES}

            def run(linears: Sequence[Linear], inputs: dict[int, torch.Tensor] = inputs) -> None:
                for linear in linears:
                    linear(inputs[linear.in_features])

            ours_s, plain_s = alternating_s(partial(run, codes), partial(run, plain), args.runs)
            gb_s = 1e-9 * num_weights * rounded_format(bits).bytes_per_weight / ours_s
            figures.append(
                {
                    "bits": bits,
                    "rows": rows,
                    "gb_s": gb_s,
                    "of_read_rate": gb_s / read_gb_s,
                    "over_bfloat16": plain_s / ours_s,
                }
            )
    return figures


def alternating_s(first: Callable[[], None], second: Callable[[], None], runs: int) -> tuple[float, float]:
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(-1, runs):
        for run, found in zip((first, second), times, strict=True):
            started_at_s = time.perf_counter()
            run()
            if number >= 0:
                found.append(time.perf_counter() - started_at_s)
    return statistics.median(times[0]), statistics.median(times[1])


if __name__ == "__main__":
    main()
