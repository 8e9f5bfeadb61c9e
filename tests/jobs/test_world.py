"""Seeds of the simulated world. ``world.py`` says what is simulated, and how a seed is run alone."""

from __future__ import annotations

import os

import pytest

from tests.jobs.world import run_seed

# More with BACKFILL_WORLD_SEEDS, and in several processes with ``python -m tests.jobs.world``.
NUM_SEEDS = int(os.environ.get("BACKFILL_WORLD_SEEDS", "9"))


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_nothing_is_lost_or_stuck(seed: int) -> None:
    assert run_seed(seed).violations == []


def test_a_seed_replays_exactly() -> None:
    assert run_seed(7).scheduler.trace == run_seed(7).scheduler.trace
