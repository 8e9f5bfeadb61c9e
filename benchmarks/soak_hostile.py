"""Hostile clients of the soak: they stall, leave, and send bad requests.

Each is a function that opens one connection to the server and returns how it was answered.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Awaitable, Callable

from soak_load import Outcomes

_STALLS_S = (5.0, 20.0, 120.0)
_ANSWER_TIMEOUT_S = 60.0
_HELD_S = 15.0  # how long the slow clients keep a connection
_PAUSE_S = 1.0

Client = Callable[[int, random.Random], Awaitable[str]]


def _head(path: str, length: int, *more: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", *more]
    return "\r\n".join([*lines, f"Content-Length: {length}", "Connection: close", "", ""]).encode()


def _stream_body(max_tokens: int) -> bytes:
    body = {"prompt": "Once upon a time", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    return json.dumps(body).encode()


async def _connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)


def _status_of(received: bytes) -> str:
    """The status code of a response's first line; empty where the connection was closed."""
    words = received.split(b" ", 2)
    return words[1].decode(errors="replace") if len(words) > 1 else ""


async def _refused(port: int, head: bytes, body: bytes = b"") -> str:
    """``ok`` when the server answers with a 4xx or closes the connection, else the status."""
    reader, writer = await _connect(port)
    try:
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            try:
                writer.write(head)
                for start in range(0, len(body), 1 << 16):
                    writer.write(body[start : start + (1 << 16)])
                    await writer.drain()
                status = _status_of(await reader.readline())
            except ConnectionError:
                return "ok"  # closed while sending
        return "ok" if not status or status.startswith("4") else f"status {status}"
    finally:
        writer.close()


async def leave_mid_stream(port: int, generator: random.Random) -> str:
    """Asks for a long stream and closes the connection after a few events."""
    reader, writer = await _connect(port)
    body = _stream_body(1000)
    try:
        writer.write(_head("/v1/completions", len(body)) + body)
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            status = _status_of(await reader.readline())
            for _ in range(generator.randint(1, 12)):
                if not await reader.readline():
                    break
    finally:
        writer.transport.abort()
    return "ok" if status == "200" else f"status {status}"


async def stall_mid_stream(port: int, generator: random.Random) -> str:
    """Asks for a long stream with many logprobs, reads a little, then nothing for a while."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    body = json.dumps({**json.loads(_stream_body(1000)), "logprobs": 5, "n": 4, "temperature": 1}).encode()
    try:
        await loop.sock_connect(connection, ("127.0.0.1", port))
        await loop.sock_sendall(connection, _head("/v1/completions", len(body)) + body)
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            status = _status_of(await loop.sock_recv(connection, 1024))
        if status == "200":
            await asyncio.sleep(generator.choice(_STALLS_S))
    finally:
        connection.close()
    return "ok" if status == "200" else f"status {status}"


async def malformed_json(port: int, generator: random.Random) -> str:
    body = generator.choice([b'{"prompt": "x', b"[1, 2", b"\xff\xfe\x00", b"{" * 5000, b"nul", b""])
    return await _refused(port, _head("/v1/completions", len(body)), body)


async def wrong_types(port: int, generator: random.Random) -> str:
    choices: list[dict[str, object]] = [
        {"prompt": 7},
        {"prompt": "x", "max_tokens": "many"},
        {"prompt": "x", "temperature": -1},
        {"prompt": [["a"], {"b": 1}]},
        {"prompt": "x", "n": 10**9},
        {"prompt": "x", "stop": [1, None]},
        {"prompt": "x", "logit_bias": {"-1": 1e99}},
    ]
    body = json.dumps(generator.choice(choices)).encode()
    return await _refused(port, _head("/v1/completions", len(body)), body)


async def announced_too_large(port: int, generator: random.Random) -> str:
    return await _refused(port, _head("/v1/completions", 10**12))


async def sent_too_large(port: int, generator: random.Random) -> str:
    """A body over any limit, in chunks, so that no header announces its size."""
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return await _refused(port, head + b"Transfer-Encoding: chunked\r\n\r\n", chunk * 1000)


async def huge_headers(port: int, generator: random.Random) -> str:
    """6 MB of headers."""
    more = "\r\n".join(f"x-{index}: {'y' * 1000}" for index in range(6000))
    body = b'{"prompt": 7}'
    return await _refused(port, _head("/v1/completions", len(body), more), body)


async def slow_head(port: int, generator: random.Random) -> str:
    """A byte of the head every half second, for ``_HELD_S``."""
    reader, writer = await _connect(port)
    answer = asyncio.create_task(reader.read(1))
    try:
        for byte in _head("/v1/completions", 2)[: int(_HELD_S * 2)]:
            writer.write(bytes([byte]))
            await asyncio.wait({answer}, timeout=0.5)
            if answer.done():
                break
    finally:
        answer.cancel()
        writer.close()
    return "ok"


async def slow_body(port: int, generator: random.Random) -> str:
    """Half a body, then silence."""
    reader, writer = await _connect(port)
    try:
        writer.write(_head("/v1/completions", 1000) + b'{"prompt": "')
        async with asyncio.timeout(_HELD_S):
            await reader.read(1)
    except TimeoutError:
        pass
    finally:
        writer.close()
    return "ok"


CLIENTS: tuple[Client, ...] = (
    leave_mid_stream,
    stall_mid_stream,
    malformed_json,
    wrong_types,
    announced_too_large,
    sent_too_large,
    huge_headers,
    slow_head,
    slow_body,
)


async def harass(port: int, outcomes: Outcomes, seed: int) -> None:
    """Run one client of each kind repeatedly until cancelled."""

    async def repeat(client: Client) -> None:
        generator = random.Random(f"{seed} {client.__name__}")
        while True:
            await outcomes.note(client.__name__, lambda: client(port, generator))
            await asyncio.sleep(generator.expovariate(1 / _PAUSE_S))

    async with asyncio.TaskGroup() as group:
        for client in CLIENTS:
            group.create_task(repeat(client))
