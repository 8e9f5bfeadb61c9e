"""A server under bad conditions: mixed traffic, hostile clients, kills and a broken disk.

Starts ``backfill serve`` on a temporary data folder and a free port, and sends it online requests (streamed
and not, half of them with objectives), flex requests and batches. Beside them clients stall, leave
mid-stream, and send bad bodies and huge or slow heads. At instants that --seed fixes, the engine or the
server is killed (SIGKILL; the server is restarted), or the disk below the data folder is full for a while or
hangs for 5 s (by a preloaded library, soak_disk.cpp). This takes 70 % of --duration. Then open work drains,
and five equal rounds of the same traffic without kills take the rest (at least 20 s each); each round ends
idle. Their prompts begin with the round's number, so that none finds its KV cached by an earlier round.

Checks at the end; a failed one is named, and the exit status is 1:

- answers: every line of every batch has exactly one answer in the output or the error file, and the counts
  agree. A tenth of the lines exceed the context; these must be errors, and no others may.
- requests: outside kills, no well-behaved request fails, and hostile ones get nothing but a 4xx.
- memory: server, engine and other processes each hold at most 5 % more after both of the last two rounds
  than after the first two, which warm up. Resident memory not backed by files counts. All rounds are within
  one life of the processes.
- idle: after each round no request runs or waits and no KV block is in use, on either tier.
- deaths: the server and the engine end only when killed.
- disk: calls of the server met the broken disk.

Also reported: the event-loop lag as the server measures it (upper bounds of histogram buckets, over all
restarts), the time of GET /health, asked 100 times a second from another process, and the gaps between the
events of one small stream that is always open; the last two outside kills.

With --stalls there are no kills. Four bursts of work follow one another beside online and offline traffic
that keeps the engine busy: a batch of --lines lines of --line-tokens tokens starts; bodies of the maximum
size arrive; an upload of --upload-mb MB is received and validated; the disk hangs for 5 s while results are
written and an upload runs. In each, the lag must stay under 20 ms at P99 and 100 ms at most, and no request
may fail.

Usage: soak.py [--duration 600] [--seed 0] [--json FILE] [--stalls] [-- options of backfill serve]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from soak_batches import audit, keep_batches_open, settle
from soak_checks import (
    DISK_FULL,
    DISK_HANG,
    KILL_ENGINE,
    KILL_SERVER,
    MAX_GROWTH_FRAC,
    growth_fracs,
    schedule,
)
from soak_disk import DiskMode
from soak_hostile import harass
from soak_load import Outcomes, Traffic
from soak_server import SoakedServer
from soak_stalls import Scale, run_stalls
from soak_watch import MetricsWatch, ProbeRecords, finite, probing, table

DISTURBED_FRAC = 0.7
NUM_ROUNDS = 5
MIN_ROUND_S = 20.0  # shorter ones do not warm up
HANG_S = 5.0
DRAIN_TIMEOUT_S = 900.0
IDLE_TIMEOUT_S = 60.0
# Small pools: requests are preempted, and the warm-up touches all memory of both.
SOAK_OPTIONS = ("--kv-gib", "0.2", "--host-kv-gib", "0.05", "--max-model-len", "4096")
STALLS_OPTIONS = ("--batch-max-bytes", "1000000000")


def main() -> None:
    args = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="backfill-soak-") as name:
        folder = Path(name)
        try:
            result = asyncio.run(run(args, folder))
        finally:
            if args.log is not None and (folder / "server.log").exists():
                shutil.copy(folder / "server.log", args.log)
    result |= {"seed": args.seed, "date": time.strftime("%Y-%m-%d"), "cores": len(os.sched_getaffinity(0))}
    if args.json is not None:
        args.json.write_text(json.dumps(finite(result), indent=2) + "\n")
    print(report(result))
    if any(result["checks"].values()):
        raise SystemExit(1)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--duration", type=float, default=600.0, help="seconds without draining (600)")
    parser.add_argument("--seed", type=int, default=0, help="seed of disturbances and texts (0)")
    parser.add_argument("--interval", type=float, default=20.0, help="mean seconds between disturbances (20)")
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--log", type=Path, help="file for the server's log")
    parser.add_argument("--stalls", action="store_true", help="measure four bursts of work instead")
    parser.add_argument("--lines", type=int, default=10_000, help="lines of the batch that starts (10,000)")
    parser.add_argument("--line-tokens", type=int, default=4_000, help="tokens of each of them (4,000)")
    parser.add_argument("--upload-mb", type=float, default=200.0, help="size of the upload in MB (200)")
    parser.add_argument("options", nargs="*", help="options of backfill serve, after --")
    return parser.parse_args()


async def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    options = STALLS_OPTIONS if args.stalls else SOAK_OPTIONS
    server = SoakedServer(folder, (*options, *args.options))
    try:
        if args.stalls:
            scale = Scale(args.lines, args.line_tokens, int(args.upload_mb * 1e6))
            result = await run_stalls(server, scale, args.seed, folder / "probes")
            return {"benchmark": "soak_stalls", "checks": {"stalls": result.pop("faults")}, **result}
        return await soak(server, args, folder / "probes")
    finally:
        server.disk.set(DiskMode.PASS)
        server.stop()


async def soak(server: SoakedServer, args: argparse.Namespace, records: Path) -> dict[str, Any]:
    outcomes, batch_faults = Outcomes(), list[str]()
    watch = MetricsWatch(server.url)
    await server.start()
    start_s = time.monotonic()
    watching = asyncio.create_task(watch.run())
    async with traffic(server, records, outcomes, args.seed, batch_faults, "kills "):
        done = await disturb(server, args.seed, args.duration * DISTURBED_FRAC, args.interval)
    await drain(server, batch_faults)
    round_s = max(MIN_ROUND_S, args.duration * (1 - DISTURBED_FRAC) / NUM_ROUNDS)
    rounds, idle_faults = [], []
    for number in range(1, NUM_ROUNDS + 1):
        say(f"round {number} of {NUM_ROUNDS}: {round_s:.0f} s")
        async with traffic(server, records, outcomes, args.seed + 1, batch_faults, f"round {number} "):
            await asyncio.sleep(round_s)
        await drain(server, batch_faults)
        busy = await watch.busy_when_idle(IDLE_TIMEOUT_S)
        idle_faults += [f"after round {number}: {what}" for what in busy]
        rounds.append(server.memory_by_role())
    totals, audit_faults = await audit(server.url)
    watching.cancel()
    outages = server.outages
    kills = [*outages.server, *outages.engine]
    probed = ProbeRecords(records).summary((start_s, time.monotonic()), outages.server, kills)
    return {
        "benchmark": "soak",
        "duration_s": args.duration,
        "disturbances": done,
        "batches": totals,
        "outcomes": outcomes.counts(),
        "memory_bytes": rounds,
        "growth_frac": growth_fracs(rounds),
        "num_failed_starts": server.num_failed_starts,
        "num_scratch_entries": server.num_scratch_entries(),
        "disk_calls": server.disk.num_calls,
        "event_loop_lag": watch.lag_of_all_lives(),
        **probed,
        "checks": {
            "answers": [*batch_faults, *audit_faults],
            "requests": outcomes.unexplained(kills),
            "memory": memory_faults(rounds),
            "idle": idle_faults,
            "deaths": server.own_deaths,
            "disk": []
            if server.disk.num_calls or not disk_was_tried(done)
            else ["no call met the broken disk"],
        },
    }


def memory_faults(rounds: Sequence[Mapping[str, int]]) -> list[str]:
    return [
        f"{role}: {frac:.1%} more than after the warm-up, at most {MAX_GROWTH_FRAC:.0%} are allowed"
        for role, frac in growth_fracs(rounds).items()
        if frac > MAX_GROWTH_FRAC
    ]


@asynccontextmanager
async def traffic(
    server: SoakedServer, records: Path, outcomes: Outcomes, seed: int, batch_faults: list[str], label: str
) -> AsyncIterator[None]:
    """Run all clients and the probes until the context ends. ``label`` begins every prompt."""
    clients = Traffic(server.url, outcomes, seed, label=label)
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(clients.run(num_online=4, num_flex=2)),
            group.create_task(harass(server.port, outcomes, seed)),
            group.create_task(keep_batches_open(server.url, seed, 3, 40, batch_faults, label)),
        ]
        try:
            with probing(server.port, records):
                yield
        finally:
            for task in tasks:
                task.cancel()


async def disturb(server: SoakedServer, seed: int, duration_s: float, interval_s: float) -> dict[str, int]:
    """Cause disturbances in turn; returns how often each kind occurred."""
    done: dict[str, int] = {}
    end_at_s = time.monotonic() + duration_s
    full_s = min(15.0, duration_s / 10)
    for pause_s, kind in schedule(seed, duration_s, interval_s):
        if time.monotonic() + pause_s > end_at_s:  # disturbances take time too
            break
        await asyncio.sleep(pause_s)
        await server.revive()
        say(f"{kind} ({end_at_s - time.monotonic():.0f} s left)")
        done[kind] = done.get(kind, 0) + 1
        if kind == KILL_ENGINE:
            await server.kill_engine()
        elif kind == KILL_SERVER:
            await server.kill_server()
        elif kind == DISK_FULL:
            await break_disk(server, DiskMode.FULL, full_s)
        elif kind == DISK_HANG:
            await break_disk(server, DiskMode.HANG, HANG_S)
    await asyncio.sleep(max(0.0, end_at_s - time.monotonic()))
    return done


async def break_disk(server: SoakedServer, mode: DiskMode, span_s: float) -> None:
    server.disk.set(mode)
    await asyncio.sleep(span_s)
    server.disk.set(DiskMode.PASS)


async def drain(server: SoakedServer, faults: list[str]) -> None:
    await server.revive()
    try:
        await settle(server.url, DRAIN_TIMEOUT_S)
    except TimeoutError as error:
        faults.append(str(error))


def disk_was_tried(done: dict[str, int]) -> bool:
    return bool({DISK_FULL, DISK_HANG} & done.keys())


def report(result: dict[str, Any]) -> str:
    """Tables for a reader."""
    lines: list[str] = []
    if "phases" in result:
        for name, phase in result["phases"].items():
            rows = {key: phase[key] for key in ("lag", "health", "stream_gap", "prober_late")}
            lines += [f"{name} ({phase['took_s']:.1f} s)", table(rows), ""]
    else:
        rows = {key: result[key] for key in ("event_loop_lag", "health", "stream_gap", "prober_late")}
        lines += [table(rows), ""]
        keys = (
            "disturbances",
            "batches",
            "growth_frac",
            "num_failed_starts",
            "num_scratch_entries",
            "disk_calls",
        )
        lines += [f"{key}: {result[key]}" for key in keys]
    lines += ["", "how requests ended:"]
    lines += [f"  {kind}: {counts}" for kind, counts in result["outcomes"].items()]
    lines += [""]
    for check, faults in result["checks"].items():
        lines.append(f"{check}: {f'FAILED ({len(faults)})' if faults else 'passed'}")
        lines += [f"  {fault}" for fault in faults[:20]]
    return "\n".join(lines)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
