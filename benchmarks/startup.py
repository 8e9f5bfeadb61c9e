"""Start-up time and memory of ``backfill serve`` with the model cached and a 1 GiB KV pool.

Times run from launching the command until ``/health`` is 200 (ready), and until the first chat answer is
complete; first without a cost profile, then with the coarse one that the first start saved. Idle memory is
the proportional set size of all processes after one chat. Peak memory is the sum of their peak resident sizes
(shared pages count more than once) after requests have filled the KV pool.

Usage: startup.py [--runs 3] [--no-fill]. Prints a table and, as the last line, one JSON object.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from served import (
    cache_without_profiles,
    check_lives,
    check_no_prefix_hits,
    free_port,
    get,
    show_end_of,
    stop,
)

PROMPT_TOKENS = 1500
CHAT = {"messages": [{"role": "user", "content": "What is gravity?"}], "max_tokens": 8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--no-fill", action="store_true", help="leave out the peak memory")
    arguments = parser.parse_args()
    runs = []
    for number in range(arguments.runs):
        with cache_without_profiles() as cache:
            first = measure(cache, fills=False)
            second = measure(cache, fills=not arguments.no_fill and number == arguments.runs - 1)
        runs.append({**{f"{key}_first": value for key, value in first.items()}, **second})
    result = {key: statistics.median(run[key] for run in runs if key in run) for key in runs[-1]}
    for key, value in result.items():
        figures = ", ".join(f"{run[key]:.2f}" for run in runs if key in run)
        print(f"{key:24s} {value:8.2f}   (runs: {figures})")
    load = os.getloadavg()[0]
    print(json.dumps({"benchmark": "startup", "runs": len(runs), "load_average": load, **result}))


def measure(cache: str, *, fills: bool) -> dict[str, float]:
    """Start a server whose profiles are in ``cache``, and send it a chat.

    Raises: SystemExit when the server ends; the end of its log is shown.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "stderr"
        options = ["--port", str(port), "--kv-gib", "1", "--data-dir", f"{folder}/data"]
        with log.open("wb") as stderr:
            started_at_s = time.perf_counter()
            process = subprocess.Popen(
                [sys.executable, "-m", "backfill", "serve", *options],
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env={**os.environ, "BACKFILL_CACHE_ROOT": cache},
            )
        try:
            wait_for(process, port, "/health")
            ready_s = time.perf_counter() - started_at_s
            post(port, "/v1/chat/completions", CHAT)
            first_answer_s = time.perf_counter() - started_at_s
            while "backfill:preparation_up 1.0" not in wait_for(process, port, "/metrics"):
                time.sleep(0.2)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            pids = [str(process.pid), *children]
            figures = {
                "ready_s": ready_s,
                "first_answer_s": first_answer_s,
                "idle_memory_gib": sum(map(proportional_bytes, pids)) / 2**30,
            }
            if fills:
                figures["kv_use_frac"] = fill_kv_pool(port)
                figures["peak_memory_gib"] = sum(map(peak_bytes, pids)) / 2**30
        except BaseException:
            show_end_of(log)
            raise
        finally:
            stop(process)
    return figures


def wait_for(server: subprocess.Popen[bytes], port: int, path: str) -> str:
    """The body of a GET of ``path``, as soon as the server answers. Raises: SystemExit when it has ended."""
    while True:
        try:
            return get(port, path)
        except (OSError, http.client.HTTPException):  # URLError is an OSError
            check_lives(server)
            time.sleep(0.02)


def fill_kv_pool(port: int) -> float:
    """Run long prompts that nearly fill the pool; returns the largest share in use."""
    bodies = [
        {"prompt": [1000 + number] * PROMPT_TOKENS, "max_tokens": 100, "ignore_eos": True}
        for number in range(34)
    ]  # equal prompts would share their blocks
    threads = [
        threading.Thread(target=post, args=(port, "/v1/completions", body), daemon=True) for body in bodies
    ]
    for thread in threads:
        thread.start()
    most_used = 0.0
    while any(thread.is_alive() for thread in threads):
        for line in get(port, "/metrics").splitlines():
            if line.startswith("backfill:kv_cache_usage_perc{"):
                most_used = max(most_used, float(line.rsplit(" ", 1)[1]))
        time.sleep(0.2)
    check_no_prefix_hits(port)
    return most_used


def proportional_bytes(pid: str) -> int:
    """Resident bytes, each page divided by the number of processes that share it."""
    sizes = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return next(int(line.split()[1]) for line in sizes.splitlines() if line.startswith("Pss:")) * 1024


def peak_bytes(pid: str) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) * 1024


def post(port: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    answer: dict[str, Any] = json.load(urllib.request.urlopen(request, timeout=300))
    return answer


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
