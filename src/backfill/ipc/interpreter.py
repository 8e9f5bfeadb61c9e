"""A bare Python interpreter as a child process, which is told later what to run."""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import pickle
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress

from backfill.core.heap import freeze_imports, pause_collection

# The child takes over its parent's ``sys.path``. ``-P`` keeps the working folder out until then.
_BOOTSTRAP = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from backfill.ipc.interpreter import run_child; run_child()"
)
_PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SET_PARENT_DEATH_SIGNAL = 1  # of prctl


class Interpreter:
    """A new interpreter, which ends when this process ends.

    It ignores SIGINT and SIGTERM: both may reach the whole process group, and the parent handles them.

    Args:
        name: shown in its command line.
        environment: added to this process's environment.
        pass_fds: file descriptors that it inherits, under the same numbers.
        modules: that it imports before its work comes, without garbage collection. The work meets the errors.

    Attributes:
        process: its own arguments end with the descriptor that it holds until it ends and its parent's id.
        sentinel: a file descriptor that becomes readable when the process ends, or writes why it is about to.

    Raises: OSError if no process can be created.
    """

    def __init__(
        self,
        name: str,
        environment: Mapping[str, str],
        pass_fds: Sequence[int] = (),
        modules: Sequence[str] = (),
    ) -> None:
        self.sentinel, held_by_child = os.pipe()
        os.set_blocking(self.sentinel, False)
        # Not at interpreter exit: callers that end the process then still wait on the descriptor.
        weakref.finalize(self, os.close, self.sentinel).atexit = False
        # Signals stay blocked until the child ignores them.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _PARENTS_SIGNALS)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOTSTRAP, name, str(held_by_child), str(os.getpid())],
                stdin=subprocess.PIPE,
                pass_fds=(held_by_child, *pass_fds),
                env={**os.environ, **environment},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.close(held_by_child)
        folders = [os.path.abspath(folder) for folder in sys.path]
        self._tell(pickle.dumps(folders) + pickle.dumps(tuple(modules)))

    def run(self, work: bytes) -> None:
        """Let it run ``target(*args)`` and end. Call it once. Args: work: ``(target, args)``, pickled."""
        self._tell(work)
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def end(self) -> None:
        """End it without work."""
        self.process.kill()
        self.process.communicate()

    def _tell(self, pickled: bytes) -> None:
        assert self.process.stdin is not None
        # The pipe breaks if the child has ended, which ``sentinel`` reports.
        with suppress(BrokenPipeError):
            self.process.stdin.write(pickled)
            self.process.stdin.flush()


def run_child() -> None:
    """Entry point of the new interpreter, which ends with its parent."""
    for number in _PARENTS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PARENTS_SIGNALS)
    set_of_process(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != int(sys.argv[-1]):  # the parent ended before the request took effect
        os._exit(1)
    _import(pickle.load(sys.stdin.buffer))
    try:
        target, args = pickle.load(sys.stdin.buffer)
    except EOFError:  # there is no work, where the system has no signal for the parent's end
        os._exit(1)
    target(*args)


def _import(modules: Sequence[str]) -> None:
    pause_collection()
    for name in modules:
        with suppress(Exception):
            importlib.import_module(name)
    freeze_imports()
    gc.enable()


def set_of_process(option: int, value: int | bytes) -> None:
    """An attribute of this process: prctl(2), where the system has it."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
