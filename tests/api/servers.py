"""A real server process for end-to-end tests."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import torch
from openai import DefaultHttpxClient, OpenAI

from backfill.costs.profile import CostProfile, FitError
from tests.cli.running import run_cli_here
from tests.patience import TIMEOUT_S
from tests.shared import made_once

MODEL = "smollm2-135m-instruct"
# A client gives up an idle connection before its server does (after 5 s): it must not send as that closes it.
KEEP_ALIVE = httpx.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=1.0)
# Options of the small model (tests/conftest.py): float32, and one thread.
SMALL_MODEL = ("--dtype", "float32", "--threads", "1", "--kv-gib", "0.05")
# Options that a profile depends on.
_PROFILED_OPTIONS = ("--dtype", "--threads")


class HeldPort:
    """A port that no other process is given, though a server that reuses addresses may listen on it."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()


class RunningServer:
    """``backfill serve`` as a child process, its output collected."""

    def __init__(self, held_port: HeldPort, process: subprocess.Popen[str], data_dir: Path) -> None:
        self.url = f"http://127.0.0.1:{held_port.number}"
        self._held_port = held_port
        self.process = process
        self.data_dir = data_dir
        self.output: list[str] = []
        self._reader = threading.Thread(target=self._collect, daemon=True)
        self._reader.start()
        self.http = httpx.Client(base_url=self.url, timeout=TIMEOUT_S, limits=KEEP_ALIVE, verify=False)

    def client(self, api_key: str = "none", max_retries: int = 0) -> OpenAI:
        return OpenAI(
            base_url=f"{self.url}/v1",
            api_key=api_key,
            max_retries=max_retries,
            timeout=TIMEOUT_S,
            # Nobody presents a certificate, and to load those that are trusted takes longer than an answer.
            http_client=DefaultHttpxClient(timeout=TIMEOUT_S, verify=False),
        )

    def complete(self, prompt: Any, key: str = "none", **fields: Any) -> dict[str, Any]:
        """The answer to ``/v1/completions``."""
        headers = {"Authorization": f"Bearer {key}"}
        body = {"prompt": prompt, "ignore_eos": True, **fields}
        answer = self.http.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        completion: dict[str, Any] = answer.json()
        return completion

    def tokens(self, prompt: list[int], max_tokens: int, **fields: Any) -> list[int]:
        """Those of a greedy completion."""
        asked = {"max_tokens": max_tokens, "temperature": 0, "return_token_ids": True, **fields}
        token_ids: list[int] = self.complete(prompt, **asked)["choices"][0]["token_ids"]
        return token_ids

    def wait_ready(self) -> None:
        wait_until(self._is_ready, "the server to be ready")

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
        names = {int(pid): Path(f"/proc/{pid}/comm").read_text() for pid in children}
        return next(pid for pid, name in names.items() if name == "backfill-engine\n")

    @contextmanager
    def paused_engine(self) -> Iterator[int]:
        """The engine's process id; it computes nothing until the block ends, so no request ends either."""
        pid = self.engine_pid()
        os.kill(pid, signal.SIGSTOP)
        try:
            yield pid
        finally:
            with suppress(ProcessLookupError):  # it may have been killed meanwhile
                os.kill(pid, signal.SIGCONT)

    def logged(self, *parts: str) -> str:
        """The first line of the output with all these parts. A thread reads the output, so it may be late."""
        found: list[str] = []

        def has_line() -> bool:
            found[:] = [line for line in self.output if all(part in line for part in parts)]
            return bool(found)

        wait_until(has_line, f"a line with {parts}")
        return found[0]

    def stop(self, timeout_s: float = TIMEOUT_S) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        self.http.close()
        self.process.kill()
        self.process.wait()
        self._held_port.close()

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


def chunks_of(text: str) -> list[dict[str, Any]]:
    """The chunks of an answer as server-sent events."""
    assert "\r" not in text
    assert text.endswith("data: [DONE]\n\n")
    events = text.split("\n\n")[:-2]
    assert all(event.startswith("data: ") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


@contextmanager
def running_server(*options: str, data_dir: Path, model: str = MODEL) -> Iterator[RunningServer]:
    """Start a server, wait until it is ready, and kill it after the block."""
    with ending(launch(model, *options, data_dir=data_dir)) as server:
        server.wait_ready()
        yield server


@contextmanager
def small_server(model: Path, *options: str, data_dir: Path) -> Iterator[RunningServer]:
    """The same for the small model."""
    with ending(launch_small(model, *options, data_dir=data_dir)) as server:
        server.wait_ready()
        yield server


@contextmanager
def ending(server: RunningServer) -> Iterator[RunningServer]:
    try:
        yield server
    finally:
        server.kill()


def quick_profile(model: str = MODEL, *options: str) -> str:
    """A profile of the model, measured once in a test run, so that servers do not measure their own."""
    name = "-".join(["profile", Path(model).name, *options]) + ".json"
    return str(made_once(name, lambda path: _measure_profile(path, model, options)))


def _measure_profile(path: Path, model: str, options: Sequence[str]) -> None:
    # Smaller than the default: other tests use memory too.
    size = ("--kv-gib", "0.25", "--max-model-len", "2048")
    num_threads = torch.get_num_threads()
    done = run_cli_here("profile", model, *options, *size, "--quick", "--out", str(path))
    torch.set_num_threads(num_threads)
    assert done.returncode == 0, done.stderr
    # Marked as full, with fixed errors: refusals do not depend on the machine, and nothing refines it.
    sure = replace(
        CostProfile.load(path),
        quality="full",
        error=FitError(0.01, 0.05, 40),
        known_tokens=2048,
        known_chunk_tokens=2048,
    )
    sure.save(path)


def with_profile(model: str, options: Sequence[str]) -> tuple[str, ...]:
    """The options, plus a profile if they need one and have none."""
    if {"--policy", "--profile"} & set(options):
        return tuple(options)
    profiled = [part for pair in pairwise(options) if pair[0] in _PROFILED_OPTIONS for part in pair]
    return (*options, "--profile", quick_profile(model, *profiled))


def launch_small(model: Path, *options: str, data_dir: Path) -> RunningServer:
    """A server of the small model (tests/conftest.py), by default under the default model's name."""
    if "--served-model-name" not in options:
        options += ("--served-model-name", MODEL)
    return launch(str(model), *SMALL_MODEL, *options, data_dir=data_dir)


def launch(model: str, *options: str, data_dir: Path) -> RunningServer:
    options = with_profile(model, options)
    port = HeldPort()
    process = subprocess.Popen(
        serve_command(model, "--port", str(port.number), "--data-dir", str(data_dir), *options),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    return RunningServer(port, process, data_dir)


def serve_command(*arguments: str) -> Sequence[str]:
    return [sys.executable, "-m", "backfill", "serve", *arguments]


def wait_until(condition: object, what: str) -> None:
    assert callable(condition)
    began_at_s = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - began_at_s
        assert waited_s < TIMEOUT_S, f"waited {TIMEOUT_S} s for {what}"
        # To ask takes time of the processors that what is waited for needs.
        time.sleep(min(max(0.02, 0.03 * waited_s), 0.1))
