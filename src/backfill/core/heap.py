"""The heap of a serving process."""

from __future__ import annotations

import ctypes
import gc
import sys


def pause_collection() -> None:
    """Put garbage collection off until ``freeze_heap``: what is loaded stays (torch's import: 0.1 s)."""
    gc.disable()


def freeze_imports() -> None:
    """Exclude what has been imported from garbage collection, without looking for garbage in it (0.5 MiB).

    A full collection visits every object; those of the imported libraries alone pause the process for 150 ms.
    """
    gc.freeze()


def freeze_heap() -> None:
    """Exclude all present objects from garbage collection, and go on with it. Call once all is loaded."""
    gc.collect()
    gc.freeze()
    gc.enable()


def trim_heap() -> None:
    """Give freed memory back to the system: what packing weights has left, which malloc keeps (glibc)."""
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries do not have it
        if trim is not None:
            trim(0)
