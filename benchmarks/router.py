"""What the router costs a request: the same requests through it and straight to the engine it chooses.

Engines that compute nothing answer at once, in two processes of their own, so that what is measured is the
router's way: accept, read, choose, send, pass back; of many engines also that it asks each for its state
four times a second. With ``--model`` the engines are real servers.
Requests go one after another over one kept connection, alternating between the router and the engines, with
a short prompt and with one of 8 KiB, streamed and whole. The cost is the difference of the medians of each
round; the median of the rounds is reported. On a loaded machine it includes the router's wait for a
processor, so the difference of the first quartiles and the processor time that the router's process used for
a request are reported too. P99 is of the differences of all pairs: a request through the router, and the one
before it without.

Usage: router.py [--rounds 5] [--requests 300] [--engines 2] [--model FOLDER]. The last line of output is a
JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web

from backfill.cli.own_server import own_server, server_environment
from backfill.protocol.replica_state import ReplicaState
from backfill.router.replicas import free_port

READY_S = 120.0
NUM_STUB_PROCESSES = 2
LONG_PROMPT_BYTES = 8 << 10
_EVENTS = b"".join(
    b"data: " + json.dumps({"choices": [{"index": 0, "text": f" {number}"}]}).encode() + b"\n\n"
    for number in range(8)
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--model", help="folder of a model for real engines")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    with ExitStack() as stack:
        if args.model is None:
            parts = [args.engines // NUM_STUB_PROCESSES] * NUM_STUB_PROCESSES
            parts[0] += args.engines % NUM_STUB_PROCESSES
            engines = [url for part in parts for url in stack.enter_context(stub_engines(part))]
        else:
            engines = [stack.enter_context(real_engine(args.model)) for _ in range(args.engines)]
        router, pid = stack.enter_context(running_router(engines))
        result = asyncio.run(measure(router, pid, engines, args.rounds, args.requests))
    for name, values in result.items():
        shown = ", ".join(f"{key} {value:.3f}" for key, value in values.items())
        print(f"{name:16s} {shown}")
    kind = "stub" if args.model is None else "real"
    shown = {"engines": kind, "num_engines": args.engines, "requests": args.requests}
    print(json.dumps({"benchmark": "router", **shown, **result}))


@contextmanager
def stub_engines(count: int) -> Iterator[list[str]]:
    """URLs of so many in one process."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=run_stubs, args=(theirs, count), daemon=True)
    process.start()
    try:
        yield [f"http://127.0.0.1:{port}" for port in ours.recv()]
    finally:
        process.kill()
        process.join()


def run_stubs(pipe: Connection, count: int) -> None:
    """Answer every completion with eight tokens."""
    state = ReplicaState(
        instance=str(time.time_ns()),
        phase="ready",
        models=("stub",),
        digest="",
        max_num_seqs=256,
        kv_tokens=1_000_000,
        max_model_len=100_000,
        ttft_slo_s=1.0,
        prefill_tokens_per_s=1e6,
    )

    async def show_state(request: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(state))

    async def complete(request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read())
        if body.get("stream"):
            return web.Response(body=_EVENTS + b"data: [DONE]\n\n", content_type="text/event-stream")
        return web.Response(body=b'{"choices": []}', content_type="application/json")

    async def run() -> None:
        app = web.Application()
        app.add_routes([web.get("/state", show_state), web.post("/v1/completions", complete)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        for _ in range(count):
            await web.SockSite(runner, socket.create_server(("127.0.0.1", 0))).start()
        pipe.send([address[1] for address in runner.addresses])
        await asyncio.Event().wait()

    asyncio.run(run())


@contextmanager
def real_engine(model: str) -> Iterator[str]:
    options = ["--no-batch-api", "--threads", "1", "--kv-gib", "0.1"]
    with (
        tempfile.TemporaryDirectory() as folder,
        own_server(model, options, Path(folder, "log")) as server,
    ):
        server.wait_until_ready(READY_S)
        yield server.url


@contextmanager
def running_router(engines: list[str]) -> Iterator[tuple[str, int]]:
    """Its URL and process id."""
    port = free_port()
    command = [sys.executable, "-m", "backfill", "router", "--port", str(port), "--no-batch-api"]
    with subprocess.Popen(
        [*command, "--engines", *engines, "--log-level", "ERROR"],
        stdout=subprocess.PIPE,
        env=server_environment(),
    ) as process:
        try:
            assert process.stdout is not None
            while b"Backfill routes" not in (line := process.stdout.readline()):
                if not line:
                    raise SystemExit("the router did not start")
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.terminate()


async def measure(
    router: str, pid: int, engines: list[str], num_rounds: int, num_requests: int
) -> dict[str, dict[str, float]]:
    """Milliseconds of the median request, direct and routed, and what the router adds, by kind of request."""
    kinds = {
        "whole": {"prompt": "Hi", "max_tokens": 1},
        "stream": {"prompt": "Hi", "max_tokens": 8, "stream": True},
        "long stream": {"prompt": "word " * (LONG_PROMPT_BYTES // 5), "max_tokens": 8, "stream": True},
    }
    result = {}
    async with aiohttp.ClientSession() as session:
        for name, body in kinds.items():
            rounds, pairs = [], list[float]()
            for number in range(num_rounds + 1):  # the first warms up
                seconds: dict[str, list[float]] = {"direct": [], "routed": []}
                used_s = processor_s(pid)
                for index in range(num_requests):
                    for way, url in (("direct", engines[index % len(engines)]), ("routed", router)):
                        started_at_s = time.perf_counter()
                        async with session.post(f"{url}/v1/completions", json=body) as response:
                            await response.read()
                            if response.status != 200:
                                raise SystemExit(f"{way}: status {response.status}")
                        seconds[way].append(time.perf_counter() - started_at_s)
                if number > 0:
                    both = zip(seconds["routed"], seconds["direct"], strict=True)
                    pairs += [1e3 * (routed_s - direct_s) for routed_s, direct_s in both]
                    figures = {way: 1e3 * statistics.median(each) for way, each in seconds.items()}
                    quartiles = {way: statistics.quantiles(each)[0] for way, each in seconds.items()}
                    figures["quartile_added"] = 1e3 * (quartiles["routed"] - quartiles["direct"])
                    figures["used"] = 1e3 * (processor_s(pid) - used_s) / num_requests
                    rounds.append(figures)
            added = [each["routed"] - each["direct"] for each in rounds]
            result[name] = {
                "direct_ms": statistics.median(each["direct"] for each in rounds),
                "routed_ms": statistics.median(each["routed"] for each in rounds),
                "added_ms": statistics.median(added),
                "most_added_ms": max(added),
                "p99_added_ms": statistics.quantiles(pairs, n=100)[-1],
                "quartile_added_ms": statistics.median(each["quartile_added"] for each in rounds),
                "processor_ms": statistics.median(each["used"] for each in rounds),
            }
    return result


def processor_s(pid: int) -> float:
    """Seconds of processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
