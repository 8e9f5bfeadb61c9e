"""Whether memory-bound attention gains by running beside compute-bound matrix products on this CPU.

BlendServe (section 4) runs both kinds of operators at once on a GPU. Here the threads are split in two
groups: one reads the KV of a decode batch, the other multiplies rows by a layer's weights. The same work is
also done as the engine does it: one after the other, each with all threads. For several numbers of rows, from
products that are short beside the attention to products that are long, prints both times and their ratio
(gain, above 1: side by side is faster), and the ratio if each ran beside the other as fast as alone with all
threads (ideal).

Prints a table, and one JSON object as the last line. Ratios are medians of rounds that alternate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable

import torch
from attention import decode_work

from backfill.kernels.cpu import CpuKernels, available_isas

Work = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--intermediate", type=int, default=1536)
    parser.add_argument("--seqs", type=int, default=96, help="sequences of the decode batch")
    parser.add_argument("--context", type=int, default=512, help="tokens of each of them")
    parser.add_argument("--rows", type=int, nargs="*", default=[32, 64, 128, 256, 512])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    if args.threads < 2:
        parser.error("--threads must be at least 2")
    isa = available_isas()[-1]
    attention = decode_work(args, CpuKernels(isa))
    table = [measure(args, attention, products_work(args, CpuKernels(isa), rows), rows) for rows in args.rows]
    print(f"{isa}, {args.dtype}, {args.threads} threads, {args.seqs} sequences of {args.context} tokens")
    columns = "attention", "products", "in_turn", "beside"
    print(f"{'rows':>6}", *(f"{name:>11}" for name in columns), f"{'gain':>7} {'ideal':>7}   (times in ms)")
    for row in table:
        times = (f"{row[f'{name}_ms']:11.2f}" for name in columns)
        print(f"{row['rows']:6.0f}", *times, f"{row['gain']:7.2f} {row['ideal_gain']:7.2f}")
    print(json.dumps({"arguments": vars(args), "isa": isa, "overlap": table}))


def products_work(args: argparse.Namespace, kernels: CpuKernels, rows: int) -> Work:
    """The matrix products of all layers for so many rows; every layer has weights of its own."""
    hidden, dtype = args.heads * args.head_dim, getattr(torch, args.dtype)
    shapes = [
        (hidden + 2 * args.kv_heads * args.head_dim, hidden),
        (hidden, hidden),
        (2 * args.intermediate, hidden),
        (hidden, args.intermediate),
    ]
    layers = [
        [kernels.linear(torch.randn(shape).to(dtype), None) for shape in shapes] for _ in range(args.layers)
    ]
    inputs = {width: torch.randn(rows, width).to(dtype) for width in {shape[1] for shape in shapes}}

    def run() -> None:
        for layer in layers:
            for product, shape in zip(layer, shapes, strict=True):
                product(inputs[shape[1]])

    return run


def measure(args: argparse.Namespace, attention: Work, products: Work, rows: int) -> dict[str, float]:
    """Medians of alternating rounds."""
    halves = args.threads - args.threads // 2, args.threads // 2
    times: dict[str, list[float]] = {"attention": [], "products": [], "in_turn": [], "beside": []}
    for _ in range(args.rounds + 1):
        torch.set_num_threads(args.threads)
        times["attention"].append(seconds_of(attention))
        times["products"].append(seconds_of(products))
        times["in_turn"].append(seconds_of(attention, products))
        times["beside"].append(seconds_beside((attention, halves[0]), (products, halves[1])))
    median = {name: statistics.median(each[1:]) for name, each in times.items()}
    gains = [a / b for a, b in zip(times["in_turn"][1:], times["beside"][1:], strict=True)]
    return {
        "rows": rows,
        **{f"{name}_ms": 1e3 * each for name, each in median.items()},
        "gain": statistics.median(gains),
        "ideal_gain": median["in_turn"] / max(median["attention"], median["products"]),
    }


def seconds_of(*works: Work) -> float:
    started_at_s = time.perf_counter()
    for work in works:
        work()
    return time.perf_counter() - started_at_s


def seconds_beside(*groups: tuple[Work, int]) -> float:
    """Seconds until each work has ended on its own threads; all begin together."""
    barrier = threading.Barrier(len(groups) + 1)

    def run(work: Work, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        work()  # the group's own threads start here
        barrier.wait()
        work()

    threads = [threading.Thread(target=run, args=group) for group in groups]
    for thread in threads:
        thread.start()
    barrier.wait()
    started_at_s = time.perf_counter()
    for thread in threads:
        thread.join()
    return time.perf_counter() - started_at_s


if __name__ == "__main__":
    main()
