"""Two probes of a server in a process of their own: ``/health`` 100 times a second, and one stream.

Usage: soak_probe.py PORT FILE. Until it is terminated it appends JSON lines to FILE, times in seconds of the
monotonic clock, which all processes share:

    ["health", sent_at_s, took_s, status]   status 0: no answer
    ["late", at_s, late_s]                  how late this process sent: how busy the machine is
    ["token", stream, at_s]                 an event of the stream arrived
    ["stream", stream, started_at_s, ended_at_s, outcome]

Requests are sent without waiting for answers, so a stalled server gets as many as any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import sys
import time
from typing import IO

from http_overhead import body_parts, completion_request

from backfill.bench.client import SseDecoder

HEALTH_PER_S = 100
_TIMEOUT_S = 60.0
_MAX_OPEN = 2000  # unanswered requests
_STREAM_TOKENS = 200
_PROMPT_TOKENS = 32
_REQUEST = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class HealthProbe:
    """Sends at a steady rate; each unanswered request has a connection of its own."""

    def __init__(self, port: int, out: IO[str]) -> None:
        self._port = port
        self._out = out
        self._idle: list[Connection] = []
        self._open: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        next_at_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            record(self._out, "late", next_at_s, now_s - next_at_s)
            if len(self._open) < _MAX_OPEN:
                task = asyncio.create_task(self._ask())
                self._open.add(task)
                task.add_done_callback(self._open.discard)
            next_at_s = max(next_at_s + 1 / HEALTH_PER_S, now_s)
            await asyncio.sleep(next_at_s - time.monotonic())

    async def _ask(self) -> None:
        sent_at_s, status = time.monotonic(), 0
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
            async with asyncio.timeout(_TIMEOUT_S):
                status = await self._status()
        record(self._out, "health", sent_at_s, time.monotonic() - sent_at_s, status)

    async def _status(self) -> int:
        if self._idle:
            connection = self._idle.pop()
        else:
            connection = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = connection
        try:
            writer.write(_REQUEST)
            head = await reader.readuntil(b"\r\n\r\n")
            for line in head.lower().split(b"\r\n"):
                if line.startswith(b"content-length:"):
                    await reader.readexactly(int(line.partition(b":")[2]))
        except BaseException:
            writer.close()
            raise
        self._idle.append(connection)
        return int(head.split(b" ", 2)[1])


async def probe_stream(port: int, out: IO[str]) -> None:
    """One small stream after another."""
    for stream in itertools.count(os.getpid() * 1_000_000):  # unique over all probes
        started_at_s, outcome = time.monotonic(), "ended"
        try:
            await _read_stream(port, out, stream)
        except (OSError, asyncio.IncompleteReadError, SystemExit) as error:
            outcome = type(error).__name__
            await asyncio.sleep(0.2)
        record(out, "stream", stream, started_at_s, time.monotonic(), outcome)


async def _read_stream(port: int, out: IO[str], stream: int) -> None:
    generator = random.Random(stream)
    prompt = [generator.randrange(1000, 40_000) for _ in range(_PROMPT_TOKENS)]  # computed, never cached
    async with asyncio.timeout(_TIMEOUT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(completion_request(prompt, max_tokens=_STREAM_TOKENS))
            decoder = SseDecoder()
            async for data in body_parts(reader):
                for _ in decoder.feed(data):
                    record(out, "token", stream, time.monotonic())
        finally:
            writer.close()


def record(out: IO[str], *fields: object) -> None:
    out.write(json.dumps(fields) + "\n")


async def main(port: int, path: str) -> None:
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)  # a probe without a processor would measure the machine
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    with open(path, "a") as out:
        probes = [HealthProbe(port, out).run(), probe_stream(port, out)]
        tasks = [asyncio.create_task(probe) for probe in probes]
        stopped = asyncio.create_task(stop.wait())
        done, _ = await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in done - {stopped}:
            task.result()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
