from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backfill.costs.hardware import load_hardware_profile
from backfill.costs.overlap import INTERFERENCE, OverlappedCostModel
from backfill.simulation.blend_mix import MixSpec, draw_mix
from backfill.simulation.blend_run import HARDWARE, achievable_optimum_s
from backfill.simulation.optimal_work import PoolWork, Work, WorkModel
from backfill.simulation.replay import Lengths
from tests.simulation.small_sources import small_sources

COST = OverlappedCostModel.of(load_hardware_profile(HARDWARE).costs.cost, INTERFERENCE["blendserve"])
MODEL = WorkModel.of(COST)
SECONDS = st.floats(0.0, 100.0)


def test_the_parts_of_all_requests_are_the_achievable_optimum() -> None:
    with small_sources():
        mix = draw_mix(MixSpec("burstgpt", 0.9, 0.35, 300, 1))
    work = PoolWork(list(mix.parts.values()), MODEL)
    assert MODEL.least_s(work.total) == pytest.approx(achievable_optimum_s(mix, COST))
    outputs = np.concatenate([part.output_tokens for part in mix.parts.values()]).tolist()
    parts = [MODEL.optimal_s(work.of(number, output), work.total) for number, output in enumerate(outputs)]
    assert sum(parts) == pytest.approx(MODEL.least_s(work.total))


def test_a_request_has_done_nothing_before_its_first_token() -> None:
    with small_sources():
        mix = draw_mix(MixSpec("burstgpt", 0.9, 0.35, 300, 1))
    work = PoolWork(list(mix.parts.values()), MODEL)
    assert work.of(0, 0) == Work()
    assert work.num_tokens(0, 0) == 0
    prompt = int(next(iter(mix.parts.values())).prompt_tokens[0])
    assert work.num_tokens(0, 5) == prompt + 5
    assert work.of(0, 5).memory_s == pytest.approx(COST.decode_context_s * (4 * prompt + 6))


def test_requests_without_prefixes_add_up() -> None:
    both = MODEL.of_requests([Lengths(1000, 10), Lengths(20, 300)])
    each = MODEL.of_requests([Lengths(1000, 10)]).plus(MODEL.of_requests([Lengths(20, 300)]))
    assert both == pytest.approx(each)


@given(SECONDS, SECONDS, st.floats(0.0, 0.4), st.floats(0.0, 0.4))
def test_work_beside_online_work_takes_as_long_as_both_together(
    compute_s: float, memory_s: float, online_compute: float, online_memory: float
) -> None:
    """T is as long as it takes to do the work and the online work of T seconds."""
    online = Work(online_compute, online_memory)
    seconds = MODEL.least_s(Work(compute_s, memory_s), online)
    all_work = Work(compute_s + online_compute * seconds, memory_s + online_memory * seconds)
    assert MODEL.least_s(all_work) == pytest.approx(seconds)


def test_work_that_cannot_be_done_takes_forever() -> None:
    assert MODEL.least_s(Work(1.0, 1.0), Work(1.0, 0.5)) == math.inf
