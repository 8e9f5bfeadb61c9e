from __future__ import annotations

import math
from dataclasses import replace

import pytest

from backfill.core.block import pack_block_ref
from backfill.core.clock import VirtualClock
from backfill.core.plan import AdmittedRequest, ScheduledSlice, StepPlan
from backfill.core.request import RequestId
from backfill.core.sampling import SamplingParams
from backfill.execution.simulated_executor import SimulatedExecutor
from tests.builders import linear_cost, make_info

REQUEST_ID = RequestId("r")


def plan(num_tokens: int, *, has_online: bool) -> StepPlan:
    blocks = tuple(pack_block_ref(index) for index in range(-(-num_tokens // 4)))
    return StepPlan(
        step=0,
        admitted=(AdmittedRequest(REQUEST_ID, (5,) * num_tokens, SamplingParams(max_tokens=4)),),
        slices=(ScheduledSlice(REQUEST_ID, 0, num_tokens, blocks, samples=True),),
        released=(),
        has_online=has_online,
        has_offline=not has_online,
    )


class StopAt:
    """An event at an instant that asks for a stop."""

    def __init__(self, clock: VirtualClock, at_s: float) -> None:
        self.clock, self.at_s = clock, at_s
        self.executor: SimulatedExecutor | None = None
        self.delivered_at_s: list[float] = []

    def next_at_s(self) -> float:
        return math.inf if self.delivered_at_s else self.at_s

    def deliver(self) -> None:
        self.delivered_at_s.append(self.clock.now_s())
        assert self.executor is not None
        self.executor.request_stop()


def run(num_safepoints: int, *, has_online: bool, stop_at_s: float) -> tuple[float, bool, StopAt]:
    clock = VirtualClock(10.0)
    events = StopAt(clock, stop_at_s)
    info = replace(make_info(num_blocks=100), stop_s=0.02 if num_safepoints else None)
    executor = SimulatedExecutor(info, linear_cost(), clock, num_safepoints=num_safepoints)
    executor.events = events
    events.executor = executor
    outcome = executor.run(plan(100, has_online=has_online))
    assert outcome.aborted == (not outcome.sampled)
    return clock.now_s(), outcome.aborted, events


def test_a_step_takes_its_predicted_time() -> None:
    ended_at_s, aborted, _ = run(0, has_online=False, stop_at_s=math.inf)
    assert ended_at_s == pytest.approx(10.1)
    assert not aborted


def test_a_stopped_step_ends_at_its_next_safepoint() -> None:
    ended_at_s, aborted, events = run(4, has_online=False, stop_at_s=10.033)
    assert aborted
    assert events.delivered_at_s == [pytest.approx(10.033)]
    assert ended_at_s == pytest.approx(10.04)


def test_behind_the_last_safepoint_a_step_runs_to_its_end() -> None:
    ended_at_s, aborted, _ = run(4, has_online=False, stop_at_s=10.095)
    assert ended_at_s == pytest.approx(10.1)
    assert not aborted


def test_a_step_with_online_requests_is_not_disturbed() -> None:
    ended_at_s, aborted, events = run(4, has_online=True, stop_at_s=10.033)
    assert ended_at_s == pytest.approx(10.1)
    assert not aborted
    assert events.delivered_at_s == []
