"""A ``backfill serve`` that a command starts and ends."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from backfill.core.errors import BackfillError
from backfill.router.replicas import free_port

_POLL_S = 0.1
_END_TIMEOUT_S = 20.0
_KEPT_VARIABLES = ("BACKFILL_CACHE_ROOT", "BACKFILL_CPU_ISA")
# The server is on this machine: no proxy of the environment is asked.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerFailed(BackfillError):
    """The server did not start, or it ended by itself."""


@dataclass(frozen=True, slots=True)
class OwnServer:
    """A running server.

    Attributes:
        url: scheme, host and port.
        log: file with its output.
    """

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    @property
    def exit_status(self) -> int | None:
        """None while it runs."""
        return self.process.poll()

    def last_lines(self, count: int) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()[-count:]

    def wait_until_ready(self, timeout_s: float) -> None:
        """Raises: ServerFailed when it ends first, or takes longer."""
        deadline_at = time.monotonic() + timeout_s
        while not self._answers():
            if self.exit_status is not None:
                reason = next(iter(self.last_lines(1)), "it printed nothing").removeprefix("backfill: ")
                raise ServerFailed(f"The server ended with status {self.exit_status}: {reason}")
            if time.monotonic() > deadline_at:
                raise ServerFailed(f"The server was not ready within {timeout_s:g} s.")
            time.sleep(_POLL_S)

    def end(self) -> None:
        """End the process, by force if it does not end in time."""
        self.process.terminate()
        try:
            self.process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _answers(self) -> bool:
        try:
            with _OPENER.open(f"{self.url}/health", timeout=5.0):
                return True
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False


@contextlib.contextmanager
def own_server(model: str, options: Sequence[str], log: Path) -> Iterator[OwnServer]:
    """A server on a free port with a temporary data folder; it ends with the context.

    It may not be ready yet (``wait_until_ready``).
    """
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="backfill-data-") as data_dir, log.open("wb") as output:
        command = [sys.executable, "-m", "backfill", "serve", model, "--port", str(port)]
        process = subprocess.Popen(
            [*command, "--data-dir", data_dir, *options],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=server_environment(),
            start_new_session=True,  # Ctrl-C is for the command, which ends its server itself
        )
        server = OwnServer(process, f"http://127.0.0.1:{port}", log)
        try:
            yield server
        finally:
            server.end()


def server_environment() -> dict[str, str]:
    """This process's environment without options of ``serve``: only the flags decide what is measured."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("BACKFILL_") or name in _KEPT_VARIABLES
    }
