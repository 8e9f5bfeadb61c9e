"""What requests cost, as the pool of lines is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from backfill.costs.model import PiecewiseLinear
from backfill.models.config import ModelConfig
from backfill.preparation.resources import create_pool, resources_of, typical_resources
from tests.builders import linear_cost, make_profile
from tests.preparation.facts import FACTS


@pytest.fixture
def model(small_model: Path) -> ModelConfig:
    return ModelConfig.from_folder(small_model)


def test_without_a_profile_costs_follow_from_the_dimensions(model: ModelConfig) -> None:
    assert resources_of(FACTS, model) == typical_resources(model, dtype_bytes=4)
    half = replace(FACTS, info=replace(FACTS.info, dtype="bfloat16"))
    assert resources_of(half, model) == typical_resources(model)
    codes = replace(half, info=replace(half.info, kv_dtype="int8"))
    assert resources_of(codes, model) == typical_resources(model, dtype_bytes=1)


def test_a_profile_says_what_was_measured(model: ModelConfig) -> None:
    cost = replace(linear_cost(token_s=0.002), prefill_pair_s=3e-7, decode_context_s=5e-6)
    measured = resources_of(replace(FACTS, profile=make_profile(cost)), model)
    assert measured.token_s == pytest.approx(0.002)
    assert (measured.prompt_pair_s, measured.cached_token_s) == (3e-7, 5e-6)


def test_a_term_that_was_measured_as_nothing_is_in_proportion_to_the_others(model: ModelConfig) -> None:
    typical = typical_resources(model, dtype_bytes=4)
    measured = resources_of(replace(FACTS, profile=make_profile(linear_cost(token_s=0.002))), model)
    assert measured.cached_token_s / measured.token_s == pytest.approx(
        typical.cached_token_s / typical.token_s
    )
    nothing = replace(linear_cost(), rows_s=PiecewiseLinear((0.0, 1.0), (0.0, 0.0)))
    assert resources_of(replace(FACTS, profile=make_profile(nothing)), model) == typical


def test_the_room_is_that_of_the_kv_and_only_the_blend_asks_for_it(small_model: Path) -> None:
    _, forecast = create_pool("blend", FACTS, small_model)
    assert forecast is not None
    assert forecast.kv_tokens == FACTS.info.num_blocks * FACTS.info.block_size
    assert 0 < forecast.slack_tokens < forecast.kv_tokens
    for order in ("fcfs", "dfs", "random", "batchllm"):
        assert create_pool(order, FACTS, small_model)[1] is None
