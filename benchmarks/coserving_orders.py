"""Orders of a batch beside online chats: lines finished a second, and what the chats see.

A server for each order runs a batch of mixed density whose lines share prefixes (the pool ``documents``
of offline_pools.py, in random order) to its end, while chats arrive at random times. The whole batch counts,
since orders finish lines of different lengths first.

Usage: coserving_orders.py [--orders fcfs,dfs,blend] [--rate 0.5] [--lines 2000] [--rounds 3].
Prints medians of the rounds and ratios to the first order. The last line of output is a JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
from machine_limits import processor_name
from offline_pools import MODEL, body_of, documents
from served import get, served

FIGURES = "lines_per_s", "cached_share", "p50_ttft_ms", "p99_ttft_ms", "p99_itl_ms", "good_share", "num_chats"
_MAX_S = 3600.0  # of a batch
_CHATS_END_S = 30.0
_GOOD = ("--goodput", "ttft:1000", "--goodput", "tpot:150")
Figures = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--orders", default="fcfs,dfs,blend")
    parser.add_argument("--rate", type=float, default=0.5, help="chats a second")
    parser.add_argument("--lines", type=int, default=2000, help="of the batch")
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
        batch_id = asyncio.run(submit(f"http://127.0.0.1:{port}/v1", content))
        while batch_of(port, batch_id)["status"] == "validating":
            time.sleep(0.1)
        began_at_s = time.monotonic()
        with chatting(port, args.rate, seed) as chats:
            while (batch := batch_of(port, batch_id))["status"] == "in_progress":
                time.sleep(0.2)
            seconds = time.monotonic() - began_at_s
            chats.send_signal(signal.SIGINT)  # those that have not ended are left out
            printed, _ = chats.communicate(timeout=_CHATS_END_S)
    counts, usage = batch["request_counts"], batch["usage"]
    if counts["completed"] != args.lines:
        raise SystemExit(f"the batch is {batch['status']}: {counts}")
    figures = json.loads(printed.splitlines()[-1])
    return {
        "lines_per_s": args.lines / seconds,
        "cached_share": usage["input_tokens_details"]["cached_tokens"] / usage["input_tokens"],
        "good_share": figures["request_goodput"] / figures["request_throughput"],
        "num_chats": figures["completed"],
        **{name: figures[name] for name in FIGURES if name in figures},
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


def batch_of(port: int, batch_id: str) -> dict[str, Any]:
    batch: dict[str, Any] = json.loads(get(port, f"/v1/batches/{batch_id}"))
    return batch


@contextlib.contextmanager
def chatting(port: int, rate: float, seed: int) -> Iterator[subprocess.Popen[str]]:
    """A ``bench serve`` that sends chats until it is interrupted, and prints their figures then."""
    command = [sys.executable, "-m", "backfill", "bench", "serve", "--base-url", f"http://127.0.0.1:{port}"]
    options = {
        "--request-rate": rate,
        "--num-prompts": round(rate * _MAX_S),
        "--random-input-len": 128,
        "--random-output-len": 64,
        "--seed": seed,
    }
    flat = [str(each) for pair in options.items() for each in pair]
    command += [*flat, *_GOOD, "--json", "--disable-tqdm"]
    chats = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield chats
    finally:
        chats.kill()
        chats.wait()


if __name__ == "__main__":
    main()
