from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backfill.costs.hardware import load_hardware_profile
from backfill.costs.load import StepLoad
from backfill.simulation.replay import Lengths
from experiments.blendserve.mix import Mix, MixSpec, draw_mix
from experiments.blendserve.optimum import PoolWork, Work, WorkModel
from experiments.blendserve.overlap import INTERFERENCE, OverlappedCostModel
from experiments.blendserve.pool import HARDWARE
from tests.experiments.small_sources import small_sources

COST = OverlappedCostModel.of(load_hardware_profile(HARDWARE).costs.cost, INTERFERENCE["blendserve"])
MODEL = WorkModel.of(COST)
SECONDS = st.floats(0.0, 100.0)


def test_the_work_of_all_requests_counts_each_prefix_once() -> None:
    with small_sources():
        mix = draw_mix(MixSpec("burstgpt", 0.9, 0.35, 300, 1))
    work = PoolWork(list(mix.parts.values()), MODEL)
    assert work.total == pytest.approx(whole_pool(mix))


def whole_pool(mix: Mix) -> Work:
    """The sums of section 2.4 over all requests at once: every prefix once."""
    compute_s = memory_s = 0.0
    for part in mix.parts.values():
        prompts, outputs, shared = part.prompt_tokens, part.output_tokens, part.shared_tokens
        own, decodes = prompts - shared, outputs - 1
        compute_s += MODEL.row_s * float((own + decodes).sum()) + MODEL.sampled_row_s * float(outputs.sum())
        compute_s += COST.prefill_pair_s * float((own * shared + own * (own + 1) // 2).sum())
        compute_s += COST.prefill_context_s * float(shared.sum())
        memory_s += COST.decode_context_s * float((decodes * prompts + decodes * (decodes - 1) // 2).sum())
    return Work(compute_s, memory_s)


def test_a_long_output_bounds_the_time_only_where_its_steps_are_small() -> None:
    num_rows = 1_000_000
    work = Work(MODEL.row_s * num_rows + 3.0, 5.0)
    free = MODEL.least_of_steps_s(work, num_rows, 100)
    assert free == pytest.approx(MODEL.least_s(work))
    assert MODEL.least_of_steps_s(work, num_rows, 50_000) > 1.5 * free
    alone = MODEL.least_of_steps_s(Work(MODEL.row_s * 1000, 0.0), 1000, 1000)
    assert alone == pytest.approx(1000 * COST.overlap.seconds(*COST.resources_s(StepLoad(num_tokens=1))))


@given(st.lists(st.integers(1, 2048), min_size=1, max_size=40))
def test_no_steps_are_faster_than_the_least_time_of_their_number(sizes: list[int]) -> None:
    """Steps with nothing but rows, each as fast as the device computes it."""
    seconds = sum(COST.overlap.seconds(*COST.resources_s(StepLoad(num_tokens=size))) for size in sizes)
    work = Work(MODEL.row_s * sum(sizes), 0.0)
    assert MODEL.least_of_steps_s(work, sum(sizes), len(sizes)) <= seconds * (1 + 1e-9)


def test_a_request_has_done_nothing_before_its_first_token() -> None:
    with small_sources():
        mix = draw_mix(MixSpec("burstgpt", 0.9, 0.35, 300, 1))
    work = PoolWork(list(mix.parts.values()), MODEL)
    assert work.of(0, 0) == Work()
    prompt = int(next(iter(mix.parts.values())).prompt_tokens[0])
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
