"""What SIGINT (Ctrl-C) and SIGTERM do to a command: one line at most, and exit status 130 or 143.

While a command loads, a signal ends the process at once: an import may turn an exception into another error,
or drop it. A command that has launched a process ends that process first (``exit_after``). Elsewhere
``interruptible`` raises KeyboardInterrupt. Event loops have handlers of their own.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

LOADING = "stopped while loading"
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def exit_at_once(number: int, frame: FrameType | None) -> None:
    """Signal handler of a command that has nothing to close."""
    os.write(2, f"backfill: {LOADING}\n".encode())
    os._exit(128 + number)


def exit_silently(number: int, frame: FrameType | None) -> None:
    """Signal handler of a command that has printed its last line."""
    os._exit(128 + number)


def exit_after(close: Callable[[], None]) -> None:
    """From now on a signal calls ``close`` and ends the process as ``exit_at_once`` does.

    A second signal may call ``close`` again.
    """

    def close_and_exit(number: int, frame: FrameType | None) -> None:
        close()
        exit_at_once(number, frame)

    for number in SIGNALS:
        signal.signal(number, close_and_exit)


def take_from_loop(loop: asyncio.AbstractEventLoop) -> None:
    """From now on signals exit silently. Call it before the loop closes and sets Python's handlers."""
    for number in SIGNALS:
        loop.remove_signal_handler(number)
        signal.signal(number, exit_silently)


@contextmanager
def interruptible(message: str = "interrupted") -> Iterator[None]:
    """A signal raises KeyboardInterrupt in the block; the command then ends with ``message``.

    Raises: SystemExit.
    """
    received = signal.SIGINT

    def terminate(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received = signal.SIGTERM
        raise KeyboardInterrupt

    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: terminate}
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    except KeyboardInterrupt:
        print(f"backfill: {message}", file=sys.stderr)
        raise SystemExit(128 + received) from None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
