"""What stalls the event loop: four bursts of work in turn, beside a busy engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from soak_batches import OPEN_STATUSES, BatchClient, batch_line, keep_batches_open
from soak_checks import Histogram, Window
from soak_disk import DiskMode
from soak_load import Outcomes, Traffic, text_of
from soak_server import SoakedServer
from soak_watch import MetricsWatch, ProbeRecords, lag_figures, probing

MAX_LAG_P99_S = 0.020
MAX_LAG_S = 0.100
_CALM_S = 15.0
_AFTER_START_S = 30.0  # of a batch that has begun to run
_HANG_S = 5.0
_UPLOAD_LINE_BYTES = 8000
_WAIT_S = 900.0
_NUM_LARGE_BODIES = 3  # of each kind


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of the bursts."""

    num_lines: int
    line_tokens: int
    upload_bytes: int


async def run_stalls(server: SoakedServer, scale: Scale, seed: int, records: Path) -> dict[str, Any]:
    """Figures of each phase, and violations.

    Returns: ``phases`` (by name: lag, health, stream_gap, prober_late), ``outcomes`` and ``faults``.
    """
    await server.start()
    watch, outcomes, faults = MetricsWatch(server.url), Outcomes(), list[str]()
    phases: dict[str, Callable[[Span], Awaitable[None]]] = {
        "load only": lambda _: asyncio.sleep(_CALM_S),
        f"a batch of {scale.num_lines} lines starts": lambda span: _start_batch(server, scale, seed, span),
        "bodies of the maximum size": lambda _: _send_large_bodies(server, outcomes, seed),
        f"an upload of {scale.upload_bytes / 1e6:g} MB": lambda _: _validate_upload(server, scale, seed),
        f"the disk hangs for {_HANG_S:g} s": lambda span: _hang_disk(server, scale, seed, span),
    }
    spans: dict[str, Span] = {}
    with probing(server.port, records):
        async with busy(server.url, outcomes, seed, faults):
            watching = asyncio.create_task(watch.run())
            for name, phase in phases.items():
                print(f"{name} ...", file=sys.stderr, flush=True)
                spans[name] = span = Span(watch)
                try:
                    await span.begin()
                    await phase(span)
                    await span.end()
                except (RuntimeError, TimeoutError, aiohttp.ClientError) as error:
                    faults.append(f"{name}: {error!r}")
                await server.revive()
            watching.cancel()
    probed = ProbeRecords(records)
    result: dict[str, Any] = {"phases": {}, "outcomes": outcomes.counts(), "faults": faults}
    for name, span in spans.items():
        summary = probed.summary(span.window, server.outages.server, server.outages.server)
        took_s = span.window[1] - span.window[0]
        result["phases"][name] = {"lag": span.lag, **summary, "took_s": took_s}
        faults += lag_faults(name, span.lag)
    faults += outcomes.unexplained(server.outages.server)
    faults += server.own_deaths
    return result


class Span:
    """The measured part of a phase: from the last ``begin`` to the first ``end`` after it."""

    def __init__(self, watch: MetricsWatch) -> None:
        self._watch = watch
        self._before: Histogram | None = None
        self.window: Window = (0.0, 0.0)
        self.lag: dict[str, float] | None = None

    async def begin(self) -> None:
        """Raises: aiohttp.ClientError, OSError, as ``end`` does."""
        self._before = await self._watch.lag()
        self.window = (time.monotonic(), 0.0)

    async def end(self) -> None:
        if self.window[1]:
            return
        after = await self._watch.lag()
        self.window = (self.window[0], time.monotonic())
        if after is not None:
            self.lag = lag_figures(after.since(self._before), self._watch.max_lag(self.window))


def lag_faults(phase: str, lag: dict[str, float] | None) -> list[str]:
    """The limits that the lag of a phase exceeds."""
    if lag is None:
        return [f"{phase}: the server exposes no event loop lag"]
    limits = (("p99_s", MAX_LAG_P99_S), ("max_s", MAX_LAG_S))
    return [
        f"{phase}: event loop lag {name} is {lag[name]:g}, more than {most:g}"
        for name, most in limits
        if not lag[name] <= most
    ]


@asynccontextmanager
async def busy(url: str, outcomes: Outcomes, seed: int, faults: list[str]) -> AsyncIterator[None]:
    """Keep the engine busy with online and offline work until the context ends."""
    traffic = Traffic(url, outcomes, seed, pause_s=0.1)
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(traffic.run(num_online=4, num_flex=2)),
            group.create_task(keep_batches_open(url, seed, 2, 200, faults)),
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


async def _start_batch(server: SoakedServer, scale: Scale, seed: int, span: Span) -> None:
    """Upload and create a batch, and let it run for ``_AFTER_START_S``."""
    words_per_line = await _words_of(server.url, scale.line_tokens)

    def lines() -> Iterator[bytes]:
        return long_lines(seed, scale.num_lines, words_per_line)

    async with BatchClient(server.url) as client:
        file_id = await client.upload(lines)
        await span.begin()
        batch_id = await client.create(file_id)
        batch = await client.wait(batch_id, frozenset({"validating"}), _WAIT_S)
        if batch["status"] != "in_progress":
            raise RuntimeError(f"the batch did not start: {json.dumps(batch['errors'])[:300]}")
        await asyncio.sleep(_AFTER_START_S)
        await client.cancel(batch_id)
        await client.wait(batch_id, OPEN_STATUSES, _WAIT_S)


async def _send_large_bodies(server: SoakedServer, outcomes: Outcomes, seed: int) -> None:
    """Valid JSON just within the limit: one long text, and many messages."""
    max_bytes = int(server.config()["server"]["max_body_bytes"])
    bodies = [
        ("/v1/completions", lambda: long_text_body(max_bytes, seed)),
        ("/v1/chat/completions", lambda: many_messages_body(max_bytes)),
    ]
    timeout = aiohttp.ClientTimeout(_WAIT_S)
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
        for _ in range(_NUM_LARGE_BODIES):
            for path, make in bodies:
                body = await asyncio.to_thread(make)

                async def send(path: str = path, body: bytes = body) -> str:
                    async with session.post(server.url + path, data=body) as response:
                        await response.read()
                        return (
                            "ok"
                            if response.status == 200 or 400 <= response.status < 500
                            else f"status {response.status}"
                        )

                await outcomes.note(f"largest body {path}", send)
                await asyncio.sleep(1.0)


async def _validate_upload(server: SoakedServer, scale: Scale, seed: int) -> None:
    """Upload a file, wait until its lines are checked, and cancel the batch."""
    num_lines = max(1, scale.upload_bytes // _UPLOAD_LINE_BYTES)

    def lines() -> Iterator[bytes]:
        return long_lines(seed + 1, num_lines, num_bytes=_UPLOAD_LINE_BYTES)

    async with BatchClient(server.url) as client:
        batch_id = await client.create(await client.upload(lines))
        batch = await client.wait(batch_id, frozenset({"validating"}), _WAIT_S)
        if batch["status"] == "failed":
            raise RuntimeError(f"the upload was refused: {json.dumps(batch['errors'])[:300]}")
        with contextlib.suppress(aiohttp.ClientError):
            await client.cancel(batch_id)
        await client.wait(batch_id, OPEN_STATUSES, _WAIT_S)


async def _hang_disk(server: SoakedServer, scale: Scale, seed: int, span: Span) -> None:
    """The disk hangs while results of a batch are written and an upload is received."""
    num_upload_lines = max(1, scale.upload_bytes // _UPLOAD_LINE_BYTES)

    def results() -> Iterator[bytes]:
        for index in range(2000):
            yield batch_line(f"h-{index}", {"prompt": f"{seed} {index}", "max_tokens": 1})

    def uploaded() -> Iterator[bytes]:
        return long_lines(seed + 2, num_upload_lines, num_bytes=_UPLOAD_LINE_BYTES)

    async with BatchClient(server.url) as client:
        batch_id = await client.create(await client.upload(results))
        async with asyncio.timeout(_WAIT_S):
            while (await client.get(batch_id))["request_counts"]["completed"] == 0:
                await asyncio.sleep(0.1)
        await span.begin()
        upload = asyncio.create_task(client.upload(uploaded))
        await asyncio.sleep(0.2)
        calls_before = server.disk.num_calls
        server.disk.set(DiskMode.HANG)
        try:
            await asyncio.sleep(_HANG_S)
        finally:
            server.disk.set(DiskMode.PASS)
        if server.disk.num_calls == calls_before:
            raise RuntimeError("the server did not use its disk while the disk hung")
        await upload
        await span.end()
        await client.cancel(batch_id)
        await client.wait(batch_id, OPEN_STATUSES, _WAIT_S)


def long_lines(
    seed: int, num_lines: int, num_words: int | None = None, num_bytes: int = 0
) -> Iterator[bytes]:
    """Batch lines of about ``num_words`` words or ``num_bytes`` bytes, each with its own text."""
    text = text_of(random.Random(seed), num_words or num_bytes // 5)
    if num_words is None:
        text = text[: max(16, num_bytes - 150)]
    for index in range(num_lines):
        cut = index * 31 % len(text)
        body = {"prompt": f"{seed} {index} {text[cut:]} {text[:cut]}", "max_tokens": 8}
        yield batch_line(f"l-{index}", body)


def long_text_body(num_bytes: int, seed: int) -> bytes:
    """A completion whose prompt fills the body."""
    frame = json.dumps({"prompt": "", "max_tokens": 1})
    text = text_of(random.Random(seed), num_bytes // 5)[: num_bytes - len(frame)]
    return json.dumps({"prompt": text, "max_tokens": 1}).encode()


def many_messages_body(num_bytes: int) -> bytes:
    """A chat whose messages fill the body."""
    message = json.dumps({"role": "user", "content": "a"})
    count = (num_bytes - 100) // (len(message) + 1)
    return ('{"max_tokens": 1, "messages": [' + ",".join([message] * count) + "]}").encode()


async def _words_of(url: str, num_tokens: int) -> int:
    """The number of words of ``text_of`` that make ``num_tokens`` tokens."""
    text = text_of(random.Random(0), 1000)
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/tokenize", json={"prompt": text}) as response,
    ):
        response.raise_for_status()
        return max(1, num_tokens * 1000 // int((await response.json())["count"]))
