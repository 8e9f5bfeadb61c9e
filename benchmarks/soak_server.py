"""The soak's server: killed, restarted on the same port and data folder, its memory measured."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from served import end_of, free_port
from soak_checks import Window
from soak_disk import Disk

from backfill.cli.own_server import server_environment

_READY_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 90.0
_POLL_S = 0.05


@dataclass
class Outages:
    """When kills by the soak explain failed requests: from before a kill until the server answers again."""

    server: list[Window] = field(default_factory=list)
    engine: list[Window] = field(default_factory=list)

    @contextmanager
    def during(self, windows: list[Window]) -> Iterator[None]:
        """Add a window that ends with the context."""
        start_s = time.monotonic()
        windows.append((start_s, float("inf")))
        index = len(windows) - 1
        try:
            yield
        finally:
            windows[index] = (start_s, time.monotonic())


class SoakedServer:
    """``backfill serve`` on one port and one data folder, restarted after each kill.

    Args:
        folder: for data, log, profile and the library that breaks the disk.
        options: further options of ``backfill serve``.
    """

    def __init__(self, folder: Path, options: Sequence[str]) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.data = folder / "data"
        self.log = folder / "server.log"
        self.disk = Disk(self.data, folder)
        self.outages = Outages()
        self.own_deaths: list[str] = []  # ends that the soak did not cause
        self.num_failed_starts = 0
        self._scratch = folder / "tmp"
        self._scratch.mkdir()
        self._options = (*options, "--profile", str(_measure_profile(folder)))
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Start a server and wait until it takes requests. Raises: SystemExit when it never does."""
        deadline_at_s = time.monotonic() + _READY_TIMEOUT_S
        while True:
            self._launch()
            if await self._wait_ready(deadline_at_s):
                return
            self.num_failed_starts += 1
            if time.monotonic() > deadline_at_s:
                raise SystemExit(f"the server does not start:\n{end_of(self.log)}")
            await asyncio.sleep(1.0)

    def stop(self) -> None:
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.own_deaths.append(f"it did not end within {_STOP_TIMEOUT_S:g} s of SIGTERM")
            process.kill()
            process.wait()

    async def kill_server(self) -> None:
        """SIGKILL, then restart."""
        with self.outages.during(self.outages.server):
            assert self._process is not None
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
            await self.start()

    async def kill_engine(self) -> None:
        """SIGKILL the engine, and wait for the next."""
        with self.outages.during(self.outages.engine):
            deadline_at_s = time.monotonic() + _READY_TIMEOUT_S
            killed = self.pids_by_role()["engine"]
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
            # Until the server notices, /health still says ready; a new process shows that it has.
            while self._is_running() and not set(self.pids_by_role()["engine"]) - set(killed):
                if time.monotonic() > deadline_at_s:
                    raise SystemExit(f"the engine is not started again:\n{end_of(self.log)}")
                await asyncio.sleep(_POLL_S)
            if not await self._wait_ready(deadline_at_s):
                await self.revive()

    async def revive(self) -> None:
        """Note an end that the soak did not cause, and restart."""
        assert self._process is not None
        status = self._process.poll()
        if status is not None:
            self.own_deaths.append(f"it ended with status {status}: {end_of(self.log)[-500:]}")
            with self.outages.during(self.outages.server):
                await self.start()

    def pids_by_role(self) -> dict[str, list[int]]:
        """Process ids of the server, of its engine (the one that has loaded torch), and of other children."""
        assert self._process is not None
        found: dict[str, list[int]] = {"server": [self._process.pid], "engine": [], "other": []}
        for pid in _descendants(self._process.pid):
            try:
                is_engine = "libtorch" in Path(f"/proc/{pid}/maps").read_text()
            except OSError:
                continue  # it has ended
            found["engine" if is_engine else "other"].append(pid)
        return found

    def memory_by_role(self) -> dict[str, int]:
        """Bytes not backed by files: the kernel evicts and reloads pages of libraries and weights."""
        return {role: sum(map(_private_bytes, pids)) for role, pids in self.pids_by_role().items() if pids}

    def config(self) -> dict[str, Any]:
        """The resolved configuration, as the server saved it."""
        config: dict[str, Any] = json.loads((self.data / "config.json").read_text())
        return config

    def num_scratch_entries(self) -> int:
        """Entries left in the server's folder for temporary files."""
        return len(list(self._scratch.iterdir()))

    def _is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _launch(self) -> None:
        command = [sys.executable, "-m", "backfill", "serve", "--port", str(self.port)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--data-dir", str(self.data), *self._options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**server_environment(), **self.disk.environment, "TMPDIR": str(self._scratch)},
            )

    async def _wait_ready(self, deadline_at_s: float) -> bool:
        """False when the process has ended. Raises: SystemExit after the deadline."""
        assert self._process is not None
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(5.0)) as session:
            while self._process.poll() is None:
                if time.monotonic() > deadline_at_s:
                    raise SystemExit(f"the server is not ready in time:\n{end_of(self.log)}")
                try:
                    async with session.get(f"{self.url}/health") as response:
                        if response.status == 200:
                            return True
                except (aiohttp.ClientError, TimeoutError):
                    pass
                await asyncio.sleep(_POLL_S)
        return False


def _measure_profile(folder: Path) -> Path:
    """A cost profile, measured once, so that no start measures it."""
    path = folder / "profile.json"
    command = [sys.executable, "-m", "backfill", "profile", "--quick", "--out", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"backfill profile failed:\n{done.stderr[-2000:]}")
    return path


def _descendants(pid: int) -> Iterator[int]:
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found = [int(child) for child in children.read_text().split()]
        except OSError:
            continue  # the thread has ended
        for child in found:
            yield child
            yield from _descendants(child)


def _private_bytes(pid: int) -> int:
    """Resident anonymous and shared memory; 0 for a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    sizes = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
    return sum(int(sizes[name][0]) << 10 for name in ("RssAnon", "RssShmem") if name in sizes)
