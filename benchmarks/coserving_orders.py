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
import dataclasses
import json
import random
import statistics
import sys
import time
from typing import Any

import aiohttp
import numpy as np
from machine_limits import processor_name
from offline_pools import MODEL, body_of, documents
from served import get, served

from backfill.bench.client import BenchClient, Endpoint, find_model
from backfill.bench.coserve_load import CoserveLoad
from backfill.bench.record import Outcome, RequestRecord
from backfill.bench.runner import send_load

FIGURES = "lines_per_s", "cached_share", "p50_ttft_ms", "p99_ttft_ms", "p99_itl_ms", "good_share", "num_chats"
_MAX_S = 3600.0  # of a batch
TTFT_S, TPOT_S = 1.0, 0.15  # of a good chat
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
        batch, chats, seconds = asyncio.run(run_beside_chats(port, content, args.rate, seed))
    counts, usage = batch["request_counts"], batch["usage"]
    if counts["completed"] != args.lines:
        raise SystemExit(f"the batch is {batch['status']}: {counts}")
    ttfts_ms = [1e3 * chat.ttft_s for chat in chats]
    return {
        "lines_per_s": args.lines / seconds,
        "cached_share": usage["input_tokens_details"]["cached_tokens"] / usage["input_tokens"],
        "p50_ttft_ms": float(np.percentile(ttfts_ms, 50)),
        "p99_ttft_ms": float(np.percentile(ttfts_ms, 99)),
        "p99_itl_ms": float(np.percentile([1e3 * gap for chat in chats for gap in chat.itls_s], 99)),
        "good_share": sum(map(is_good, chats)) / len(chats),
        "num_chats": len(chats),
    }


def is_good(chat: RequestRecord) -> bool:
    return chat.ttft_s <= TTFT_S and (chat.tpot_s or 0.0) <= TPOT_S


async def run_beside_chats(
    port: int, content: bytes, rate: float, seed: int
) -> tuple[dict[str, Any], list[RequestRecord], float]:
    """Run a batch to its end. Returns: it, the chats that ended meanwhile, and the seconds it took."""
    url = f"http://127.0.0.1:{port}"
    load = CoserveLoad(
        rate=rate,
        duration=_MAX_S,
        warmup=0.0,
        input_len="128",
        output_len="64",
        offline_mode="none",
        seed=seed,
    )
    endpoint = Endpoint(url, "/v1/completions", "")
    endpoint = dataclasses.replace(endpoint, model=(await find_model(endpoint)).name)
    batch_id = await submit(f"{url}/v1", content)
    await until_past(port, batch_id, "validating", 0.1)
    stop = asyncio.Event()
    began_at_s = time.monotonic()
    async with BenchClient(endpoint) as client:
        chatting = asyncio.create_task(send_load(client, load.online_requests(), stop=stop))
        batch = await until_past(port, batch_id, "in_progress", 0.2)
        seconds = time.monotonic() - began_at_s
        stop.set()  # chats that have not ended are left out
        chats = (await chatting).records
    return batch, [chat for chat in chats if chat.outcome is Outcome.COMPLETED], seconds


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


async def until_past(port: int, batch_id: str, status: str, interval_s: float) -> dict[str, Any]:
    """The batch, once its status is another one."""
    while True:
        batch: dict[str, Any] = json.loads(await asyncio.to_thread(get, port, f"/v1/batches/{batch_id}"))
        if batch["status"] != status:
            return batch
        await asyncio.sleep(interval_s)


if __name__ == "__main__":
    main()
