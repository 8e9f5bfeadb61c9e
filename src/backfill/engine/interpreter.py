"""The interpreter of a command's first engine, which imports torch while the command line is read.

Light to import: what comes before the interpreter is started delays the first answer.
"""

from __future__ import annotations

import os
from contextlib import suppress

from backfill.engine.environment import engine_environment
from backfill.ipc.interpreter import Interpreter

ENGINE_NAME = "backfill-engine"
_waiting: list[Interpreter] = []


def start_interpreter() -> None:
    """Start one; ``take_interpreter`` gives it work. It ends with this process."""
    with suppress(OSError):  # the engine's own start will say so
        _waiting.append(Interpreter(ENGINE_NAME, engine_environment(os.environ), modules=("torch",)))


def take_interpreter() -> Interpreter | None:
    """The one that waits, once."""
    return _waiting.pop() if _waiting else None


def end_interpreter() -> None:
    """End the one that waits, in a command that turns out to start no engine."""
    if (interpreter := take_interpreter()) is not None:
        interpreter.end()
