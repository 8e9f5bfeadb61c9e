"""What HTTP costs: 32 concurrent streams through the server, against the same work in one process.

Both run 32 prompts of 256 random tokens, 128 new tokens each, alternating for several rounds. The client is
a bare asyncio reader, so that it takes little of the processors it shares with the engine.

The client's time to first token is compared with the server's own, from ``/metrics``. The client's clock
starts before it writes a request's first byte, with the connection open and the body encoded, and stops when
it has read the first event. It includes sending, the server's reading and checking of the body, queue,
prefill, the event, and the work of both event loops for the other streams. The server's clock starts when it
receives the first byte, and stops when it has written the first event.

Usage: http_overhead.py [--rounds 3] [--streams 32]. The last line of output is a JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator

from served import check_no_prefix_hits, get, served

from backfill.bench.client import SseDecoder

INPUT_LEN, OUTPUT_LEN = 256, 128
STREAM_S = 600.0  # longest time of a stream, and of the run in one process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=32)
    args = parser.parse_args()
    rounds = [measure(args.streams, seed) for seed in range(args.rounds)]
    result = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
    for key, value in result.items():
        print(f"{key:24s} {value:10.3f}   (rounds: {', '.join(f'{r[key]:.3f}' for r in rounds)})")
    result |= {"rounds": args.rounds, "streams": args.streams}
    print(json.dumps({"benchmark": "http_overhead", **result}))


def measure(num_streams: int, seed: int) -> dict[str, float]:
    command = [sys.executable, "-m", "backfill", "bench", "throughput"]
    lengths = f"--input-len {INPUT_LEN} --output-len {OUTPUT_LEN}".split()
    work = [*lengths, "--num-prompts", str(num_streams), "--seed", str(seed)]
    done = subprocess.run([*command, *work], capture_output=True, text=True, check=False, timeout=STREAM_S)
    if done.returncode != 0:
        raise SystemExit(f"bench throughput failed ({done.returncode}):\n{done.stderr[-2000:]}")
    in_process = json.loads(done.stdout.splitlines()[-1])["total_tok_s"]
    with served() as port:
        asyncio.run(run_streams(port, 2, 8, seed + 1000))  # warm-up
        before = ttft_totals(port)
        elapsed_s, client_ttft_s = asyncio.run(run_streams(port, num_streams, OUTPUT_LEN, seed))
        after = ttft_totals(port)
        check_no_prefix_hits(port)
    over_http = num_streams * (INPUT_LEN + OUTPUT_LEN) / elapsed_s
    server_ttft_s = (after[0] - before[0]) / (after[1] - before[1])
    return {
        "in_process_tok_s": in_process,
        "http_tok_s": over_http,
        "http_over_in_process": over_http / in_process,
        "client_ttft_s": statistics.mean(client_ttft_s),
        "server_ttft_s": server_ttft_s,
        "ttft_added_s": statistics.mean(client_ttft_s) - server_ttft_s,
    }


async def run_streams(port: int, num_streams: int, num_tokens: int, seed: int) -> tuple[float, list[float]]:
    """Seconds until every stream ended, and each one's time to its first event."""
    generator = random.Random(seed)
    requests = [
        completion_request(
            [generator.randrange(1000, 40000) for _ in range(INPUT_LEN)], max_tokens=num_tokens
        )
        for _ in range(num_streams)
    ]
    started_at_s = time.perf_counter()
    async with asyncio.timeout(STREAM_S):
        ttfts = await asyncio.gather(*(read_stream(port, request, num_tokens) for request in requests))
    return time.perf_counter() - started_at_s, list(ttfts)


def completion_request(prompt: list[int], max_tokens: int) -> bytes:
    body = json.dumps(
        {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


async def read_stream(port: int, request: bytes, num_tokens: int) -> float:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        sent_at_s = time.perf_counter()
        writer.write(request)
        first_at_s, num_events, ended = 0.0, 0, False
        decoder = SseDecoder()
        async for data in body_parts(reader):
            for event in decoder.feed(data):
                first_at_s = first_at_s or time.perf_counter()
                ended = ended or event == b"[DONE]"
                num_events += event != b"[DONE]"
    finally:
        writer.close()
    if not ended or num_events < num_tokens:
        raise SystemExit(f"a stream ended after {num_events} events of {num_tokens}")
    return first_at_s - sent_at_s


async def body_parts(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The chunks of a response in chunked transfer encoding.

    Raises: SystemExit for another response, IncompleteReadError when the connection ends before it.
    """
    head = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n", 1)[0] or b"transfer-encoding: chunked" not in head.lower():
        rest = await reader.read(2000)
        raise SystemExit(f"not a stream: {(head + rest).decode(errors='replace')}")
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]


def ttft_totals(port: int) -> tuple[float, float]:
    """Sum and count of the server's time-to-first-token histogram."""
    text = get(port, "/metrics")
    prefix = 'backfill:time_to_first_token_seconds_{}{{class="online"'
    totals = []
    for part in ("sum", "count"):
        line = next(line for line in text.splitlines() if line.startswith(prefix.format(part)))
        totals.append(float(line.rsplit(" ", 1)[1]))
    return totals[0], totals[1]


if __name__ == "__main__":
    main()
