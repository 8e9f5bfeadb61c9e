"""What the direction bit of block references costs decode attention (BROS, section 5.1).

Times decode attention over tables whose references are all forward, half of them reversed at random, and all
reversed. ``forward again`` is the first once more: its ratio is the noise. Kernels read the bit of every
reference, so what reading it costs is in all of them; what is measured is acting on it. Each timing reads
other blocks, at random places of a pool of 0.4 GB that the machine's caches do not hold. The tables take
turns, each round in another order; a ratio is the median of the rounds' ratios to ``forward``.

Usage: direction_bit.py [--rounds 40] [--isa all]. Prints a table, and one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
from attention import make_batch
from machine_limits import processor_name

from backfill.kernels.cpu import CpuKernels, available_isas
from backfill.kernels.inputs import AttentionMetadata

BATCHES, CONTEXTS, BLOCK_SIZES = (1, 16, 64), (128, 512, 2048), (16, 32)
REVERSED = {"forward": 0.0, "forward again": 0.0, "half reversed": 0.5, "reversed": 1.0}
_LAYERS = 4
_LEAST_TOKENS = 64 * 128  # of one timing: a batch that has fewer is computed several times, on other blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--isa", choices=["all", *available_isas()], help="default: the best of this machine")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    memory = torch.empty(
        max(BATCHES) * max(CONTEXTS) * _LAYERS * 2 * args.kv_heads * args.head_dim,
        dtype=getattr(torch, args.dtype),
    ).normal_()
    isas = available_isas() if args.isa == "all" else [args.isa or available_isas()[-1]]
    cases = [
        measure(args, isa, memory, block_size, num_seqs, context)
        for isa in isas
        for block_size in BLOCK_SIZES
        for num_seqs in BATCHES
        for context in CONTEXTS
    ]
    print_table(cases)
    print(json.dumps({"processor": processor_name(), "arguments": vars(args), "cases": cases}))


def measure(
    args: argparse.Namespace, isa: str, memory: torch.Tensor, block_size: int, num_seqs: int, context: int
) -> dict[str, Any]:
    """Median seconds of one layer for each kind of table, and the medians of the ratios to ``forward``."""
    kernels = CpuKernels(isa)
    pool = memory.view(-1, _LAYERS, 2, args.kv_heads, block_size, args.head_dim)
    num_passes = max(1, _LEAST_TOKENS // (num_seqs * context))
    qkv = torch.randn(num_seqs, (args.heads + 2 * args.kv_heads) * args.head_dim).to(pool.dtype)

    def seconds_of(passes: list[AttentionMetadata]) -> float:
        began_at_s = time.perf_counter()
        for batch in passes:
            for layer in range(_LAYERS):
                kernels.attention(qkv, pool, layer, batch, args.heads, args.head_dim**-0.5)
        return (time.perf_counter() - began_at_s) / len(passes) / _LAYERS

    times: dict[str, list[float]] = {name: [] for name in REVERSED}
    names = list(REVERSED)
    for turn in range(-1, args.rounds):  # the first round warms up
        for name in (*names[turn % len(names) :], *names[: turn % len(names)]):
            passes = draw_passes(len(pool), block_size, num_seqs, context, REVERSED[name], num_passes)
            seconds = seconds_of(passes)
            if turn >= 0:
                times[name].append(seconds)
    return {
        "isa": isa,
        "block_size": block_size,
        "num_seqs": num_seqs,
        "context": context,
        "seconds": {name: statistics.median(each) for name, each in times.items()},
        "ratios": {
            name: statistics.median(a / b for a, b in zip(times[name], times["forward"], strict=True))
            for name in names[1:]
        },
    }


def draw_passes(
    num_blocks: int, block_size: int, num_seqs: int, context: int, reversed_share: float, num_passes: int
) -> list[AttentionMetadata]:
    """Decodes over random blocks, no two passes over the same, of which this share is reversed."""
    each = num_seqs * context // block_size
    order, layout = torch.randperm(num_blocks), argparse.Namespace(block_size=block_size)
    passes = []
    for index in range(num_passes):
        blocks = order[index * each : (index + 1) * each]
        batch = make_batch(layout, [1] * num_seqs, [context] * num_seqs, blocks)
        is_reversed = (torch.rand(each) < reversed_share).int()
        passes.append(replace(batch, block_table=batch.block_table | is_reversed))
    return passes


def print_table(cases: list[dict[str, Any]]) -> None:
    names = list(REVERSED)[1:]
    print(
        f"{'isa':>12} {'block':>5} {'seqs':>4} {'context':>7} {'us':>8}", *(f"{name:>13}" for name in names)
    )
    for case in cases:
        print(
            f"{case['isa']:>12} {case['block_size']:5} {case['num_seqs']:4} {case['context']:7} "
            f"{1e6 * case['seconds']['forward']:8.1f}",
            *(f"{case['ratios'][name]:13.3f}" for name in names),
        )
    for name in names:
        ratios = [case["ratios"][name] for case in cases]
        print(f"{name}: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main()
