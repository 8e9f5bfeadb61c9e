"""A ``backfill serve`` of its own for the benchmarks that need one."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator


@contextlib.contextmanager
def served(*options: str) -> Iterator[int]:
    """The port of a server that is ready; it ends with the context."""
    port = free_port()
    with tempfile.TemporaryDirectory() as data_dir:
        server = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "backfill",
                "serve",
                "--port",
                str(port),
                "--data-dir",
                data_dir,
                *options,
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            while not is_ready(port):
                if server.poll() is not None:
                    raise SystemExit(f"backfill serve ended with {server.returncode}")
                time.sleep(0.05)
            yield port
        finally:
            server.terminate()
            server.wait()


def is_ready(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health")
        return True
    except (urllib.error.URLError, ConnectionError):
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
