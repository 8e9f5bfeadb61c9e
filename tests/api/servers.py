"""A real server process for end-to-end tests."""

from __future__ import annotations

import functools
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
from openai import OpenAI

MODEL = "smollm2-135m-instruct"
START_TIMEOUT_S = 60.0


class RunningServer:
    """``backfill serve`` as a child process, its output collected."""

    def __init__(self, port: int, process: subprocess.Popen[str], data_dir: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.process = process
        self.data_dir = data_dir
        self.output: list[str] = []
        self._reader = threading.Thread(target=self._collect, daemon=True)
        self._reader.start()
        self.http = httpx.Client(base_url=self.url, timeout=60.0)

    def client(self, api_key: str = "none", max_retries: int = 0) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=max_retries, timeout=60.0)

    def wait_ready(self) -> None:
        wait_until(self._is_ready, START_TIMEOUT_S, "the server to be ready")

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that have these labels."""
        total = 0.0
        for line in self.http.get("/metrics").text.splitlines():
            match = re.fullmatch(rf"{re.escape(name)}(?:{{(.*)}})? (\S+)", line)
            if match and all(f'{key}="{value}"' in (match[1] or "") for key, value in labels.items()):
                total += float(match[2])
        return total

    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_text() for pid in children}
        return next(pid for pid, command in commands.items() if "spawn_main" in command)

    def stop(self, timeout_s: float = 30.0) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, "".join(self.output)
        try:
            return self.http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def _collect(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)


@contextmanager
def running_server(*options: str, data_dir: Path, model: str = MODEL) -> Iterator[RunningServer]:
    """Start a server, wait until it is ready, and end it afterwards however the test went."""
    server = launch(model, *options, data_dir=data_dir)
    try:
        server.wait_ready()
        yield server
    finally:
        server.http.close()
        server.process.kill()
        server.process.wait()


@functools.cache
def quick_profile() -> str:
    """A profile of the default model, measured once a run: every server would else measure its own."""
    path = Path(tempfile.mkdtemp(prefix="backfill-tests-")) / "profile.json"
    command = [sys.executable, "-m", "backfill", "profile", MODEL, "--quick", "--out", str(path)]
    subprocess.run(command, check=True, capture_output=True, timeout=START_TIMEOUT_S)
    return str(path)


def launch(model: str, *options: str, data_dir: Path) -> RunningServer:
    port = free_port()
    if model == MODEL and not {"--policy", "--profile", "--dtype", "--threads"} & set(options):
        options += ("--profile", quick_profile())
    process = subprocess.Popen(
        serve_command(model, "--port", str(port), "--data-dir", str(data_dir), *options),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    return RunningServer(port, process, data_dir)


def serve_command(*arguments: str) -> Sequence[str]:
    return [sys.executable, "-m", "backfill", "serve", *arguments]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until(condition: object, timeout_s: float, what: str) -> None:
    assert callable(condition)
    deadline_at_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_at_s, f"waited {timeout_s} s for {what}"
        time.sleep(0.02)
