"""Both KV layouts in a pool that is too small: what online requests see, and what a batch gets done.

A server for each layout and block size, one after another, with adaptive checkpoints and a host pool twice as
large as that of the device. Online requests arrive at a fixed rate beside batches without end. All are so
short, and the pool so small, that many blocks are last blocks and blocks are shared most of the time. A round
has the same requests for all, and goes through them in another order than the one before.

``usable`` is the number of blocks in the tables of all requests over those of the pool: a block that two
running requests share counts twice. ``shared`` is the share of time with shared blocks. Both are of /metrics,
read every 0.2 s.

Usage: kv_layouts.py [--rounds 2] [--duration 40] [--block-sizes 16,32] [--rate 4] [--pool-tokens 1600].
Prints medians of the rounds, and for each block size the ratios of ``bidirectional`` to ``unidirectional``.
The last line of output is a JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import re
import statistics
import sys
import time
from dataclasses import replace
from typing import Any

import aiohttp
from machine_limits import processor_name
from offline_pools import MODEL
from served import served

from backfill.bench.client import Endpoint, ServerApi
from backfill.bench.coserve import CoserveRun, Status, run_coserve
from backfill.bench.coserve_figures import figures_of
from backfill.bench.coserve_load import CoserveLoad
from backfill.bench.scrape import Sample, gained, parse_totals
from backfill.core.config import GIB
from backfill.models.config import ModelConfig
from backfill.models.resolve import resolve_model

LAYOUTS = "unidirectional", "bidirectional"
_SAMPLE_S = 0.2
_IN_USE = re.compile(r'^backfill:kv_blocks\{[^}]*state="referenced"[^}]*\} (\S+)$', re.MULTILINE)
_COUNTERS = {
    "entered": "backfill:kv_blocks_entered_total",
    "overwritten": "backfill:kv_slots_overwritten_total",
    "copied": "backfill:kv_slots_copied_total",
}
_OF_RUN = [
    "ttft_attainment",
    "itl_attainment",
    "ttft_p50_s",
    "ttft_p99_s",
    "itl_p99_s",
    "tpot_p99_s",
    "offline_tok_s",
    "online_tok_s",
    "recomputed_token_share",
    "checkpointed_token_share",
    "preemptions",
    "num_online",
    "failed",
]
_SHOWN = {
    "ttft_attainment": "TTFT met",
    "itl_attainment": "gaps met",
    "ttft_p99_s": "TTFT P99",
    "itl_p99_s": "gap P99",
    "tpot_p99_s": "TPOT P99",
    "offline_tok_s": "offline/s",
    "usable": "usable",
    "shared": "shared",
    "entered": "entered",
    "overwritten": "overwr.",
    "copied": "copied",
    "recomputed_token_share": "recomp.",
}
Figures = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--block-sizes", default="16,32")
    parser.add_argument("--pool-tokens", type=int, default=1600, help="that the device's pool holds")
    parser.add_argument("--policy", default="slo")
    parser.add_argument("--rate", type=float, default=4.0, help="online requests a second")
    parser.add_argument("--duration", type=float, default=40.0, help="seconds measured of each run")
    parser.add_argument("--warmup", type=float, default=8.0, help="seconds of load before")
    parser.add_argument("--ttft-slo", type=float, default=1.0, help="seconds")
    parser.add_argument("--tpot-slo", type=float, default=0.15, help="seconds")
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    args = parser.parse_args()
    sizes = [int(size) for size in args.block_sizes.split(",")]
    load = CoserveLoad(
        duration=args.duration,
        warmup=args.warmup,
        rate=args.rate,
        input_len="10:100",
        output_len="20:100",
        offline_mode="batch",
        offline_input_len="10:100",
        offline_output_len="20:100",
        ttft_slo=args.ttft_slo,
        tpot_slo=args.tpot_slo,
        seed=args.seed,
    )
    variants = [(layout, size) for size in sizes for layout in LAYOUTS]
    runs: dict[str, list[Figures]] = {name_of(*variant): [] for variant in variants}
    for turn in range(args.rounds):
        for layout, size in variants if turn % 2 == 0 else reversed(variants):
            found = measure(layout, size, args, replace(load, seed=load.seed + turn))
            runs[name_of(layout, size)].append(found)
            print(f"{name_of(layout, size)}: {found}", file=sys.stderr, flush=True)
    medians = {
        name: {figure: statistics.median(each[figure] for each in of_name) for figure in of_name[0]}
        for name, of_name in runs.items()
    }
    ratios = {
        str(size): {
            figure: ours / theirs
            for figure, ours in medians[name_of("bidirectional", size)].items()
            if (theirs := medians[name_of("unidirectional", size)][figure])
        }
        for size in sizes
    }
    print_table(medians, ratios)
    result = {"processor": processor_name(), **vars(args), "medians": medians, "ratios": ratios, "runs": runs}
    print(json.dumps(result))


def name_of(layout: str, block_size: int) -> str:
    return f"{layout} {block_size}"


def measure(layout: str, block_size: int, args: argparse.Namespace, load: CoserveLoad) -> Figures:
    """The figures of a run on a server of its own. Raises: SystemExit when the run is not complete."""
    token_bytes = ModelConfig.from_folder(resolve_model(MODEL)).kv_bytes_per_token(2)
    kv_gib = (args.pool_tokens + 1) * token_bytes / GIB  # a token more, so that no block is lost by rounding
    options: dict[str, Any] = {
        "--kv-layout": layout,
        "--block-size": block_size,
        "--kv-gib": f"{kv_gib:.9f}",
        "--host-kv-gib": f"{2 * kv_gib:.9f}",
        "--checkpointing": "adaptive",
        "--policy": args.policy,
        "--ttft-slo": args.ttft_slo,
        "--tpot-slo": args.tpot_slo,
        "--shutdown-timeout": 5,
    }
    flat = [str(word) for option in options.items() for word in option]
    with served(MODEL, *flat) as port:
        run, samples = asyncio.run(drive(f"http://127.0.0.1:{port}", load))
    if run.status is not Status.COMPLETE:
        raise SystemExit(f"{name_of(layout, block_size)}: the run ended as {run.status}")
    measured = [each for each in samples if load.warmup <= each.at_s <= run.ended_at_s]
    if not measured:
        raise SystemExit(f"{name_of(layout, block_size)}: /metrics was not read while it ran")
    of_run = figures_of(run)
    return {
        **{name: getattr(of_run, name) for name in _OF_RUN},
        "usable": statistics.mean(each.totals["usable"] for each in measured),
        "shared": statistics.mean(each.totals["backfill:kv_blocks_shared"] > 0 for each in measured),
        **{name: gained(measured, counter) or 0.0 for name, counter in _COUNTERS.items()},
    }


async def drive(url: str, load: CoserveLoad) -> tuple[CoserveRun, list[Sample]]:
    """Run the load. Returns: it, and the server's metrics, in seconds from the start of the run."""
    endpoint, samples = Endpoint(url, "/v1/completions", "", ignore_eos=True), list[Sample]()
    async with ServerApi(endpoint) as api:
        sampling = asyncio.create_task(sample(api, samples))
        try:
            run = await run_coserve(endpoint, load, stop=asyncio.Event())
        finally:
            sampling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sampling
    return run, [each._replace(at_s=each.at_s - run.online.started_at) for each in samples]


async def sample(api: ServerApi, samples: list[Sample]) -> None:
    """Read the metrics until cancelled; ``usable`` is added to them."""
    began_at_s = time.perf_counter()
    for number in itertools.count():
        await asyncio.sleep(max(0.0, began_at_s + number * _SAMPLE_S - time.perf_counter()))
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            text = await api.get_text("/metrics")
            in_use = None if text is None else _IN_USE.search(text)
            if text is not None and in_use is not None:
                totals = parse_totals(text)
                num_in_tables = float(in_use[1]) + totals["backfill:kv_blocks_paired"]
                usable = num_in_tables / totals["backfill:kv_blocks"]
                samples.append(Sample(time.perf_counter(), {**totals, "usable": usable}))


def print_table(medians: dict[str, Figures], ratios: dict[str, Figures]) -> None:
    print(f"{'':18s}" + "".join(f"{title:>11s}" for title in _SHOWN.values()))
    for name, each in medians.items():
        print(f"{name:18s}" + "".join(f"{each[figure]:11.3f}" for figure in _SHOWN))
    for size, each in ratios.items():
        shown = (f"{each[figure]:11.3f}" if figure in each else f"{'':11s}" for figure in _SHOWN)
        print(f"{'ratio, ' + size:18s}" + "".join(shown))


if __name__ == "__main__":
    main()
