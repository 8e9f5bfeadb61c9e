"""What benchmarks that run the engine's code in their own process share."""

from __future__ import annotations

import os
import sys

from backfill.engine.environment import engine_environment


def restart_in_engine_environment() -> None:
    """Begin the program anew with the engine's environment variables, unless they are set."""
    missing = engine_environment(os.environ)
    if missing:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **missing})
