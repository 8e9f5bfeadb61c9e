"""Start-up time and peak memory of ``backfill serve`` with the model cached and a 1 GiB KV pool.

Time runs from launching the command to the whole first chat answer. Memory is the sum of the peak
resident sizes of the server's and the engine's process (pages they share counted twice), read after
requests have filled the KV pool.

Usage: startup.py [--runs 3]. Prints a table and, as the last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 1500
CHAT = {"messages": [{"role": "user", "content": "What is gravity?"}], "max_tokens": 8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    runs = [measure() for _ in range(parser.parse_args().runs)]
    result = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    for key, value in result.items():
        print(f"{key:24s} {value:8.2f}   (runs: {', '.join(f'{run[key]:.2f}' for run in runs)})")
    print(json.dumps({"benchmark": "startup", "runs": len(runs), **result}))


def measure() -> dict[str, float]:
    port = free_port()
    with tempfile.TemporaryDirectory() as data_dir:
        options = ["--port", str(port), "--kv-gib", "1", "--data-dir", data_dir]
        started_at_s = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "backfill", "serve", *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            while not answered(port):
                time.sleep(0.02)
            first_answer_s = time.perf_counter() - started_at_s
            most_used = fill_kv_pool(port)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            peaks = [peak_bytes(pid) for pid in (str(process.pid), *children)]
        finally:
            process.terminate()
            process.wait()
    return {
        "first_answer_s": first_answer_s,
        "peak_memory_gib": sum(peaks) / 2**30,
        "kv_use_frac": most_used,
    }


def answered(port: int) -> bool:
    try:
        return bool(post(port, "/v1/chat/completions", CHAT)["choices"])
    except (urllib.error.URLError, ConnectionError):
        return False


def fill_kv_pool(port: int) -> float:
    """Run long prompts until the pool was nearly full; returns the largest share seen in use."""
    body = {"prompt": [1000] * PROMPT_TOKENS, "max_tokens": 100, "ignore_eos": True}
    threads = [
        threading.Thread(target=post, args=(port, "/v1/completions", body), daemon=True) for _ in range(34)
    ]
    for thread in threads:
        thread.start()
    most_used = 0.0
    while any(thread.is_alive() for thread in threads):
        metrics = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
        for line in metrics.splitlines():
            if line.startswith("backfill:kv_cache_usage_perc{"):
                most_used = max(most_used, float(line.rsplit(" ", 1)[1]))
        time.sleep(0.2)
    return most_used


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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
