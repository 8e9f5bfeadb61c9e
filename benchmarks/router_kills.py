"""Kills engines behind a router at random moments, under online load and batches, and counts what is lost.

Two servers of a model run behind a router. Batches run one after another, and online requests arrive at
random, half of them streams. Now and then one server, or the engine process within one, gets SIGKILL; a
server is started again at once. At the end every line of every batch must have exactly one answer, and every
online request a whole one, except streams that had begun when their engine died: these must end with an
error.

With --shares-store the servers lease lines from the router's store; else the router sends lines to them.

Usage: router_kills.py [--kills 20] [--model FOLDER] [--rate 4] [--shares-store] [--seed 0]. The last line of
output is a JSON object; the exit status is 1 if anything was lost or doubled.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from backfill.cli.own_server import server_environment
from backfill.router.replicas import free_port

READY_S = 180.0
ENDED_S = 600.0
_FINAL = ("completed", "failed", "expired", "cancelled")
_BACKFILL = (sys.executable, "-m", "backfill")
_ENDPOINT = "/v1/completions"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rate", type=float, default=4.0, help="online requests a second")
    parser.add_argument("--lines", type=int, default=400, help="of each batch")
    parser.add_argument("--least-s", type=float, default=2.0, help="least seconds between two kills")
    parser.add_argument("--most-s", type=float, default=15.0)
    parser.add_argument("--shares-store", action="store_true", help="servers lease the lines themselves")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    with tempfile.TemporaryDirectory(prefix="router-kills-") as folder:
        result = asyncio.run(Run(args, Path(folder)).run())
    print(json.dumps({"benchmark": "router_kills", **result}))
    lost = result["lines_lost"] + result["lines_doubled"] + result["lines_failed"] + result["online_lost"]
    raise SystemExit(1 if lost else 0)


@dataclass
class Server:
    """``backfill serve`` on one port, started again and again."""

    model: str
    folder: Path
    batch_options: str
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        data_dir = self.folder / str(self.port)
        options = f"--port {self.port} --threads 1 --kv-gib 0.25 --data-dir {data_dir} {self.batch_options}"
        with Path(self.folder, f"server-{self.port}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*_BACKFILL, "serve", self.model, *options.split()],
                stdout=log,
                stderr=log,
                env=server_environment(),
            )

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def kill_engine(self) -> bool:
        """Kill the engine process alone. Returns: whether there was one."""
        assert self.process is not None
        with suppress(OSError):
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            for child in children:
                if Path(f"/proc/{child}/comm").read_text() == "backfill-engine\n":
                    os.kill(int(child), signal.SIGKILL)
                    return True
        return False


def store_options(folder: Path) -> str:
    """Of the router and the servers, which share files and batches."""
    return f"--batch-database-url sqlite:///{folder}/jobs.db --batch-file-store {folder}/store"


class Run:
    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args = args
        self._folder = folder
        self._random = random.Random(args.seed)
        self._store = store_options(folder) if args.shares_store else ""
        batch_options = self._store or "--no-batch-api"
        self._servers = [Server(args.model, folder, batch_options) for _ in range(2)]
        self._online: Counter[str] = Counter()
        self._lines: Counter[str] = Counter()
        self._num_batches = 0
        self._kills_done = asyncio.Event()
        self._http: aiohttp.ClientSession

    async def run(self) -> dict[str, Any]:
        for server in self._servers:
            server.start()
        port = free_port()
        urls = " ".join(server.url for server in self._servers)
        options = f"--engines {urls} --port {port} --retry-timeout 300 --engine-timeout 60"
        options += f" --data-dir {self._folder}/router {self._store}"
        with Path(self._folder, "router.log").open("wb") as log:
            router = subprocess.Popen(
                [*_BACKFILL, "router", *options.split()],
                stdout=log,
                stderr=log,
                env=server_environment(),
            )
        try:
            timeout = aiohttp.ClientTimeout(total=ENDED_S)
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", timeout=timeout) as self._http:
                await self._until_ready(router)
                started_at_s = time.monotonic()
                await asyncio.gather(self._kill(), self._load(), self._batches())
                took_s = time.monotonic() - started_at_s
        finally:
            for server in self._servers:
                server.kill()
            router.terminate()
            router.wait()
        return {
            "model": self._args.model,
            "shares_store": self._args.shares_store,
            "kills": self._args.kills,
            "duration_s": round(took_s, 1),
            "batches": self._num_batches,
            **{f"lines_{name}": self._lines[name] for name in ("total", "ok", "failed", "lost", "doubled")},
            **{f"online_{name}": self._online[name] for name in ("sent", "ok", "broken", "lost")},
        }

    async def _until_ready(self, router: subprocess.Popen[bytes]) -> None:
        async with asyncio.timeout(READY_S):
            while True:
                if router.poll() is not None:
                    raise SystemExit(Path(self._folder, "router.log").read_text())
                with suppress(aiohttp.ClientConnectionError):
                    async with self._http.get("/router/engines") as response:
                        engines = (await response.json())["data"]
                    if all(engine["status"] == "up" for engine in engines):
                        return
                await asyncio.sleep(0.2)

    async def _kill(self) -> None:
        for number in range(self._args.kills):
            await asyncio.sleep(self._random.uniform(self._args.least_s, self._args.most_s))
            server = self._random.choice(self._servers)
            if self._random.random() < 0.5 and server.kill_engine():
                print(f"kill {number + 1}: the engine of {server.url}", flush=True)
            else:
                await asyncio.to_thread(server.kill)
                server.start()
                print(f"kill {number + 1}: {server.url}", flush=True)
        self._kills_done.set()

    async def _load(self) -> None:
        tasks = set()
        while not self._kills_done.is_set():
            await asyncio.sleep(self._random.expovariate(self._args.rate))
            tasks.add(asyncio.create_task(self._request(len(tasks))))
        await asyncio.gather(*tasks)

    async def _request(self, number: int) -> None:
        self._online["sent"] += 1
        streams = number % 2 == 0
        body = {"prompt": f"Question {number}: why?", "max_tokens": 24, "ignore_eos": True, "stream": streams}
        text, status = b"", 0
        try:
            async with self._http.post(_ENDPOINT, json=body) as response:
                status = response.status
                text = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            text = str(error).encode()
        is_whole = text.endswith(b"data: [DONE]\n\n") if streams else b'"finish_reason"' in text
        if status == 200 and is_whole and b'"error"' not in text:
            self._online["ok"] += 1
        elif streams and status == 200 and is_whole and text.startswith(b'data: {"id"'):
            self._online["broken"] += 1  # it had begun, and ended with an error
        else:
            self._online["lost"] += 1
            print(f"lost: status {status}, {text[-300:]!r}", flush=True)

    async def _batches(self) -> None:
        while not self._kills_done.is_set():
            self._num_batches += 1
            await self._batch(self._num_batches)

    async def _batch(self, number: int) -> None:
        lines = [
            {
                "custom_id": f"{number}-{line}",
                "method": "POST",
                "url": _ENDPOINT,
                "body": {
                    "prompt": f"Document {line // 8}. " * 20 + f"Line {line}",
                    "max_tokens": 8 + line % 32,
                },
            }
            for line in range(self._args.lines)
        ]
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", "\n".join(map(json.dumps, lines)), filename="lines.jsonl")
        async with self._http.post("/v1/files", data=form) as response:
            file_id = (await response.json())["id"]
        body = {"input_file_id": file_id, "endpoint": _ENDPOINT, "completion_window": "24h"}
        async with self._http.post("/v1/batches", json=body) as response:
            batch = await response.json()
        async with asyncio.timeout(ENDED_S):
            while batch["status"] not in _FINAL:
                await asyncio.sleep(0.5)
                async with self._http.get(f"/v1/batches/{batch['id']}") as response:
                    batch = await response.json()
        found: Counter[str] = Counter()
        for kind in ("output_file_id", "error_file_id"):
            if batch[kind] is not None:
                async with self._http.get(f"/v1/files/{batch[kind]}/content") as response:
                    results = [json.loads(line) for line in (await response.text()).splitlines()]
                found.update(result["custom_id"] for result in results)
                self._lines["ok" if kind == "output_file_id" else "failed"] += len(results)
        wanted = {line["custom_id"] for line in lines}
        self._lines["total"] += len(wanted)
        self._lines["lost"] += len(wanted - found.keys())
        self._lines["doubled"] += sum(found.values()) - len(found)


if __name__ == "__main__":
    main()
