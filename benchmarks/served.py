"""Starts and ends a ``backfill serve`` for a benchmark."""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

from backfill.cli.own_server import server_environment
from backfill.models.resolve import resolve_model

HTTP_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 60.0
_SHOWN_BYTES = 4000
_PREFIX_HITS = re.compile(r"^backfill:\w*prefix\w*hits\w*_total(?:\{.*\})? (\S+)$", re.MULTILINE)


@contextlib.contextmanager
def served(
    *options: str, start_timeout_s: float = 300.0, environment: Mapping[str, str] | None = None
) -> Iterator[int]:
    """The port of a ready server, which ends with the context.

    The end of its stderr is shown when it does not start, and when the context fails.

    Raises: SystemExit when the server ends or is not ready within ``start_timeout_s``.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "stderr"
        command = [sys.executable, "-m", "backfill", "serve", "--port", str(port)]
        with log.open("wb") as stderr:
            server = subprocess.Popen(
                [*command, "--data-dir", f"{folder}/data", *options],
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env={**server_environment(), **(environment or {})},
            )
        try:
            wait_until_ready(server, port, start_timeout_s)
            yield port
        except BaseException:
            show_end_of(log)
            raise
        finally:
            stop(server)


@contextlib.contextmanager
def cache_without_profiles() -> Iterator[str]:
    """A cache folder of its own, with the user's models; the default one is fetched if it is not there."""
    models = resolve_model().parent.absolute()
    with tempfile.TemporaryDirectory() as cache:
        (Path(cache) / "models").symlink_to(models)
        yield cache


def wait_until_ready(server: subprocess.Popen[bytes], port: int, timeout_s: float) -> None:
    deadline_at_s = time.monotonic() + timeout_s
    while not is_ready(port):
        check_lives(server)
        if time.monotonic() >= deadline_at_s:
            raise SystemExit(f"backfill serve was not ready within {timeout_s:g} s")
        time.sleep(0.05)


def check_lives(server: subprocess.Popen[bytes]) -> None:
    """Raises: SystemExit when the server has ended."""
    if server.poll() is not None:
        raise SystemExit(f"backfill serve ended with {server.returncode}")


def stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        print(f"the server did not end within {_STOP_TIMEOUT_S:g} s of SIGTERM; killed", file=sys.stderr)
        server.kill()
        server.wait()


def show_end_of(log: Path) -> None:
    print(f"the end of the server's log:\n{end_of(log)}", file=sys.stderr, flush=True)


def end_of(log: Path) -> str:
    return log.read_bytes()[-_SHOWN_BYTES:].decode(errors="replace").strip() or "(nothing)"


def get(port: int, path: str) -> str:
    """The body of a GET. Raises: OSError, HTTPException."""
    url = f"http://127.0.0.1:{port}{path}"
    with urllib.request.urlopen(url, timeout=HTTP_TIMEOUT_S) as response:
        text: str = response.read().decode()
    return text


def check_no_prefix_hits(port: int) -> None:
    """Raises: SystemExit when the server has taken a prompt's KV from its cache, or does not say whether."""
    found = _PREFIX_HITS.findall(get(port, "/metrics"))
    if not found:
        raise SystemExit("the server exposes no counter of prefix hits: its figures may be those of a cache")
    if num_hits := sum(map(float, found)):
        raise SystemExit(
            f"{num_hits:.0f} prompt tokens came from the prefix cache: the figures would be the cache's"
        )


def is_ready(port: int) -> bool:
    try:
        get(port, "/health")
    except (OSError, http.client.HTTPException):  # URLError and timeouts are OSErrors
        return False
    return True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
