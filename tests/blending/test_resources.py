"""The formulas of section 2.3 against the paper's figures, and the target with online traffic beside."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backfill.blending.resources import OnlineUse, ResourceModel, Work, target_density
from backfill.core.errors import ConfigError
from tests.blending.builders import LLAMA_8B_ON_A100

fractions = st.floats(0, 0.25)
seconds = st.floats(1000, 3000)


def density(model: ResourceModel, num_prompt_tokens: int, num_output_tokens: int) -> float:
    compute_s = model.compute_s(num_prompt_tokens, num_output_tokens)
    return compute_s / model.memory_s(num_prompt_tokens, num_output_tokens)


@pytest.mark.parametrize(("lengths", "printed"), [((512, 256), 3.73), ((256, 16384), 0.096)])
def test_densities_are_those_of_figure_5(lengths: tuple[int, int], printed: float) -> None:
    assert density(LLAMA_8B_ON_A100, *lengths) == pytest.approx(printed, rel=0.02)


def test_the_printed_formula_has_twice_the_pairs_of_causal_attention() -> None:
    p, d = 512, 256
    printed_s = ((p + d) * 8.03e9 * 2 + p**2 * 4096 * 32 * 4) / 312e12
    as_printed = replace(LLAMA_8B_ON_A100, prompt_pair_s=2 * LLAMA_8B_ON_A100.prompt_pair_s)
    assert as_printed.compute_s(p, d) == pytest.approx(printed_s, rel=1e-4)
    assert LLAMA_8B_ON_A100.memory_s(p, d) == pytest.approx((p * d + d**2 / 2) * 1024 * 32 * 4 / 2.039e12)


def test_a_shared_prefix_and_the_rest_cost_what_the_whole_prompt_does() -> None:
    model = LLAMA_8B_ON_A100
    assert model.prefill_s(0.0, 300.0) + model.compute_s(1000, 7, 300) == pytest.approx(
        model.compute_s(1000, 7)
    )


def test_memory_of_a_random_length_is_more_than_that_of_its_mean() -> None:
    model = LLAMA_8B_ON_A100
    lengths = np.array([1.0, 1.0, 4000.0])
    expected = model.expected_memory_s(100.0, float(lengths.mean()), float((lengths**2).mean()))
    assert expected == pytest.approx(np.mean([model.memory_s(100, d) for d in lengths]))
    assert expected > 1.5 * model.memory_s(100, float(lengths.mean()))


@pytest.mark.parametrize(
    ("field", "value"),
    [("token_s", 0.0), ("prompt_pair_s", -1.0), ("cached_token_s", 0.0), ("token_s", math.inf)],
)
def test_a_model_refuses_costs_that_are_none(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        replace(LLAMA_8B_ON_A100, **{field: value})


def test_dimensions_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="num_layers"):
        ResourceModel.from_dimensions(1e9, 1024, 256, 0, 1e12, 1e12)
    with pytest.raises(ConfigError, match="memory_frac"):
        OnlineUse(0.1, -0.1)


@given(seconds, seconds, fractions, fractions)
def test_steady_online_use_does_not_shift_the_target(c: float, m: float, x: float, y: float) -> None:
    left, use = Work(c, m), OnlineUse(x, y)
    assert target_density(left, use, use) == pytest.approx(left.density)
    nearly = OnlineUse(x + 1e-9, y)
    assert target_density(left, nearly, use) == pytest.approx(left.density, rel=1e-3, abs=1e-6)


@given(seconds, seconds, fractions, fractions, fractions, fractions)
def test_online_and_offline_work_together_keep_their_density(
    c: float, m: float, x: float, y: float, mean_x: float, mean_y: float
) -> None:
    left = Work(c, m)
    target = target_density(left, OnlineUse(x, y), OnlineUse(mean_x, mean_y))
    if target == 0 or (x, y) == (mean_x, mean_y):
        return  # no offline work makes up for so much compute
    end_s = max(c / (1 - mean_x), m / (1 - mean_y))
    mix = (c + mean_x * end_s) / (m + mean_y * end_s)
    offline_memory = max(min(1, 1 / mix) - y, 0.05)
    assert (target * offline_memory + x) / (offline_memory + y) == pytest.approx(mix)


def test_more_online_compute_than_usual_asks_for_less_of_offline_work() -> None:
    left, usual = Work(1200.0, 1000.0), OnlineUse(0.2, 0.1)
    assert target_density(left, OnlineUse(0.5, 0.1), usual) < left.density
    assert target_density(left, OnlineUse(0.0, 0.1), usual) > left.density


def test_work_has_the_density_of_its_parts() -> None:
    work = Work()
    assert work.density == 0.0
    work.add(2.0, 1.0)
    assert (work.density, work.time_s) == (2.0, 2.0)
    work.remove(3.0, 1.0)
    assert (work.compute_s, work.memory_s) == (0.0, 0.0)
