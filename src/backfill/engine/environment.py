"""Settings that libraries read from the environment when a process starts."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping

from backfill.kernels.isa import library_limits


def engine_environment(current: Mapping[str, str]) -> dict[str, str]:
    """What to add to ``current`` for a process that runs the model; what is set already stays.

    - OpenMP threads that wait sleep soon. By default they spin for milliseconds: when another process
      wants the processor, each of a step's hundreds of barriers then costs a time slice (measured: 8
      tokens/s where this gives 32). Spinning briefly costs nothing on an idle machine, unlike not
      spinning at all.
    - malloc asks for huge pages. A step reads all weights and blocks scattered over the KV pool; with
      4 KiB pages a good part of its time goes to address translation.
    - Where a variant of the CPU kernels is chosen, torch's libraries keep to its instruction set.
    """
    settings = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", **library_limits(current)}
    if "OMP_WAIT_POLICY" not in current:
        settings["GOMP_SPINCOUNT"] = "500"
    return {name: value for name, value in settings.items() if name not in current}


def restart_with(settings: Mapping[str, str]) -> None:
    """Begin this command anew with ``settings`` in the environment; none is no restart."""
    if settings:
        # A Ctrl-C meanwhile waits until the command can handle it (backfill/__main__.py).
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
        os.execve(
            sys.executable, [sys.executable, "-m", "backfill", *sys.argv[1:]], {**os.environ, **settings}
        )
