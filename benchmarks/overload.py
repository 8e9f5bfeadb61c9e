"""First tokens and goodput beyond the server's capacity, under ``slo`` and under ``fcfs``.

Loads of online chats against a server of each policy, the policies alternating for --rounds rounds:

- burst: 200 chats of 32 tokens in and 32 out, all sent at one instant.
- crowd: 64 chats of 128 tokens in and 64 out kept in flight; when one ends the next is sent.
- open 1.0, 1.25, 1.5: the chats of the crowd as Poisson arrivals at these multiples of the capacity, which
  is the throughput of the first round's crowd under ``fcfs``.

A chat is good if its first token came within 1 s and its mean gap is within 150 ms.

The servers cache no prefixes: all chats begin with the tokens of the template.

Prints medians of the rounds, and ``slo`` over ``fcfs``. The last line of output is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from typing import Any

from served import check_no_prefix_hits, served

POLICIES = ("fcfs", "slo")  # the first one's crowd gives the capacity
FIGURES = ("p50_ttft_ms", "p99_ttft_ms", "p99_itl_ms", "output_throughput", "request_goodput", "good_share")
_OPEN_LOADS = (1.0, 1.25, 1.5)
_CROWD = ("--random-input-len", "128", "--random-output-len", "64")
LOADS = {
    "burst": ("--num-prompts", "200", "--random-input-len", "32", "--random-output-len", "32"),
    "crowd": ("--num-prompts", "400", *_CROWD, "--max-concurrency", "64"),
}

_GOOD = ("--goodput", "ttft:1000", "--goodput", "tpot:150")
Figures = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", default="burst,crowd,open", help="some of these; open needs crowd")
    parser.add_argument("--open-chats", type=int, default=400, help="chats of each open load")
    args = parser.parse_args()
    runs: dict[tuple[str, str], list[Figures]] = {}
    names = args.loads.split(",")
    if set(names) - {*LOADS, "open"} or ("open" in names and "crowd" not in names):
        parser.error(f"--loads {args.loads}: there are burst, crowd and open, which needs crowd")
    loads = {name: options for name, options in LOADS.items() if name in names}
    for round_number in range(args.rounds):
        for policy in POLICIES:
            with served(args.model, "--policy", policy, "--no-prefix-caching") as port:
                for load, options in tuple(loads.items()):
                    figures = run(port, *options, "--seed", str(round_number))
                    runs.setdefault((load, policy), []).append(figures)
                    print(f"round {round_number + 1}: {load}, {policy}: {figures}", file=sys.stderr)
                if "open" in names and "open 1" not in loads:
                    capacity = runs["crowd", policy][0]["output_throughput"] / 64
                    print(f"capacity: {capacity:.2f} chats/s", file=sys.stderr)
                    for multiple in _OPEN_LOADS:
                        rate = ("--request-rate", f"{multiple * capacity:.3f}")
                        loads[f"open {multiple:g}"] = ("--num-prompts", str(args.open_chats), *_CROWD, *rate)
                        figures = run(port, *loads[f"open {multiple:g}"], "--seed", str(round_number))
                        runs[f"open {multiple:g}", policy] = [figures]
                check_no_prefix_hits(port)
    result: dict[str, Any] = {"benchmark": "overload", "cores": len(os.sched_getaffinity(0))}
    for load in loads:
        medians = {policy: median(runs[load, policy]) for policy in POLICIES}
        ratios = {
            name: medians["slo"][name] / medians["fcfs"][name] if medians["fcfs"][name] else math.nan
            for name in FIGURES
        }
        result[load] = {**medians, "slo_over_fcfs": ratios}
        print(f"{load:10}" + "".join(f"{name:>20}" for name in FIGURES))
        for name, figures in result[load].items():
            print(f"  {name:16}" + "".join(f"{figures[each]:20.2f}" for each in FIGURES))
    print(json.dumps(result))


def run(port: int, *options: str) -> Figures:
    """One load's figures. Raises: SystemExit when a request failed."""
    command = [sys.executable, "-m", "backfill", "bench", "serve", "--no-progress", "--json"]
    url = ("--base-url", f"http://127.0.0.1:{port}")
    chat = ("--backend", "openai-chat", "--endpoint", "/v1/chat/completions")
    done = subprocess.run(
        [*command, *url, *chat, *_GOOD, "--ignore-eos", "--num-warmups", "2", *options],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result = json.loads(done.stdout.splitlines()[-1])
    if result["failed"]:
        raise SystemExit(f"{result['failed']} requests failed")
    result["good_share"] = result["request_goodput"] * result["duration"] / result["completed"]
    return {name: result[name] for name in FIGURES}


def median(runs: list[Figures]) -> Figures:
    return {name: statistics.median(each[name] for each in runs) for name in FIGURES}


if __name__ == "__main__":
    main()
