"""What HTTP costs: 32 concurrent streams through the server, against the same work in one process.

Both run 32 prompts of 256 random tokens, 128 new tokens each, alternately for several rounds. The client
is a bare asyncio reader, so that it takes little of the processors it shares with the engine. The
client's time to first token is compared with the server's own, from ``/metrics``.

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
import urllib.request

from served import served

INPUT_LEN, OUTPUT_LEN = 256, 128


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
    done = subprocess.run([*command, *work], capture_output=True, text=True, check=True)
    in_process = json.loads(done.stdout.splitlines()[-1])["total_tok_s"]
    with served() as port:
        asyncio.run(run_streams(port, 2, 8, seed + 1000))  # warm-up
        before = ttft_totals(port)
        elapsed_s, client_ttft_s = asyncio.run(run_streams(port, num_streams, OUTPUT_LEN, seed))
        after = ttft_totals(port)
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
    prompts = [[generator.randrange(1000, 40000) for _ in range(INPUT_LEN)] for _ in range(num_streams)]
    started_at_s = time.perf_counter()
    ttfts = await asyncio.gather(*(read_stream(port, prompt, num_tokens) for prompt in prompts))
    return time.perf_counter() - started_at_s, list(ttfts)


async def read_stream(port: int, prompt: list[int], num_tokens: int) -> float:
    body = json.dumps(
        {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sent_at_s = time.perf_counter()
    writer.write(head.encode() + body)
    first_at_s, num_events, ended = 0.0, 0, False
    while data := await reader.read(65536):
        if first_at_s == 0.0 and b"data: " in data:
            first_at_s = time.perf_counter()
        num_events += data.count(b"data: ")
        ended = ended or b"[DONE]" in data
    writer.close()
    if not ended or num_events < num_tokens:
        raise SystemExit(f"a stream ended after {num_events} events of {num_tokens}")
    return first_at_s - sent_at_s


def ttft_totals(port: int) -> tuple[float, float]:
    """Sum and count of the server's time-to-first-token histogram."""
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    prefix = 'backfill:time_to_first_token_seconds_{}{{class="online"'
    totals = []
    for part in ("sum", "count"):
        line = next(line for line in text.splitlines() if line.startswith(prefix.format(part)))
        totals.append(float(line.rsplit(" ", 1)[1]))
    return totals[0], totals[1]


if __name__ == "__main__":
    main()
