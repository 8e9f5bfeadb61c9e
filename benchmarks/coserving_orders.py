"""Orders of a batch beside online chats: lines finished a second, and what the chats see.

A server for each order runs a batch of mixed density whose lines share prefixes (the pool ``documents``
of offline_pools.py, in random order) beside chats that arrive at random times. Lines are counted while chats
arrive, after a lead in which the batch is validated and the device fills.

Usage: coserving_orders.py [--orders fcfs,dfs,blend] [--rate 0.5] [--duration 120] [--rounds 3].
Prints medians of the rounds and ratios to the first order. The last line of output is a JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from typing import Any

import aiohttp
from machine_limits import processor_name
from offline_pools import MODEL, body_of, documents
from served import get, served

FIGURES = ("lines_per_s", "p50_ttft_ms", "p99_ttft_ms", "p99_itl_ms", "good_share")
_GOOD = ("--goodput", "ttft:1000", "--goodput", "tpot:150")
Figures = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--orders", default="fcfs,dfs,blend")
    parser.add_argument("--rate", type=float, default=0.5, help="chats a second")
    parser.add_argument("--duration", type=float, default=120.0, help="seconds in which chats arrive")
    parser.add_argument("--lead", type=float, default=20.0, help="seconds of the batch before the first chat")
    parser.add_argument("--lines", type=int, default=12_000, help="of the batch; it must outlast the chats")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    orders = args.orders.split(",")
    content = batch_file(args.lines)
    runs: dict[str, list[Figures]] = {order: [] for order in orders}
    for turn in range(args.rounds):
        first = turn % len(orders)
        for order in (*orders[first:], *orders[:first]):
            runs[order].append(measure(order, content, args, seed=turn))
            print(f"{order}: {runs[order][-1]}", file=sys.stderr, flush=True)
    medians = {
        order: {name: statistics.median(run[name] for run in runs[order]) for name in FIGURES}
        for order in orders
    }
    print(f"{'':8s}" + "".join(f"{name:>14s}" for name in FIGURES) + f"{'/ ' + orders[0]:>14s}")
    for order, each in medians.items():
        ratio = each["lines_per_s"] / medians[orders[0]]["lines_per_s"]
        print(f"{order:8s}" + "".join(f"{each[name]:14.3f}" for name in FIGURES) + f"{ratio:14.3f}")
    print(json.dumps({"processor": processor_name(), **vars(args), "medians": medians, "runs": runs}))


def batch_file(num_lines: int) -> bytes:
    lines = documents(num_lines, random.Random(1))
    random.Random(1).shuffle(lines)
    return "".join(json.dumps(body_of(*each)) + "\n" for each in enumerate(lines)).encode()


def measure(order: str, content: bytes, args: argparse.Namespace, seed: int) -> Figures:
    with served(MODEL, "--order", order) as port:
        url = f"http://127.0.0.1:{port}/v1"
        batch_id = asyncio.run(submit(url, content))
        time.sleep(args.lead)
        num_before, began_at_s = num_ended(port, batch_id), time.monotonic()
        chats = bench_serve(port, args, seed)
        num_after, ended_at_s = num_ended(port, batch_id), time.monotonic()
        if num_after >= args.lines:
            raise SystemExit(f"all {args.lines} lines ended before the chats: --lines must be more")
    return {
        "lines_per_s": (num_after - num_before) / (ended_at_s - began_at_s),
        "good_share": chats["request_goodput"] / chats["request_throughput"],
        **{name: chats[name] for name in FIGURES if name in chats},
    }


async def submit(url: str, content: bytes) -> str:
    """Upload a batch's lines and create it. Returns: its id."""
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", content, filename="in.jsonl")
    async with aiohttp.ClientSession(raise_for_status=True) as session:
        async with session.post(f"{url}/files", data=form) as response:
            file = await response.json()
        body = {
            "input_file_id": file["id"],
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        async with session.post(f"{url}/batches", json=body) as response:
            batch_id: str = (await response.json())["id"]
    return batch_id


def num_ended(port: int, batch_id: str) -> int:
    batch: dict[str, Any] = json.loads(get(port, f"/v1/batches/{batch_id}"))
    if batch["status"] not in {"validating", "in_progress"}:
        raise SystemExit(f"the batch is {batch['status']}")
    return int(batch["request_counts"]["completed"]) + int(batch["request_counts"]["failed"])


def bench_serve(port: int, args: argparse.Namespace, seed: int) -> dict[str, float]:
    command = [sys.executable, "-m", "backfill", "bench", "serve", "--base-url", f"http://127.0.0.1:{port}"]
    options = {
        "--request-rate": args.rate,
        "--num-prompts": round(args.rate * args.duration),
        "--random-input-len": 128,
        "--random-output-len": 64,
        "--seed": seed,
    }
    flat = [str(each) for pair in options.items() for each in pair]
    done = subprocess.run(
        [*command, *flat, *_GOOD, "--json", "--disable-tqdm"], check=True, stdout=subprocess.PIPE, text=True
    )
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


if __name__ == "__main__":
    main()
