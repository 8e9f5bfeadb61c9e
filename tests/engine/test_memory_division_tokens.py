"""Tokens are the same while the interval changes in every step, and the KV pool grows and shrinks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from backfill.core.clock import VirtualClock
from backfill.core.config import KVLayoutName, PreemptionMode, SchedulerConfig
from backfill.core.request import ServiceClass
from backfill.engine import engine as engine_module
from backfill.engine.engine import Engine
from backfill.execution.torch_executor import TorchExecutor
from backfill.kvcache.content import Block
from backfill.kvcache.pool import BlockPool
from backfill.offloading.residency import Residency
from tests.builders import make_profile
from tests.engine.test_restored_tokens import NEARLY_ALL_SHARED, create_executor, crowd_on, serve_on
from tests.execution.tiny import cache_fixture, model_fixture
from tests.scheduling.test_memory_division import ErraticResidency

NUM_LAYERS, LARGEST = 8, 3
LEAST, ENOUGH = 22, 200


cache = cache_fixture("module")
model_dir = model_fixture("llama", num_hidden_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def undisturbed(model_dir: Path) -> list[list[int]]:
    config = SchedulerConfig(prefix_caching=False)
    executor = create_executor(model_dir, ENOUGH, config)
    engine = Engine(config, executor, VirtualClock(), make_profile())
    served, _ = serve_on(engine, executor)
    return [request.output_token_ids for request in served]


def make_erratic(seed: int, choices: Sequence[Residency], stage_layers: Sequence[int]) -> ErraticResidency:
    return ErraticResidency(choices, stage_layers, random.Random(seed))


@pytest.mark.slow
@pytest.mark.parametrize(  # each two values together
    ("kv_layout", "preemption", "seed"),
    [
        ("unidirectional", "suspend", 0),
        ("unidirectional", "discard", 1),
        ("bidirectional", "suspend", 1),
        ("bidirectional", "discard", 0),
    ],
)
def test_tokens_are_the_same_while_memory_changes_hands(
    model_dir: Path,
    undisturbed: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    kv_layout: KVLayoutName,
    preemption: PreemptionMode,
    seed: int,
) -> None:
    config = SchedulerConfig(
        policy="slo", checkpointing="adaptive", preemption=preemption, kv_layout=kv_layout
    )
    executor = create_executor(model_dir, LEAST, config, offload_interval=LARGEST, min_offload_interval=1)
    executor._kv_pool[:LEAST].fill_(float("nan"))  # beyond the pool's end there are weights
    monkeypatch.setattr(engine_module, "ResidencyPolicy", partial(make_erratic, seed))
    engine = Engine(config, executor, VirtualClock(), make_profile())
    seen = Seen(executor, monkeypatch)
    served, num_stopped = serve_on(engine, executor, stops_every=2)
    assert [request.output_token_ids for request in served] == undisturbed
    assert num_stopped > 1
    assert seen.num_moves > 3
    assert seen.num_divisions > 5
    assert seen.intervals >= {1, 2}
    assert engine.scheduler.counters[ServiceClass.OFFLINE].num_preemptions > 0


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_tokens_are_the_same_while_shared_blocks_are_moved_and_copied(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The pool shrinks below blocks that two requests fill, and tails beside running ones are restored."""
    plain = SchedulerConfig(prefix_caching=False)
    executor = create_executor(model_dir, ENOUGH, plain)
    expected = crowd_on(Engine(plain, executor, VirtualClock(), make_profile()), executor)
    config = SchedulerConfig(policy="slo", checkpointing="adaptive", kv_layout="bidirectional")
    executor = create_executor(
        model_dir, NEARLY_ALL_SHARED, config, offload_interval=LARGEST, min_offload_interval=2
    )
    executor._kv_pool[:NEARLY_ALL_SHARED].fill_(float("nan"))
    monkeypatch.setattr(engine_module, "ResidencyPolicy", partial(make_erratic, seed))
    engine = Engine(config, executor, VirtualClock(), make_profile())
    kv = engine.scheduler.kv
    num_shared_moves, exchange = 0, BlockPool.exchange

    def counted(pool: BlockPool, block: Block, taken: Block) -> None:
        nonlocal num_shared_moves
        num_shared_moves += block.peer is not None
        exchange(pool, block, taken)

    monkeypatch.setattr(BlockPool, "exchange", counted)
    served = crowd_on(engine, executor)
    assert [each.output_token_ids for each in served] == [each.output_token_ids for each in expected]
    assert num_shared_moves > 0
    assert kv.checkpointer.num_copied_slots > 0
    assert kv.sharing.num_overwritten > 0
    assert engine.scheduler.counters[ServiceClass.OFFLINE].num_restored_tokens > 0


class Seen:
    """What an executor's plans have changed."""

    def __init__(self, executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_moves = self.num_divisions = 0
        self.intervals: set[int] = set()
        run = executor.run

        def noted(plan: Any) -> Any:
            outcome = run(plan)
            self.num_moves += len(plan.moves)
            self.num_divisions += plan.memory is not None
            self.intervals.add(outcome.weight_transfers.interval)
            return outcome

        monkeypatch.setattr(executor, "run", noted)
