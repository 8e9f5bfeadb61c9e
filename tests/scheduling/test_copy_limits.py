from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backfill.core.config import SchedulerConfig
from backfill.core.request import RequestId, ServiceClass
from backfill.core.slo import SLO
from backfill.kvcache.checkpointing import FixedCheckpoints, PoolView
from backfill.kvcache.copies import CopyLimits
from backfill.kvcache.manager import KVCacheManager
from backfill.scheduling.objectives import DEFAULT_SLO
from backfill.scheduling.planner import copy_limits
from backfill.scheduling.policies.create import create_policy
from backfill.scheduling.prediction import StepPredictor
from backfill.scheduling.scheduler import Scheduler
from tests.builders import linear_cost, make_request
from tests.scheduling.bench import SLO_100_MS, slo_policy, view_of


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


@pytest.mark.parametrize("interference", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(
    ("prompts", "num_in_time"),
    [
        pytest.param([800], 1, id="a prompt of several steps"),
        pytest.param([400, 150, 250], 3, id="prompts that wait for others"),
        pytest.param([400, *[100] * 30], 8, id="more prompts than can be in time"),
    ],
)
def test_copies_beside_each_step_of_prompts_make_no_first_token_late(
    prompts: Sequence[int], num_in_time: int, interference: float
) -> None:
    """A second's objective, steps of 200 tokens at 1 ms, copies of 2 ms."""
    predictor = StepPredictor(linear_cost(token_s=0.001, step_s=0.001))
    policy = slo_policy(predictor, default_slo=SLO_100_MS)
    left = [make_request(size, 4, slo=SLO_100_MS, request_id=f"{i}") for i, size in enumerate(prompts)]
    left.sort(key=lambda each: each.num_tokens)
    now_s, num_copies = 0.0, 0
    while num_in_time:
        tokens: dict[RequestId, int] = {}
        for each in left:
            tokens[each.request_id] = min(each.num_pending_tokens, 200 - sum(tokens.values()))
        running, waiting = left[:1], left[1:]
        step_s = 0.001 + 0.001 * sum(tokens.values())
        slack_s = policy.step_limit_s(view_of(now_s, running=running, waiting=waiting), tokens) - step_s
        copies = copy_limits(step_s, slack_s, 0.002, interference).background
        num_copies += copies
        now_s += step_s + copies * 0.002 * interference
        for each in left:
            each.num_computed_tokens += tokens[each.request_id]
        assert now_s <= SLO_100_MS.ttft_s
        ended = [each for each in left if each.num_computed_tokens == each.num_tokens]
        left, num_in_time = left[len(ended) :], max(0, num_in_time - len(ended))
    assert num_copies > 0


def test_copies_leave_a_long_prompt_the_time_that_its_context_takes() -> None:
    """1.46 s alone, 0.45 s of them to read its own context, with an objective of 2 s."""
    predictor = StepPredictor(linear_cost(token_s=1e-4, step_s=1e-3, context_s=1e-5))
    policy, slo = slo_policy(predictor), SLO(2.0, 0.1)
    prompt, now_s, num_copies = make_request(10_000, 4, slo=slo), 0.0, 0
    while prompt.num_computed_tokens < prompt.num_tokens:
        step_s = 0.101 + 1e-5 * prompt.num_computed_tokens
        view = view_of(now_s, running=[prompt])
        slack_s = policy.step_limit_s(view, {prompt.request_id: 1000}) - step_s
        copies = copy_limits(step_s, slack_s, 0.002, 1.0).background
        num_copies += copies
        now_s += step_s + copies * 0.002
        prompt.num_computed_tokens += 1000
    assert now_s <= slo.ttft_s
    assert num_copies > 0


def test_a_first_token_that_is_late_by_little_bounds_copies_until_it_is_due() -> None:
    policy = slo_policy(StepPredictor(linear_cost()))
    prompt = make_request(1100, 4, slo=SLO_100_MS)
    for now_s, limit_s in ((0.0, 1.0), (0.6, 0.4), (1.1, math.inf)):
        limit = policy.step_limit_s(view_of(now_s, running=[prompt]), {prompt.request_id: 200})
        assert limit == pytest.approx(limit_s, rel=0.2)


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
