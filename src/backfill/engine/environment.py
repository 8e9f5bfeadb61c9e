"""Settings that libraries read from the environment when a process starts."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping

from backfill.kernels.isa import library_limits


def engine_environment(current: Mapping[str, str]) -> dict[str, str]:
    """Variables to add to ``current`` for a process that runs the model; those that are set already stay.

    - torch's waiting threads, which sample, go to sleep soon: by default they spin for milliseconds, also
      when our own threads (csrc/threads.h) or another process could use the processor.
    - malloc asks for huge pages. A step reads all weights and blocks scattered over the KV pool; with
      4 KiB pages much of its time goes to address translation.
    - Where a variant of the CPU kernels is chosen, torch's libraries keep to its instruction set.
    """
    settings = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", **library_limits(current)}
    if "OMP_WAIT_POLICY" not in current:
        settings["GOMP_SPINCOUNT"] = "2000"
    return {name: value for name, value in settings.items() if name not in current}


def restart_with(settings: Mapping[str, str]) -> None:
    """Execute this command again with ``settings`` in the environment; nothing if there are none."""
    if settings:
        # A Ctrl-C in between waits until the command can handle it (backfill/__main__.py).
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
        os.execve(
            sys.executable, [sys.executable, "-m", "backfill", *sys.argv[1:]], {**os.environ, **settings}
        )
