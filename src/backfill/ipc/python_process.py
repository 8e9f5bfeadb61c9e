"""A child process that runs one function, without the caller's main module.

``multiprocessing`` runs the caller's main module again in every process that it spawns. A script without a
``__main__`` guard would then start an engine in each engine, and a script from standard input has no file to
run again. This module starts a bare interpreter instead.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import pickle
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

# The child takes over its parent's ``sys.path``. ``-P`` keeps the working folder out until then.
_BOOTSTRAP = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from backfill.ipc.python_process import run_child; run_child()"
)
_PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_REAP_S = 2.0  # a process closes its end of the sentinel a moment before it can be reaped
_SET_PARENT_DEATH_SIGNAL, _SET_NAME = 1, 15  # of prctl
_MAX_LAST_WORDS = 4096  # bytes: a pipe takes so many at once


class PythonProcess:
    """Runs ``target(*args)`` in a new interpreter, which ends when this process ends.

    The child ignores SIGINT and SIGTERM: both may reach the whole process group, and the parent handles them.

    Args:
        name: shown in its command line.
        target: a function at module level; pickled by name.
        environment: added to this process's environment.
        pass_fds: file descriptors that it inherits, under the same numbers.

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
    ) -> None:
        self._name = name
        self._pass_fds = tuple(pass_fds)
        self._work = (target, args)
        self._environment = environment or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._last_words = b""
        self.sentinel = -1

    def start(self) -> None:
        """Raises: OSError if no process can be created."""
        setup = pickle.dumps([os.path.abspath(folder) for folder in sys.path]) + pickle.dumps(self._work)
        self.sentinel, held_by_child = os.pipe()
        os.set_blocking(self.sentinel, False)
        # Not at interpreter exit: callers that end the process then still wait on the descriptor.
        weakref.finalize(self, os.close, self.sentinel).atexit = False
        # Signals stay blocked until the child ignores them.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _PARENTS_SIGNALS)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOTSTRAP, self._name, str(held_by_child), str(os.getpid())],
                stdin=subprocess.PIPE,
                pass_fds=(held_by_child, *self._pass_fds),
                env={**os.environ, **self._environment},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.close(held_by_child)
        assert self._process.stdin is not None
        # The pipe breaks if the child has ended, which ``sentinel`` reports.
        with suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(setup)

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


def run_child() -> None:
    """Entry point of the new interpreter, which ends with its parent.

    Its last arguments are the descriptor that it holds until it ends, and its parent's process id.
    """
    for number in _PARENTS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PARENTS_SIGNALS)
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != int(sys.argv[-1]):  # the parent ended before the request took effect
        os._exit(1)
    target, args = pickle.load(sys.stdin.buffer)
    target(*args)


def name_process(name: str) -> None:
    """As ``ps`` and ``top`` show it; at most 15 characters."""
    _prctl(_SET_NAME, name.encode())


def _prctl(option: int, value: int | bytes) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


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
