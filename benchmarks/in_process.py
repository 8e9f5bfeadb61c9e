"""What benchmarks that run the engine's code in their own process share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from backfill.core.counters import ClassCounters
from backfill.engine.environment import engine_environment


def restart_in_engine_environment() -> None:
    """Begin the program anew with the engine's environment variables, unless they are set."""
    missing = engine_environment(os.environ)
    if missing:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **missing})


def check_no_prefix_hits(counters: Iterable[ClassCounters]) -> None:
    """Raises: SystemExit when prompts' KV came from the prefix cache.

    Args:
        counters: of all classes.
    """
    if num_hits := sum(each.num_all_prefix_hit_tokens for each in counters):
        raise SystemExit(
            f"{num_hits} prompt tokens came from the prefix cache: the figures would be the cache's"
        )
