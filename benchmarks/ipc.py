"""What sending a step report to the serving process costs: encoding, ZeroMQ, decoding.

``measure_ipc`` uses the sockets, transport and codec of ``backfill.engine``. The other end is this file as a
program, ``ipc.py REQUESTS_URL ANSWERS_URL``, which returns every message until it receives an empty one.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import msgspec
import zmq

from backfill.engine.messages import FromEngine, StepReport

_TIMEOUT_MS = 30_000


def measure_ipc(report: StepReport, repeats: int = 2000) -> dict[str, float]:
    """Medians over ``repeats`` of ``encode_s``, ``decode_s`` and ``round_trip_s``; and ``num_bytes``."""
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(FromEngine)
    message = encoder.encode(report)
    assert decoder.decode(message) == report
    return {
        "encode_s": median_s(lambda: encoder.encode(report), repeats),
        "decode_s": median_s(lambda: decoder.decode(message), repeats),
        "round_trip_s": round_trip_s(message, repeats),
        "num_bytes": len(message),
    }


def median_s(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        started_at_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - started_at_s)
    return statistics.median(times)


def round_trip_s(message: bytes, repeats: int) -> float:
    """Median seconds until another process has returned ``message``.

    Raises: RuntimeError after 30 s without an answer.
    """
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context:
        urls = [f"ipc://{folder}/{name}" for name in ("requests", "answers")]
        with context.socket(zmq.PUSH) as requests, context.socket(zmq.PULL) as answers:
            for socket, url in ((requests, urls[0]), (answers, urls[1])):
                socket.set_hwm(0)
                socket.setsockopt(zmq.LINGER, 1000)
                socket.bind(url)
            other = subprocess.Popen([sys.executable, __file__, *urls])
            try:

                def trip() -> None:
                    requests.send(message)
                    if not answers.poll(_TIMEOUT_MS):
                        raise RuntimeError(f"no answer; the other process has ended with {other.poll()}")
                    assert len(answers.recv()) == len(message)

                trip()  # waits for the process to start
                result = median_s(trip, repeats)
                requests.send(b"")
                other.wait(_TIMEOUT_MS / 1000)
            finally:
                other.kill()
                other.wait()
    return result


def send_back(requests_url: str, answers_url: str) -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as requests, context.socket(zmq.PUSH) as answers:
        for socket, url in ((requests, requests_url), (answers, answers_url)):
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 1000)
            socket.connect(url)
        while message := requests.recv():
            answers.send(message)


if __name__ == "__main__":
    send_back(*sys.argv[1:])
