"""Seeds of the simulated fleet. ``world.py`` says what is simulated, and how a seed is run alone."""

from __future__ import annotations

import os
from unittest import mock

import pytest

from tests.router.world import Plan, World, run_seed
from tests.shared import examples

# More with BACKFILL_WORLD_SEEDS, and in several processes with ``python -m tests.router.world``.
NUM_SEEDS = int(os.environ.get("BACKFILL_WORLD_SEEDS", examples(80)))
_AT_ONCE = 20


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, _AT_ONCE))
def test_nothing_is_lost_or_stuck(first: int) -> None:
    seeds = range(first, min(first + _AT_ONCE, NUM_SEEDS))
    violations = {seed: found for seed in seeds if (found := run_seed(seed).violations)}
    assert violations == {}


def test_a_seed_replays_exactly() -> None:
    for seed in range(2):
        assert run_seed(seed).scheduler.trace == run_seed(seed).scheduler.trace


def test_an_ejected_engine_that_is_well_serves_while_no_other_does() -> None:
    plan = Plan(
        num_engines=2,
        num_rocks=0,
        policy="least-loaded",
        poll_s=0.25,
        timeout_s=1.0,
        retry_s=30.0,
        capacity=16,
        chaos_s=8.0,
        num_requests=80,
        num_lines=0,
        come_within_s=4.0,
        num_retries=1024,
        faults=frozenset(),
    )
    with mock.patch.object(Plan, "of", return_value=plan):
        world = World(0)
    first, second = world.engines.values()
    world.scheduler.after(1.0, lambda: world.fail(first, 4.0))
    world.scheduler.after(5.0, lambda: second.die(15.0))
    world.run()
    assert any("engine-0 is ejected" in line for line in world.scheduler.trace)
    assert world.violations == []
