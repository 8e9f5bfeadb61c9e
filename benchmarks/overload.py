"""Time to first token beyond the server's capacity, under ``slo`` and under ``fcfs``.

Two loads of online chats against a server of each policy, the policies alternating for --rounds rounds:

- burst: 200 chats of 32 tokens in and 32 out, all sent at one instant.
- crowd: 64 chats of 128 tokens in and 64 out kept in flight; when one ends the next is sent.

The servers cache no prefixes: all chats begin with the tokens of the template.

Prints medians of the rounds, and ``slo`` over ``fcfs``. The last line of output is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import Any

from served import check_no_prefix_hits, served

POLICIES = ("slo", "fcfs")
FIGURES = ("p50_ttft_ms", "p99_ttft_ms", "p99_itl_ms", "output_throughput")
LOADS = {
    "burst": ("--num-prompts", "200", "--random-input-len", "32", "--random-output-len", "32"),
    "crowd": (
        *("--num-prompts", "400", "--random-input-len", "128", "--random-output-len", "64"),
        *("--max-concurrency", "64"),
    ),
}

Figures = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    runs: dict[tuple[str, str], list[Figures]] = {}
    for round_number in range(args.rounds):
        for policy in POLICIES:
            with served(args.model, "--policy", policy, "--no-prefix-caching") as port:
                for load, options in LOADS.items():
                    figures = run(port, *options, "--seed", str(round_number))
                    runs.setdefault((load, policy), []).append(figures)
                    print(f"round {round_number + 1}: {load}, {policy}: {figures}", file=sys.stderr)
                check_no_prefix_hits(port)
    result: dict[str, Any] = {"benchmark": "overload", "cores": len(os.sched_getaffinity(0))}
    for load in LOADS:
        medians = {policy: median(runs[load, policy]) for policy in POLICIES}
        ratios = {name: medians["slo"][name] / medians["fcfs"][name] for name in FIGURES}
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
        [*command, *url, *chat, "--ignore-eos", "--num-warmups", "2", *options],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result = json.loads(done.stdout.splitlines()[-1])
    if result["failed"]:
        raise SystemExit(f"{result['failed']} requests failed")
    return {name: result[name] for name in FIGURES}


def median(runs: list[Figures]) -> Figures:
    return {name: statistics.median(each[name] for each in runs) for name in FIGURES}


if __name__ == "__main__":
    main()
