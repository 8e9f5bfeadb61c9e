"""A server whose every byte and pause is written down by the test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
)
END = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"

# Bytes are written, numbers are pauses in seconds.
Script = Sequence[bytes | float]


def event(data: Any) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def token(text: str = "x", finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})


def usage(tokens: int, prompt_tokens: int = 3) -> bytes:
    counts = {"completion_tokens": tokens, "prompt_tokens": prompt_tokens}
    return event({"choices": [], "usage": counts})


def part(payload: bytes) -> bytes:
    """One chunk of the transfer encoding."""
    return b"%x\r\n%s\r\n" % (len(payload), payload)


def streamed(*steps: bytes | float) -> Script:
    """A whole response: each payload a read of its own, where pauses part them."""
    return [HEAD, *(part(step) if isinstance(step, bytes) else step for step in steps), END]


def refusal(status: int, body: Any) -> Script:
    payload = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} No\r\nContent-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
    return [head.encode() + payload]


class ScriptedServer:
    """Answers the n-th request as ``answer(n, body)`` says and keeps the requests' bodies and headers."""

    def __init__(self, answer: Callable[[int, dict[str, Any]], Script]) -> None:
        self._answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.num_running = self.most_running = 0
        self.url = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[ScriptedServer]:
        self._server = await asyncio.start_server(self._handle, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            self.die()

    def die(self) -> None:
        self._server.close()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next(
                (
                    int(line.split(":")[1])
                    for line in head.splitlines()
                    if line.lower().startswith("content-length")
                ),
                0,  # a GET has none
            )
            body = json.loads(await reader.readexactly(length) or b"{}")
            self.heads.append(head)
            self.bodies.append(body)
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)
            for step in self._answer(len(self.bodies) - 1, body):
                if isinstance(step, bytes):
                    writer.write(step)
                    await writer.drain()
                else:
                    await asyncio.sleep(step)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.num_running -= 1
            writer.close()
