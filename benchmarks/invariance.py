"""Whether batch work beside chat changes an answer: greedy answers alone, then beside a flood.

Starts a server with its defaults, but for a KV pool that the flood overfills, so that offline requests are
preempted, suspended and computed again. Every request is sent twice: alone, one after another, then among
offline requests of random lengths. Their tokens and log probabilities must be equal to the last digit. A
salt of its own keeps each out of the prefix cache, except for every second one the second time. Prints one
JSON line; the exit status is 1 if an answer differs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

from machine_limits import processor_name
from served import get, served


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--longest", type=int, default=700, help="prompt of an answer")
    parser.add_argument("--flood", type=int, default=32, help="offline requests at once")
    parser.add_argument("--kv-gib", type=float, default=0.08)
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    rng = random.Random(0)
    prompts = [
        [rng.randrange(100, 40000) for _ in range(rng.randint(1, args.longest))] for _ in range(args.answers)
    ]
    options = ("--kv-gib", str(args.kv_gib), "--dtype", args.dtype, "--shutdown-timeout", "1")
    with served(*options) as port:
        started_at_s = time.perf_counter()
        alone = [complete(port, prompt, args.tokens, f"alone {at}") for at, prompt in enumerate(prompts)]
        alone_s = time.perf_counter() - started_at_s
        beside = beside_flood(port, prompts, args)
        preemptions = preempted(port)
    differing = sum(a != b for a, b in zip(alone, beside, strict=True))
    result = {
        "benchmark": "invariance",
        "date": time.strftime("%Y-%m-%d"),
        "processor": processor_name(),
        "isa": os.environ.get("BACKFILL_CPU_ISA", "the best"),
        "dtype": args.dtype,
        "answers": len(prompts),
        "tokens": sum(len(each["tokens"]) for each in alone),
        "differing": differing,
        "alone_s": round(alone_s, 1),
        "preemptions_of_offline_requests": preemptions,
    }
    print(json.dumps(result))
    sys.exit(1 if differing else 0)


def complete(port: int, prompt: list[int], max_tokens: int, salt: str, **fields: Any) -> dict[str, Any]:
    """The token ids of a greedy answer and their log probabilities."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    body |= {"return_token_ids": True, "cache_salt": salt, **fields}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        choice = json.load(response)["choices"][0]
    return {"tokens": choice["token_ids"], "logprobs": choice["logprobs"]["token_logprobs"]}


def beside_flood(port: int, prompts: list[list[int]], args: argparse.Namespace) -> list[dict[str, Any]]:
    is_over = Event()

    def flood(index: int) -> None:
        rng = random.Random(index + 1)
        for turn in itertools.count():
            if is_over.is_set():
                return
            prompt = [rng.randrange(100, 40000) for _ in range(rng.randint(1, 1000))]
            salt = f"flood {index} {turn}"
            complete(port, prompt, rng.randint(1, 200), salt, service_tier="flex")

    def ask(at: int) -> dict[str, Any]:
        salt = f"alone {at}" if at % 2 else f"beside {at}"
        return complete(port, prompts[at], args.tokens, salt)

    with ThreadPoolExecutor(args.flood + 4) as pool:
        flooding = [pool.submit(flood, index) for index in range(args.flood)]
        try:
            return list(pool.map(ask, range(len(prompts))))
        finally:
            is_over.set()
            for each in flooding:
                each.result()


def preempted(port: int) -> float:
    name = 'backfill:num_preemptions_total{class="offline"}'
    lines = get(port, "/metrics").splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


if __name__ == "__main__":
    main()
