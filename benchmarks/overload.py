"""Bursts of online chats, all sent at one instant: first tokens, ends and goodput under ``slo`` and ``fcfs``.

    python benchmarks/overload.py [--bursts 20,100,200] [--rounds 3] [--server-args ...]

A server of each policy in turn gets each burst; the policies alternate for --rounds rounds. Every chat has
its own prompt of --input-len tokens and an answer of --output-len. A chat is good if its first token came
within --ttft-slo and its mean gap is within --tpot-slo, which are the server's objectives too.

Prints medians of the rounds, and those of ``slo`` over those of ``fcfs``. The last line of output is a JSON
object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np
from served import check_no_prefix_hits, served

from backfill.bench.client import BenchClient, Endpoint
from backfill.bench.record import BenchRequest, Outcome, RequestRecord
from backfill.bench.runner import send_load

POLICIES = ("fcfs", "slo")
_WARMUP = 2  # requests before the first burst


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one burst. Times in seconds from the instant of the burst."""

    wall_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    e2e_p50_s: float
    e2e_p99_s: float
    longest_gap_p50_s: float
    num_good: float

    @classmethod
    def of(cls, records: Sequence[RequestRecord], ttft_slo_s: float, tpot_slo_s: float) -> Figures:
        """Raises: SystemExit when a request failed."""
        failed = [each for each in records if each.outcome is not Outcome.COMPLETED]
        if failed:
            raise SystemExit(f"{len(failed)} requests failed: {failed[0].error}")
        sent_at_s = [each.sent_at_s or 0.0 for each in records]
        ttft_s = [at_s + each.ttft_s for at_s, each in zip(sent_at_s, records, strict=True)]
        e2e_s = [at_s + each.latency_s for at_s, each in zip(sent_at_s, records, strict=True)]
        good = [
            first_s <= ttft_slo_s and (each.tpot_s or 0.0) <= tpot_slo_s
            for first_s, each in zip(ttft_s, records, strict=True)
        ]
        return cls(
            max(e2e_s),
            *(float(each) for each in np.percentile(ttft_s, (50, 99))),
            *(float(each) for each in np.percentile(e2e_s, (50, 99))),
            statistics.median(max(each.itls_s) for each in records),
            sum(good),
        )

    @classmethod
    def medians(cls, rounds: Sequence[Figures]) -> Figures:
        return cls(*(statistics.median(getattr(each, name) for each in rounds) for name in NAMES))


NAMES = tuple(field.name for field in fields(Figures))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--bursts", default="20,100,200", help="chats of each burst")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--ttft-slo", type=float, default=1.0)
    parser.add_argument("--tpot-slo", type=float, default=0.15)
    parser.add_argument("--server-args", default="", help="more options of `backfill serve`")
    args = parser.parse_args()
    bursts = [int(each) for each in args.bursts.split(",")]
    objectives = ("--ttft-slo", str(args.ttft_slo), "--tpot-slo", str(args.tpot_slo))
    runs: dict[tuple[int, str], list[Figures]] = {}
    for seed in range(args.rounds):
        for policy in POLICIES:
            with served(args.model, "--policy", policy, *objectives, *shlex.split(args.server_args)) as port:
                endpoint = Endpoint(
                    f"http://127.0.0.1:{port}", "/v1/completions", args.model, ignore_eos=True
                )
                asyncio.run(send(endpoint, _WARMUP, args.input_len, args.output_len, seed + args.rounds))
                for count in bursts:
                    records = asyncio.run(send(endpoint, count, args.input_len, args.output_len, seed))
                    figures = Figures.of(records, args.ttft_slo, args.tpot_slo)
                    runs.setdefault((count, policy), []).append(figures)
                    print(
                        f"round {seed + 1}: {count} chats, {policy}: {figures}", file=sys.stderr, flush=True
                    )
                check_no_prefix_hits(port)
    result: dict[str, object] = {"benchmark": "overload", "cores": len(os.sched_getaffinity(0)), **vars(args)}
    print(f"{'':20}" + "".join(f"{name:>18}" for name in NAMES))
    for count in bursts:
        medians = {policy: asdict(Figures.medians(runs[count, policy])) for policy in POLICIES}
        medians["slo / fcfs"] = {
            name: medians["slo"][name] / medians["fcfs"][name] if medians["fcfs"][name] else 0.0
            for name in NAMES
            if name != "num_good"
        }
        result[f"burst of {count}"] = medians
        for row, values in medians.items():
            print(f"{count:4} {row:15}" + "".join(f"{value:18.2f}" for value in values.values()))
    print(json.dumps(result))


async def send(
    endpoint: Endpoint, count: int, input_len: int, output_len: int, seed: int
) -> Sequence[RequestRecord]:
    """One burst. No two prompts begin alike."""
    rng = np.random.default_rng((count, seed))
    prompts = [rng.integers(100, 40_000, input_len).tolist() for _ in range(count)]
    requests = [BenchRequest(prompt, input_len, output_len) for prompt in prompts]
    async with BenchClient(endpoint) as client:
        run = await send_load(client, requests, stop=asyncio.Event())
    return run.records


if __name__ == "__main__":
    main()
