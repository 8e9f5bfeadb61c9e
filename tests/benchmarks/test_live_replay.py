from __future__ import annotations

import threading

import pytest
from live_replay import LiveReplay

from backfill.core.clock import WallClock
from backfill.core.config import SchedulerConfig
from backfill.core.plan import StepOutcome, StepPlan
from backfill.core.request import Request
from backfill.engine.engine import Engine
from backfill.simulation.replay import Arrival, Lengths, Workload
from tests.builders import ScriptedExecutor, make_info

OFFLINE = (Lengths(20, 4),)
WORKLOAD = Workload(tuple(Arrival(0.5 + 0.01 * i, Lengths(10, 3)) for i in range(8)), 0.7, OFFLINE)


class Arriving(Engine):
    """Notes whether a step ran when a request arrived."""

    def __init__(self, executor: ScriptedExecutor) -> None:
        super().__init__(SchedulerConfig(policy="priority"), executor, WallClock())
        self.arrived_in_step: list[bool] = []
        self.has_arrived = threading.Event()

    def arrive(self, request: Request) -> None:
        self.arrived_in_step.append(bool(self._in_flight))
        super().arrive(request)
        self.has_arrived.set()


class Waiting(ScriptedExecutor):
    """Its first step with a slice waits for an arrival."""

    def __init__(self) -> None:
        super().__init__(make_info(num_blocks=4000, block_size=16))
        self.engine: Arriving | None = None

    def run(self, plan: StepPlan) -> StepOutcome:
        if plan.slices:
            assert self.engine is not None
            assert self.engine.has_arrived.wait(60.0)
        return super().run(plan)


def test_requests_arrive_while_a_step_runs_and_each_is_recorded() -> None:
    executor = Waiting()
    engine = executor.engine = Arriving(executor)
    result = LiveReplay(engine, WallClock(), WORKLOAD).run()
    assert engine.arrived_in_step[0]  # the flood's first step waited for it
    assert [len(record.token_at_s) for record in result.online] == [3] * 8
    assert all(record.ttft_s > 0 for record in result.online)
    assert result.num_prefix_hit_tokens == 0


def test_the_replay_waits_for_arrivals_when_nothing_runs() -> None:
    executor = ScriptedExecutor(make_info(num_blocks=4000, block_size=16))
    alone = Workload(WORKLOAD.online, 0.7, ())
    result = LiveReplay(Arriving(executor), WallClock(), alone).run()
    assert [len(record.token_at_s) for record in result.online] == [3] * 8
    assert not [each for each in threading.enumerate() if each.name == "arrivals"]


def test_a_request_that_cannot_arrive_ends_the_replay() -> None:
    class Refusing(Arriving):
        def arrive(self, request: Request) -> None:
            raise KeyError("no room")

    engine = Refusing(ScriptedExecutor(make_info(num_blocks=4000, block_size=16)))
    with pytest.raises(RuntimeError, match="could not arrive"):
        LiveReplay(engine, WallClock(), WORKLOAD).run()
    assert not [each for each in threading.enumerate() if each.name == "arrivals"]
