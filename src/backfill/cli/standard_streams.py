"""Standard streams that the caller has closed, or that cannot be written."""

from __future__ import annotations

import os
import sys


def open_standard_streams() -> None:
    """Give the null device to those that are closed.

    Else the next file would get the descriptor, and with it what a library writes to standard error.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest that is free
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def print_if_read(text: str) -> None:
    """Print to standard output, and from now on nothing where nobody reads it or its disk is full."""
    try:
        print(text, flush=True)
    except OSError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
