"""Time of the CPU attention kernels against the machine's limits: memory for decode, arithmetic for prefill.

Prints a table, and one JSON object as the last line. Every figure is the median of several runs. The default
shapes are those of SmolLM2-135M. The decode pool holds all layers and the layers run in turn, so that no
cache holds a layer's KV.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from backfill.core.block import KV_SCALE_BYTES
from backfill.kernels.cpu import CpuKernels, available_isas
from backfill.kernels.inputs import AttentionMetadata


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--seqs", type=int, default=64, help="sequences of the decode batch")
    parser.add_argument(
        "--context", type=int, default=384, help="tokens of each sequence of the decode batch"
    )
    parser.add_argument("--shared", type=int, default=0, help="of them, tokens with which all begin")
    parser.add_argument("--sharers", type=int, help="sequences that begin alike; default: all of them")
    parser.add_argument("--prompts", type=int, nargs="*", default=[256, 1024, 4096])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--kv-dtype", choices=["auto", "int8"], default="auto")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--isa", choices=["all", *available_isas()], help="default: the best of this machine")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    isas = available_isas() if args.isa == "all" else [args.isa or available_isas()[-1]]
    limits = measure_memory(args)
    results: dict[str, dict[str, float]] = {}
    for isa in isas:
        results[isa] = measure_decode(args, CpuKernels(isa))
        results[isa] |= measure_prefill(args, CpuKernels(isa))
    print(f"{args.dtype}, KV {args.kv_dtype}, {args.threads} threads; ", end="")
    print(f"memory read {limits['read_gb_per_s']:.1f} GB/s, ", end="")
    print(f"copied {limits['copy_gb_per_s']:.1f} GB/s")
    for isa, figures in results.items():
        for name, value in figures.items():
            print(f"{isa:12}  {name:28}  {value:10.3f}")
    print(json.dumps({"arguments": vars(args), "memory": limits, "attention": results}))


def median_s(run: Callable[[], object], runs: int) -> float:
    """Median seconds of ``run`` after one call to warm up."""
    run()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure_memory(args: argparse.Namespace, size: int = 1 << 30) -> dict[str, float]:
    """Bandwidths of all threads over ``size`` bytes; a copy counts the bytes once."""
    source, target = torch.ones(size // 4), torch.ones(size // 4)
    return {
        "read_gb_per_s": size / median_s(source.sum, args.runs) / 1e9,
        "copy_gb_per_s": size / median_s(lambda: target.copy_(source), args.runs) / 1e9,
    }


def measure_decode(args: argparse.Namespace, kernels: CpuKernels) -> dict[str, float]:
    """One step over all layers, divided by their number."""
    layer_s = median_s(decode_work(args, kernels), args.runs) / args.layers
    row_bytes = make_pool(args, 1)[0, 0, 0, 0, 0].nbytes
    groups = -(-args.seqs // (args.sharers or args.seqs))
    keys = args.seqs * (args.context - args.shared) + groups * args.shared
    return {
        "decode_ms_per_layer": layer_s * 1e3,
        "decode_gb_per_s": keys * 2 * args.kv_heads * row_bytes / layer_s / 1e9,
    }


def decode_work(args: argparse.Namespace, kernels: CpuKernels) -> Callable[[], None]:
    """The decode attention of one step over all layers, whose blocks lie in random order."""
    blocks_per_seq, sharers = -(-args.context // args.block_size), args.sharers or args.seqs
    num_blocks, shared = args.seqs * blocks_per_seq, args.shared // args.block_size
    pool = make_pool(args, num_blocks)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))
    blocks = order.view(args.seqs, blocks_per_seq)
    for first in range(0, args.seqs, sharers):
        blocks[first : first + sharers, :shared] = blocks[first, :shared].clone()
    batch = make_batch(args, [1] * args.seqs, [args.context] * args.seqs, blocks.flatten())
    qkv = torch.randn(args.seqs, (args.heads + 2 * args.kv_heads) * args.head_dim)
    qkv = qkv.to(getattr(torch, args.dtype))

    def step() -> None:
        for layer in range(args.layers):
            kernels.attention(qkv, pool, layer, batch, args.heads, args.head_dim**-0.5)

    return step


def measure_prefill(args: argparse.Namespace, kernels: CpuKernels) -> dict[str, float]:
    """One prompt at a time; a causal prompt of n tokens takes n (n + 1) / 2 dot products per head, twice."""
    results = {}
    for length in args.prompts:
        num_blocks = -(-length // args.block_size)
        pool = make_pool(args, num_blocks)
        batch = make_batch(args, [length], [length], torch.arange(num_blocks))
        qkv = torch.randn(length, (args.heads + 2 * args.kv_heads) * args.head_dim)
        qkv = qkv.to(getattr(torch, args.dtype))

        def step(
            qkv: torch.Tensor = qkv, pool: torch.Tensor = pool, batch: AttentionMetadata = batch
        ) -> None:
            for layer in range(args.layers):
                kernels.attention(qkv, pool, layer, batch, args.heads, args.head_dim**-0.5)

        layer_s = median_s(step, args.runs) / args.layers
        flops = 2 * 2 * args.heads * args.head_dim * length * (length + 1) / 2
        results[f"prefill_{length}_ms_per_layer"] = layer_s * 1e3
        results[f"prefill_{length}_gflop_per_s"] = flops / layer_s / 1e9
    return results


def make_pool(args: argparse.Namespace, num_blocks: int) -> torch.Tensor:
    shape = (num_blocks, args.layers, 2, args.kv_heads, args.block_size, args.head_dim)
    if args.kv_dtype == "int8":
        pool = torch.randint(-127, 128, (*shape[:-1], args.head_dim + KV_SCALE_BYTES), dtype=torch.int8)
        pool[..., -KV_SCALE_BYTES:] = torch.tensor([0.01]).view(torch.int8)  # the scale of every row
        return pool
    return torch.empty(shape, dtype=getattr(torch, args.dtype)).normal_()


def make_batch(
    args: argparse.Namespace, query_lens: list[int], seq_lens: list[int], blocks: torch.Tensor
) -> AttentionMetadata:
    """Sequences with successive ``blocks``, filled forwards."""
    counts = torch.tensor([-(-context // args.block_size) for context in seq_lens])
    return AttentionMetadata(
        positions=torch.zeros(sum(query_lens), dtype=torch.int64),
        slot_mapping=torch.zeros(sum(query_lens), dtype=torch.int64),
        cu_seqlens_q=torch.tensor([0, *query_lens]).cumsum(0).int(),
        seq_lens=torch.tensor(seq_lens).int(),
        block_table=(blocks << 1).int(),
        block_table_offsets=torch.cat((torch.zeros(1), counts.cumsum(0))).int(),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
    )


if __name__ == "__main__":
    main()
