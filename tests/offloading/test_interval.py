"""Step times with offloaded layers, against a simulation of the pipeline event by event."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backfill.offloading.interval import (
    LayerTimes,
    num_device_layers,
    offloaded_layers,
    smallest_interval,
    step_time_s,
)
from tests.shared import examples

counts = st.integers(1, 24)
durations = st.integers(0, 40).map(float)  # whole numbers: sums are exact


class Pipeline:
    """Steps back to back on a device, a link and two staging buffers, as events on a clock."""

    def __init__(self, times: LayerTimes, interval: int) -> None:
        self.now_s = 0.0
        self._times = times
        self._offloaded = offloaded_layers(times.num_layers, interval)
        self._events: list[tuple[float, str]] = []
        self._num_free = min(2, len(self._offloaded))
        self._staged: deque[int] = deque()
        self._to_transfer = self._cycle()
        self._in_transfer: int | None = None
        self._layer = 0  # computed next, or now
        self._is_computing = False

    def _cycle(self) -> Iterator[int]:
        while self._offloaded:
            yield from self._offloaded

    def step_ends(self, num_steps: int) -> list[float]:
        """When the layers of each step are done."""
        ends: list[float] = []
        self._begin_transfer()
        self._begin_layer()
        while len(ends) < num_steps:
            self.now_s, event = heapq.heappop(self._events)
            if event == "transferred":
                assert self._in_transfer is not None
                self._staged.append(self._in_transfer)
                self._in_transfer = None
            elif event == "computed":
                self._is_computing = False
                if self._layer in self._offloaded:
                    self._num_free += 1
                self._layer += 1
                if self._layer == self._times.num_layers:
                    ends.append(self.now_s)
                    self._is_computing = True  # the host's part of the step
                    heapq.heappush(self._events, (self.now_s + self._times.other_s, "next step"))
            else:
                self._is_computing, self._layer = False, 0
            self._begin_transfer()
            self._begin_layer()
        return ends

    def _begin_transfer(self) -> None:
        if self._in_transfer is None and self._num_free and self._offloaded:
            self._in_transfer = next(self._to_transfer)
            self._num_free -= 1
            heapq.heappush(self._events, (self.now_s + self._times.transfer_s, "transferred"))

    def _begin_layer(self) -> None:
        if self._is_computing:
            return
        if self._layer in self._offloaded:
            if not (self._staged and self._staged[0] == self._layer):
                return
            self._staged.popleft()
        self._is_computing = True
        heapq.heappush(self._events, (self.now_s + self._times.compute_s, "computed"))


def simulated_step_s(times: LayerTimes, interval: int) -> float:
    """Mean of steps after the first ones: an interval may repeat only after several steps."""
    ends = Pipeline(times, interval).step_ends(1 + 480 + 240)
    return (ends[-1] - ends[480]) / 240


@settings(max_examples=examples(120), deadline=None)
@given(counts, st.integers(1, 24), durations, durations, durations)
def test_step_times_are_those_of_the_pipeline(
    num_layers: int, interval: int, compute_s: float, transfer_s: float, other_s: float
) -> None:
    times = LayerTimes(num_layers, compute_s, transfer_s, other_s)
    interval = min(interval, num_layers)
    assert step_time_s(times, interval) == pytest.approx(simulated_step_s(times, interval), rel=1e-9)


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
