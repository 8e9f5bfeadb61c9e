"""Runs many seeds of a simulated world in several processes, or one and prints what happened."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from multiprocessing import Pool
from typing import Any


def run_seeds(run_seed: Callable[[int], Any]) -> int:
    """``python -m WORLD SEED`` or ``FIRST END``. Returns: the exit status.

    Args:
        run_seed: a function of a module; its world has a ``scheduler`` with a trace, and ``violations``.
    """
    first, *rest = map(int, sys.argv[1:])
    if not rest:
        world = run_seed(first)
        print(*world.scheduler.trace, *world.violations, sep="\n")
        return bool(world.violations)
    num_failed = 0
    with Pool(2) as pool:
        for report in pool.imap_unordered(partial(_report, run_seed), range(first, rest[0])):
            num_failed += bool(report)
            print(report, end="", flush=True)
    print(f"{num_failed} of {rest[0] - first} seeds failed")
    return bool(num_failed)


def _report(run_seed: Callable[[int], Any], seed: int) -> str:
    try:
        world = run_seed(seed)
    except Exception as error:
        return f"seed {seed}: {error!r}\n"
    return "".join(f"seed {seed}: {violation}\n" for violation in world.violations)
