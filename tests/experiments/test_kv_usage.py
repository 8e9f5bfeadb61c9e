from __future__ import annotations

from typing import Any

import pytest

from backfill.core.config import SchedulerConfig
from backfill.costs.hardware import HardwareProfile
from backfill.engine.engine import Engine
from backfill.simulation.replay import Lengths, simulate
from backfill.simulation.workloads import gamma_workload
from experiments.bros.kv_usage import SAMPLE_S, KVSample, KVUsage
from tests.builders import make_profile

DURATION_S = 6.0
NUM_BLOCKS = 60


class CheckedUsage(KVUsage):
    """Compares each step's sample with the pool's blocks, one by one."""

    __slots__ = ()

    def on_step(self, engine: Engine, began_s: float, ended_s: float) -> None:
        KVUsage.on_step(self, engine, began_s, ended_s)
        kv = engine.scheduler.kv
        sample = KVSample.of(kv)
        assert min(sample.use) >= 0
        assert sum(sample.use) == kv.num_blocks
        assert sample.use.shared == kv.sharing.num_shared
        requests = engine.scheduler.requests
        holders = [*requests.running, *requests.restoring]
        assert sample.num_table_blocks == sum(map(kv.counts.held, holders))


def observe(layout: str, **settings: Any) -> KVUsage:
    """Online and offline requests whose KV does not fit a pool of 60 blocks."""
    workload = gamma_workload(
        8.0, 1.0, DURATION_S, Lengths(60, 60), offline=(Lengths(100, 60), Lengths(90, 90)), seed=3
    )
    hardware = HardwareProfile("test", make_profile(), 16 * NUM_BLOCKS, 1000, max_model_len=400)
    config = SchedulerConfig(policy="slo", kv_layout=layout, **settings)  # type: ignore[arg-type]
    usage = CheckedUsage(DURATION_S)
    simulate(config, workload, hardware, 32 * NUM_BLOCKS, observer=usage)
    return usage


@pytest.fixture(scope="module")
def both() -> dict[str, KVUsage]:
    return {layout: observe(layout, checkpointing="none") for layout in ("unidirectional", "bidirectional")}


def test_a_pool_is_sampled_to_the_end_of_the_trace(both: dict[str, KVUsage]) -> None:
    for usage in both.values():
        assert usage.num_blocks == NUM_BLOCKS
        assert len(usage.samples) == DURATION_S / SAMPLE_S
        figures = usage.figures()
        classes = ("online", "offline", "shared", "preempted", "cached", "empty")
        assert sum(figures[name] for name in classes) == pytest.approx(1.0)
        assert figures["online"] > 0.1
        assert figures["offline"] > 0.1


def test_blocks_are_shared_in_one_layout_only(both: dict[str, KVUsage]) -> None:
    alone, shared = (both[layout].figures() for layout in ("unidirectional", "bidirectional"))
    assert alone["shared"] == alone["sharing_steps"] == alone["num_entered_blocks"] == 0
    assert shared["num_entered_blocks"] > 0
    assert 0 < shared["sharing_steps"] < 1
    assert shared["num_copied_slots"] == 0, "what is recomputed is not copied"


def test_a_replay_without_steps_has_figures() -> None:
    assert set(KVUsage(1.0).figures().values()) == {0}
