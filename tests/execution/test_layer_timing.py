"""A rank that times its layers and transfers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
import torch

from backfill.core.block import BlockMove
from backfill.core.clock import WallClock
from backfill.core.config import EngineConfig
from backfill.core.plan import RankTiming, StepOutcome, StepPlan
from backfill.costs.copy_profiler import EMPTY_PLAN
from backfill.costs.profiler import StepTimer
from backfill.execution.create import create_torch_executor
from backfill.execution.layer_timing import TRANSFER_AGAIN, TimedExecutor, _CudaLayers
from backfill.execution.profile import step_capacity
from tests.execution.tiny import cache_fixture, dummy_config

NUM_LAYERS = 6
HELD = 2  # every layer is offloaded, into two buffers


cache = cache_fixture()


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    return replace(dummy_config(tmp_path / "model", num_hidden_layers=NUM_LAYERS), offload_interval=1)


@pytest.fixture
def executor(config: EngineConfig) -> Iterator[TimedExecutor]:
    timed = TimedExecutor(create_torch_executor(config))
    yield timed
    timed.close()


class Recorder:
    """Runs plans of a step timer and keeps what was measured. See ``RunsPlans``."""

    def __init__(self, executor: TimedExecutor) -> None:
        self._executor = executor
        self.timings: list[RankTiming] = []

    def run(self, plan: StepPlan) -> StepOutcome:
        outcome = self._executor.run(plan)
        self.timings += outcome.weight_transfers.timings
        return outcome


def test_each_layer_of_a_step_is_timed_and_each_transfer_once(
    config: EngineConfig, executor: TimedExecutor
) -> None:
    recorder = Recorder(executor)
    capacity = step_capacity(config, executor.info)
    recorder.run(TRANSFER_AGAIN)
    recorder.timings.clear()
    StepTimer(recorder, WallClock(), capacity).time(((0, 16, True),))
    admitted, step, released = recorder.timings
    assert (admitted.layers_s, released.layers_s) == ((), ())
    assert len(step.layers_s) == len(step.waits_s) == NUM_LAYERS
    assert all(each > 0.0 for each in (*step.layers_s, *step.waits_s))
    assert len(admitted.transfers_s) == 0, "a request alone lets nothing be transferred again"
    recorder.run(TRANSFER_AGAIN)
    transfers_s = [each for timing in recorder.timings for each in timing.transfers_s]
    # What the step has begun for the next one, and no thread has taken up yet, is begun anew and counts once.
    assert NUM_LAYERS <= len(transfers_s) <= NUM_LAYERS + HELD
    assert all(each > 0.0 for each in transfers_s)
    assert {each.layer_bytes for each in recorder.timings} == {executor._streamer.layer_bytes}


def test_no_plan_of_an_engine_transfers_again(
    executor: TimedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever counts as a plan that does nothing."""

    def num_transfers(plan: StepPlan) -> int:
        (timing,) = executor.run(plan).weight_transfers.timings
        return len(timing.transfers_s)

    num_transfers(TRANSFER_AGAIN)
    assert num_transfers(TRANSFER_AGAIN) == HELD
    assert num_transfers(EMPTY_PLAN) == 0
    assert num_transfers(replace(EMPTY_PLAN, moves=(BlockMove(0, 1),))) == 0
    for does_nothing in (True, False):
        monkeypatch.setattr(StepPlan, "does_nothing", does_nothing)
        assert num_transfers(replace(EMPTY_PLAN, offload_interval=1)) == 0
        assert num_transfers(TRANSFER_AGAIN) == HELD


def test_what_a_failed_step_has_timed_is_of_no_other_step(
    config: EngineConfig, executor: TimedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(executor)
    steps = StepTimer(recorder, WallClock(), step_capacity(config, executor.info))
    model = executor._executor._model
    run_layers = model.run_layers

    def fail_in_the_third(layers: range, *args: Any) -> Any:
        if layers.start == 2:
            raise ZeroDivisionError
        return run_layers(layers, *args)

    with monkeypatch.context() as patch:
        patch.setattr(model, "run_layers", fail_in_the_third)
        with pytest.raises(ZeroDivisionError):
            steps.time(((0, 16, True),))
    recorder.timings.clear()
    steps.time(((0, 16, True),))
    assert [(len(each.layers_s), len(each.waits_s)) for each in recorder.timings] == [
        (0, 0), (NUM_LAYERS, NUM_LAYERS), (0, 0),
    ]  # fmt: skip


class FakeEvent:
    """Is recorded at the next whole second."""

    seconds = count()

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, _stream: object) -> None:
        self.at_s = next(self.seconds)

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1000.0 * (end.at_s - self.at_s)


def test_a_part_of_a_layer_on_cuda_is_of_no_other_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    layers = _CudaLayers()

    def compute(wait: int, computation: int) -> None:
        layers.reach()
        next(islice(FakeEvent.seconds, wait - 1, wait - 1), None)
        layers.begin()
        next(islice(FakeEvent.seconds, computation - 1, computation - 1), None)
        layers.end()

    compute(3, 5)
    layers.reach()
    layers.forget()
    compute(2, 7)
    compute(1, 4)
    assert layers.take_s() == ((7.0, 4.0), (2.0, 1.0))
    layers.reach()
    with pytest.raises(ValueError, match="zip"):
        layers.take_s()
