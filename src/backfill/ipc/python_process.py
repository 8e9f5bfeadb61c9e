"""A child process that runs one function, without the caller's main module.

``multiprocessing`` runs the caller's main module again in every process that it spawns. A script without a
``__main__`` guard would then start an engine in each engine, and a script from standard input has no file to
run again. This module starts a bare interpreter instead.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

# The child takes over its parent's ``sys.path``. ``-P`` keeps the working folder out until then.
_BOOTSTRAP = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from backfill.ipc.python_process import run_child; run_child()"
)
_PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class PythonProcess:
    """Runs ``target(*args)`` in a new interpreter, which ends when this process ends.

    The child ignores SIGINT and SIGTERM: both may reach the whole process group, and the parent handles them.

    Args:
        name: shown in its command line.
        target: a function at module level; pickled by name.
        environment: added to this process's environment.
        pass_fds: file descriptors that it inherits, under the same numbers.

    Attributes:
        sentinel: once started, a file descriptor that becomes readable when the process ends.
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
        self.sentinel = -1

    def start(self) -> None:
        """Raises: OSError if no process can be created."""
        setup = pickle.dumps([os.path.abspath(folder) for folder in sys.path]) + pickle.dumps(self._work)
        self.sentinel, held_by_child = os.pipe()
        # Not at interpreter exit: callers that end the process then still wait on the descriptor.
        weakref.finalize(self, os.close, self.sentinel).atexit = False
        # Signals stay blocked until the child ignores them.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _PARENTS_SIGNALS)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOTSTRAP, self._name, str(os.getpid())],
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

    def kill(self) -> None:
        """Kill it without waiting for its end."""
        if self._process is not None:
            self._process.kill()

    def join(self, timeout_s: float) -> None:
        """Wait until it has ended, or for ``timeout_s``."""
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)


def run_child() -> None:
    """Entry point of the new interpreter, which ends with its parent.

    Its last argument is its parent's process id.
    """
    for number in _PARENTS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PARENTS_SIGNALS)
    if sys.platform.startswith("linux"):
        set_parent_death_signal = 1
        ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != int(sys.argv[-1]):  # the parent ended before the request took effect
            os._exit(1)
    target, args = pickle.load(sys.stdin.buffer)
    target(*args)
