from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backfill.costs.behaviour import NoiseSource
from backfill.offloading.interval import LayerTimes, step_time_s
from backfill.simulation.device import HOST_S
from experiments.selectn.bus import BusEngine, run_beside
from experiments.selectn.model import SHAPES, OffloadedModel, PhaseLoad
from tests.shared import examples


def engine(interval: int | None, *, num_layers: int = 12, layer_s: float = 0.001) -> BusEngine:
    return BusEngine(num_layers, interval, 1.0, lambda: layer_s, 0.002)


@pytest.mark.parametrize("interval", [None, 1, 5, 32])
def test_alone_steps_are_those_of_the_simulated_executor(interval: int | None) -> None:
    model, load = OffloadedModel(SHAPES["opt-6.7b"]), PhaseLoad("decode", 2, 64)
    noise, layer_s = NoiseSource(model.noise, 1), model.compute_s(load) / 32
    one = BusEngine(32, interval, model.shape.layer_bytes, lambda: layer_s * noise.draw(), HOST_S)
    alone = run_beside([one], model.link_bytes_per_s, 60)[0]
    assert alone.seconds[:60] == pytest.approx(model.run(load, interval, num_steps=60).seconds)


@settings(max_examples=examples(40))
@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 12))
def test_alone_mean_steps_take_what_the_formula_says(
    num_layers: int, interval: int, transfer_ms: int
) -> None:
    interval = min(interval, num_layers)
    one = engine(interval, num_layers=num_layers)
    times = run_beside([one], 1000 / transfer_ms, 48, warm_up=48)[0]
    expected_s = step_time_s(LayerTimes(num_layers, 0.001, transfer_ms / 1e3, 0.002), interval)
    assert times.mean_s == pytest.approx(expected_s, rel=1e-6)


def test_equal_engines_share_the_bus_evenly() -> None:
    """With transfers the limit, each has half of the bandwidth; one that transfers nothing takes none."""
    both = run_beside([engine(1), engine(1)], 1000.0, 40)
    assert [times.mean_s for times in both] == pytest.approx([2 * 12 / 1000] * 2)
    one, resident = run_beside([engine(2), engine(None)], 200.0, 40)
    assert one.mean_s == pytest.approx(6 / 200)
    assert resident.mean_s == pytest.approx(0.014)


def test_what_one_engine_leaves_another_one_uses() -> None:
    """The second needs more than half of the bus, and the first leaves it more than half."""
    light, heavy = run_beside([engine(6), engine(2)], 500.0, 200)
    assert light.mean_s == pytest.approx(0.014, rel=0.02)
    # 500 a second, of which the light one takes 2 in 14 ms.
    assert heavy.mean_s == pytest.approx(6 / (500 - 2 / 0.014), rel=0.05)
