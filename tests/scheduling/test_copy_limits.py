from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backfill.core.config import SchedulerConfig
from backfill.core.request import ServiceClass
from backfill.kvcache.checkpointing import FixedCheckpoints, PoolView
from backfill.kvcache.copies import CopyLimits
from backfill.kvcache.manager import KVCacheManager
from backfill.scheduling.objectives import DEFAULT_SLO
from backfill.scheduling.planner import copy_limits
from backfill.scheduling.policies.create import create_policy
from backfill.scheduling.prediction import StepPredictor
from backfill.scheduling.scheduler import Scheduler
from tests.builders import linear_cost, make_request


@pytest.mark.parametrize(
    ("step_s", "slack_s", "interference", "expected"),
    [
        pytest.param(0.1, math.inf, 0.5, CopyLimits(100, 100), id="no objective: the link is the limit"),
        pytest.param(0.1, 0.01, 0.0, CopyLimits(100, 100), id="copies that slow nothing"),
        pytest.param(0.1, 0.01, 0.5, CopyLimits(100, 20), id="each block costs half a millisecond"),
        pytest.param(
            0.1, 0.01, 0.05, CopyLimits(100, 100), id="the step can afford more than the link moves"
        ),
        pytest.param(0.1, 0.0004, 0.5, CopyLimits(100, 0), id="not one block"),
        pytest.param(0.1, 0.0, 0.5, CopyLimits(100, 0), id="no slack"),
        pytest.param(0.1, -1.0, 0.5, CopyLimits(100, 0), id="the step is late"),
        pytest.param(0.1, -1.0, 0.0, CopyLimits(100, 100), id="late, with copies that slow nothing"),
        pytest.param(0.0, -1.0, 0.5, CopyLimits(50, 50), id="nothing is computed, so nothing is slowed"),
        pytest.param(0.0001, math.inf, 0.5, CopyLimits(1, 1), id="a step shorter than a copy"),
    ],
)
def test_copies_of_a_millisecond(
    step_s: float, slack_s: float, interference: float, expected: CopyLimits
) -> None:
    assert copy_limits(step_s, slack_s, 0.001, interference) == expected


@given(
    step_s=st.floats(1e-5, 10.0),
    slack_s=st.floats(-1.0, 10.0),
    block_copy_s=st.floats(1e-6, 0.1),
    interference=st.floats(0.0, 2.0),
)
def test_background_copies_never_cost_more_than_the_slack(
    step_s: float, slack_s: float, block_copy_s: float, interference: float
) -> None:
    limits = copy_limits(step_s, slack_s, block_copy_s, interference)
    assert 0 <= limits.background <= limits.online
    assert limits.online >= 1, "online restores always go on"
    assert limits.background * block_copy_s * interference <= max(0.0, slack_s) + 1e-9
    more = copy_limits(step_s, slack_s + 1.0, block_copy_s, interference)
    assert more.background >= limits.background
    assert copy_limits(step_s, math.inf, block_copy_s, interference).background == limits.online


class Recording(FixedCheckpoints):
    """Records what it is shown, and copies nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.views: list[PoolView] = []

    def max_blocks(self, view: PoolView) -> int:
        self.views.append(view)
        return 0


@pytest.mark.parametrize(
    ("interference", "expected"),
    [
        pytest.param(0.0, 0.0, id="copies are free"),
        pytest.param(0.5, 0.25 * 0.5 / (1 - 0.25 * 0.5), id="a copy each way costs an eighth of the block"),
        pytest.param(2.0, 1.0, id="both copies cost as much as computing it"),
    ],
)
def test_a_copy_costs_what_it_slows_over_what_it_saves(interference: float, expected: float) -> None:
    """16 tokens take 16 ms to compute, and their copy 4 ms."""
    config = SchedulerConfig(policy="slo", checkpointing="adaptive")
    predictor = StepPredictor(linear_cost(token_s=0.001, step_s=1e-9))
    checkpoints = Recording()
    scheduler = Scheduler(
        config,
        KVCacheManager(100, 16, 100, policy=checkpoints),
        create_policy(config, predictor, default_slo=DEFAULT_SLO, can_stop=True),
        predictor=predictor,
        block_copy_s=0.004,
        copy_interference=interference,
    )
    scheduler.add(make_request(20, 4, service_class=ServiceClass.OFFLINE))
    scheduler.plan_step(0.0)
    assert [view.copy_cost for view in checkpoints.views] == [pytest.approx(expected, abs=1e-6)]
