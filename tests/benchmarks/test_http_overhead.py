from __future__ import annotations

import asyncio

import http_overhead
import pytest

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def stream(*payloads: bytes) -> bytes:
    return HEAD + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in payloads) + b"0\r\n\r\n"


def read(response: bytes, num_tokens: int, size: int) -> float:
    """Read ``response``, sent ``size`` bytes at a time."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for start in range(0, len(response), size):
            writer.write(response[start : start + size])
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    async def run() -> float:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            return await http_overhead.read_stream(port, b"POST / HTTP/1.1\r\n\r\n", num_tokens)
        finally:
            server.close()

    return asyncio.run(run())


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10_000])
def test_events_are_counted_wherever_reads_and_chunks_end(size: int) -> None:
    tokens = b'data: {"text": "data: "}\n\n' * 3
    response = stream(tokens[:4], tokens[4:40], tokens[40:], b"data: [DO", b"NE]\n\n")
    assert read(response, 3, size) > 0
    with pytest.raises(SystemExit, match="a stream ended after 3 events of 4"):
        read(response, 4, size)


def test_a_stream_without_its_end_and_a_refusal_are_failures() -> None:
    with pytest.raises(SystemExit, match="after 1 events"):
        read(stream(b"data: 1\n\n"), 1, 100)
    with pytest.raises(asyncio.IncompleteReadError):
        read(stream(b"data: 1\n\n")[:-4], 1, 100)
    with pytest.raises(SystemExit, match=r"not a stream: HTTP/1\.1 429"):
        read(b"HTTP/1.1 429 No\r\nContent-Length: 4\r\n\r\nbusy", 1, 100)
