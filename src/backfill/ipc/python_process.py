"""A child process that runs one function, without the caller's main module.

``multiprocessing`` runs the caller's main module again in every process that it spawns. A script without a
``__main__`` guard would then start an engine in each engine, and a script from standard input has no file to
run again. This module starts a bare interpreter instead.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from backfill.ipc.interpreter import Interpreter, set_of_process

_REAP_S = 2.0  # a process closes its end of the sentinel a moment before it can be reaped
_SET_NAME = 15  # of prctl
_MAX_LAST_WORDS = 4096  # bytes: a pipe takes so many at once


class PythonProcess:
    """Runs ``target(*args)`` in a new interpreter, which ends when this process ends.

    Args:
        name, environment, pass_fds: of the ``Interpreter``.
        target: a function at module level; pickled by name.
        interpreter: one that waits for its work, instead of a new one.

    Attributes:
        sentinel: once started, a file descriptor that becomes readable when the process ends, or says why it
            is about to (``say_last_words``).
    """

    def __init__(
        self,
        name: str,
        target: Callable[..., None],
        args: tuple[Any, ...],
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        interpreter: Interpreter | None = None,
    ) -> None:
        self._name = name
        self._pass_fds = tuple(pass_fds)
        self._work = (target, args)
        self._environment = environment or {}
        self._interpreter = interpreter
        self._process: subprocess.Popen[bytes] | None = None
        self._last_words = b""
        self.sentinel = -1

    def start(self) -> None:
        """Raises: OSError if no process can be created."""
        work = pickle.dumps(self._work)  # what cannot be pickled starts no process
        if self._interpreter is None:
            self._interpreter = Interpreter(self._name, self._environment, self._pass_fds)
        interpreter = self._interpreter  # kept: it closes the sentinel
        self._process, self.sentinel = interpreter.process, interpreter.sentinel
        interpreter.run(work)

    @property
    def pid(self) -> int | None:
        """None before it is started."""
        return None if self._process is None else self._process.pid

    @property
    def exitcode(self) -> int | None:
        """None until it has ended; negative if a signal ended it."""
        return None if self._process is None else self._process.poll()

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def how_it_ended(self) -> str:
        """For messages that begin with its name; once it has ended, also with its exit code."""
        code = self.exitcode
        if code is None:
            return "has not ended"
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"

    @property
    def last_words(self) -> str:
        """Why it ended, if it has said so. Known after ``wait``."""
        return self._last_words.decode(errors="replace")

    def kill(self) -> None:
        """Kill it without waiting for its end."""
        if self._process is not None:
            self._process.kill()

    def join(self, timeout_s: float) -> None:
        """Wait until it has ended, or for ``timeout_s``."""
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)

    async def wait(self, timeout_s: float | None = None) -> None:
        """Return once it has ended, or after ``timeout_s``. Several tasks may wait."""
        if self._process is None:
            return
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        sentinel = os.dup(self.sentinel)  # a loop has one callback for a descriptor

        def read() -> None:
            with suppress(BlockingIOError):  # another task has read it
                words = os.read(sentinel, _MAX_LAST_WORDS)
                self._last_words += words
                if not words:
                    ended.set()

        loop.add_reader(sentinel, read)
        try:
            await asyncio.wait_for(ended.wait(), timeout_s)
            self.join(_REAP_S)
        except TimeoutError:
            pass
        finally:
            loop.remove_reader(sentinel)
            os.close(sentinel)

    async def end(self, timeout_s: float) -> None:
        """Ask it to end by SIGTERM, and kill it if it has not after ``timeout_s``."""
        if self._process is None:
            return
        self._process.terminate()
        await self.wait(timeout_s)
        self.kill()
        self.join(_REAP_S)


def name_process(name: str) -> None:
    """As ``ps`` and ``top`` show it; at most 15 characters."""
    set_of_process(_SET_NAME, name.encode())


def say_last_words(message: str) -> None:
    """In a child that is about to end: tell its parent why."""
    with suppress(OSError):  # the parent has ended
        os.write(int(sys.argv[-2]), message.encode()[:_MAX_LAST_WORDS])


def is_running(pid: int) -> bool:
    """Whether a process, which need not be a child, has not ended.

    One that nobody has waited for yet has ended, where ``/proc`` says so.
    """
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # another user's
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return True  # it ends just now, or there is no /proc
    return state not in (b"Z", b"X")
