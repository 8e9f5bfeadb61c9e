"""What Ctrl-C does to a command: one line at most, and exit status 130.

While a command loads, Ctrl-C ends the process at once: nothing is open that has to be closed, and an
exception would come out of an import as another error, or not at all. Where there is something to close,
``interruptible`` raises KeyboardInterrupt instead; event loops have handlers of their own.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_STATUS = 128 + signal.SIGINT
LOADING = "stopped while loading"


def exit_at_once(number: int, frame: FrameType | None) -> None:
    """Signal handler."""
    os.write(2, f"backfill: {LOADING}\n".encode())
    os._exit(EXIT_STATUS)


def exit_silently(number: int, frame: FrameType | None) -> None:
    """Signal handler, for a command that has said what there was to say."""
    os._exit(EXIT_STATUS)


@contextmanager
def interruptible(message: str = "interrupted") -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt in the block, and ends the command with a message after it.

    Raises: SystemExit.
    """
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        print(f"backfill: {message}", file=sys.stderr)
        raise SystemExit(EXIT_STATUS) from None
    finally:
        signal.signal(signal.SIGINT, previous)
