"""Step times with offloaded layers; ``tests/execution/test_simulated_weights.py`` has them of a pipeline."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backfill.offloading.interval import (
    LayerTimes,
    num_device_layers,
    offloaded_layers,
    smallest_interval,
    step_time_s,
)

counts = st.integers(1, 24)
durations = st.integers(0, 40).map(float)  # whole numbers: sums are exact


def test_each_of_the_limits() -> None:
    times = LayerTimes(num_layers=12, compute_s=1.0, transfer_s=4.0, other_s=2.0)
    assert step_time_s(times, None) == step_time_s(times, 6) == times.resident_step_s == 14.0
    assert step_time_s(times, 3) == 16.0  # 4 transfers
    assert step_time_s(LayerTimes(12, 1.0, 20.0, 2.0), 12) == 21.0  # one buffer: the transfer, then the layer
    # 2 transfers; between them layers 10, 11, those of the next step's first interval, and the host's part.
    assert step_time_s(LayerTimes(14, 1.0, 5.0, 6.0), 3) == (1 + 2 + 3) + 6 + 2 * 5.0 == 22.0


@given(counts, durations, durations, durations, st.floats(0.0, 2000.0))
def test_the_smallest_interval_holds_and_the_next_smaller_does_not(
    num_layers: int, compute_s: float, transfer_s: float, other_s: float, objective_s: float
) -> None:
    times = LayerTimes(num_layers, compute_s, transfer_s, other_s)
    found = smallest_interval(times, objective_s)
    holding = [each for each in range(1, num_layers + 1) if step_time_s(times, each) <= objective_s]
    assert found == min(holding, default=None)
    if objective_s >= times.resident_step_s + transfer_s:
        assert found is not None


def test_the_printed_formula_offloads_more_layers_than_the_link_can_move() -> None:
    """floor(L / L_offload) of section 4.4, with the computation of all layers where it prints one layer's."""
    times = LayerTimes(num_layers=30, compute_s=1.0, transfer_s=3.5)
    objective_s = times.resident_step_s
    num_hidden = int(objective_s / times.transfer_s)
    printed = times.num_layers // num_hidden
    assert (num_hidden, printed, len(offloaded_layers(30, printed))) == (8, 3, 10)
    assert step_time_s(times, printed) == 35.0 > objective_s
    assert smallest_interval(times, objective_s) == 4


@given(counts, st.integers(1, 24))
def test_the_last_of_every_interval_is_offloaded_and_two_buffers_replace_them(
    num_layers: int, interval: int
) -> None:
    offloaded = offloaded_layers(num_layers, interval)
    assert list(offloaded) == [index for index in range(num_layers) if (index + 1) % interval == 0]
    expected = num_layers if len(offloaded) < 3 else num_layers - len(offloaded) + 2
    assert num_device_layers(num_layers, interval) == expected
    assert num_device_layers(num_layers, None) == num_layers
