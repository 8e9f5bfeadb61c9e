from __future__ import annotations

import pytest

from backfill.costs.derived import A10, A100_80G, LLAMA_2_7B, derive_cost_model
from backfill.costs.hardware import load_hardware_profile
from backfill.costs.load import StepLoad
from experiments.selectn.baselines import peak_step_s
from experiments.selectn.model import SHAPES

LOADS = [
    StepLoad.of([(64, 1, True)] * 32),
    StepLoad.of([(0, 256, True)] * 4),
    StepLoad.of([(1000, 500, True), (100, 1, True)]),
]


@pytest.mark.parametrize("load", LOADS)
def test_a_model_derived_from_itself_is_as_measured(load: StepLoad) -> None:
    """What is modelled for the profile is modelled here; the fit moves a little between the two."""
    measured = load_hardware_profile("a100-80g-llama-2-7b").costs.cost
    derived = derive_cost_model(LLAMA_2_7B, A100_80G)
    assert derived.rows_s == measured.rows_s
    assert derived.step_time_s(load) == pytest.approx(measured.step_time_s(load), rel=0.05)


@pytest.mark.parametrize("load", LOADS)
def test_no_step_is_faster_than_the_data_sheet_allows(load: StepLoad) -> None:
    for shape in SHAPES.values():
        seconds = derive_cost_model(shape, A10).step_time_s(load)
        peak_s = peak_step_s(shape, A10, load, counts_bytes=True)
        assert 1.2 * peak_s < seconds < 2.0 * peak_s
        assert peak_step_s(shape, A10, load, counts_bytes=False) < peak_s


def test_an_a10_needs_longer_by_the_ratio_of_what_bounds_a_step() -> None:
    slow, fast = derive_cost_model(LLAMA_2_7B, A10), derive_cost_model(LLAMA_2_7B, A100_80G)
    assert slow.rows_s(1) / fast.rows_s(1) == pytest.approx(2.039e12 / 600e9, rel=1e-3)
    assert slow.rows_s(4096) / fast.rows_s(4096) == pytest.approx(312 / 125, rel=0.05)
    assert slow.decode_context_s / fast.decode_context_s == pytest.approx(2.039e12 / 600e9)
    assert slow.prefill_pair_s / fast.prefill_pair_s == pytest.approx(312 / 125)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("opt-6.7b", 6.66e9), ("opt-13b", 12.85e9), ("qwen2-beta-7b", 7.72e9), ("llama-2-13b", 13.02e9)],
)
def test_weights_are_as_many_as_published(name: str, parameters: float) -> None:
    assert SHAPES[name].weight_bytes == pytest.approx(2 * parameters, rel=0.003)


def test_layers_relate_to_the_link_as_the_paper_measured() -> None:
    """Figure 2: a transfer takes 3.5 and 13.8 times a layer's computation."""
    shape = SHAPES["qwen2-beta-7b"]
    cost = derive_cost_model(shape, A10)
    for one, paper in (((0, 256, True), 3.5), ((256, 1, True), 13.8)):
        layer_s = cost.step_time_s(StepLoad.of([one] * 4)) / shape.num_layers
        assert shape.layer_bytes / 24e9 / layer_s == pytest.approx(paper, rel=0.2)
