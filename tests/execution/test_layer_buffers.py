"""Every layer is in its buffer when it is computed, and no more is fetched than must be."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backfill.execution.layer_buffers import Fetch, LayerBuffers
from backfill.offloading.interval import num_device_layers, offloaded_layers
from tests.shared import examples


class Memory:
    """The buffers' contents: fetches are made at once, in their order."""

    def __init__(self, buffers: LayerBuffers, num_layers: int) -> None:
        self.buffers = buffers
        self.num_layers = num_layers
        self.contents: dict[int, int] = {}
        self.fetched: list[int] = []
        self.make(buffers.prefetch(0))

    def make(self, fetches: Iterable[Fetch]) -> None:
        for fetch in fetches:
            assert fetch.buffer < self.buffers.num_buffers
            self.contents[fetch.buffer] = fetch.layer
            self.fetched.append(fetch.layer)

    def run(self, first: int, last: int) -> None:
        """Compute layers ``[first, last)`` as a streamer does."""
        for layer in range(first, last):
            fetch, _ = self.buffers.claim(layer)
            self.make([] if fetch is None else [fetch])
            self.make(self.buffers.prefetch(layer + 1))
            assert self.contents[self.buffers.buffer_of(layer)] == layer
            self.buffers.release(layer)
            self.make(self.buffers.prefetch(layer + 1))
            self.check()

    def check(self) -> None:
        """Every buffer is held or free, and none of those that were given up."""
        buffers = self.buffers
        assert sorted([*buffers._buffer_of.values(), *buffers._free]) == list(range(buffers.num_buffers))

    def resize(self, num_buffers: int) -> None:
        for buffer, layer in self.buffers.set_num_buffers(num_buffers):
            held = self.contents.pop(buffer, None)
            assert layer is None or held == layer
        self.make(self.buffers.prefetch(0))
        self.check()


@st.composite
def schedules(draw: st.DrawFn) -> tuple[int, int, list[tuple[int, int, int, int]]]:
    """Layers, the most buffers, and passes with intervals and any number of buffers that these allow."""
    num_layers = draw(st.integers(1, 16))
    most = num_device_layers(num_layers, draw(st.integers(1, num_layers)))
    passes = []
    for _ in range(draw(st.integers(1, 8))):
        allowed = [i for i in range(1, num_layers + 1) if num_device_layers(num_layers, i) <= most]
        interval = draw(st.sampled_from(allowed))
        num_buffers = draw(st.integers(num_device_layers(num_layers, interval), most))
        first = draw(st.integers(0, num_layers - 1))
        passes.append((interval, num_buffers, first, draw(st.integers(first + 1, num_layers))))
    return num_layers, most, passes


@settings(max_examples=examples(300))
@given(schedules())
def test_layers_are_there_while_buffers_are_taken_away_and_given_back(
    schedule: tuple[int, int, list[tuple[int, int, int, int]]],
) -> None:
    num_layers, most, passes = schedule
    memory = Memory(LayerBuffers(num_layers, most, interval=1), num_layers)
    for interval, num_buffers, first, last in passes:
        if num_buffers > memory.buffers.num_buffers:
            memory.resize(num_buffers)
        memory.buffers.set_interval(interval)
        memory.resize(num_buffers)
        assert memory.buffers.num_buffers == num_buffers
        memory.run(first, last)
    for _ in range(num_layers + 2):
        memory.run(0, num_layers)
    memory.fetched.clear()
    memory.run(0, num_layers)
    assert sorted(memory.fetched) == list(offloaded_layers(num_layers, memory.buffers.interval))


def test_only_layers_in_the_buffers_that_are_given_up_are_fetched_again() -> None:
    memory = Memory(LayerBuffers(num_layers=12, num_buffers=num_device_layers(12, 6), interval=6), 12)
    memory.run(0, 12)
    memory.buffers.set_interval(3)
    given_up = {layer for layer, buffer in memory.buffers._buffer_of.items() if buffer >= 10}
    memory.fetched.clear()
    memory.resize(num_device_layers(12, 3))
    memory.run(0, 12)
    assert set(memory.fetched) <= {*offloaded_layers(12, 3), *given_up}


@pytest.mark.parametrize("num_buffers", [9, 12])
def test_a_number_of_buffers_that_is_too_small_or_too_large_is_refused(num_buffers: int) -> None:
    buffers = LayerBuffers(num_layers=12, num_buffers=num_device_layers(12, 4), interval=3)
    with pytest.raises(ValueError, match=f"10 to 11 buffers are possible, got {num_buffers}"):
        buffers.set_num_buffers(num_buffers)
    assert buffers.num_buffers == 11


def test_a_transfer_begins_as_soon_as_a_staging_buffer_is_free_also_for_the_next_pass() -> None:
    memory = Memory(LayerBuffers(num_layers=12, num_buffers=num_device_layers(12, 3), interval=3), 12)
    memory.run(0, 12)
    assert sorted(memory.buffers._buffer_of) == [0, 1, 2, 3, 4, 5, 6, 7, 9, 10]
    begun = []
    for layer in range(12):
        memory.fetched.clear()
        memory.run(layer, layer + 1)
        begun.append((layer, memory.fetched[:]))
    assert [each for each in begun if each[1]] == [(2, [8]), (5, [11]), (8, [2]), (11, [5])]


def test_a_pass_that_begins_again_takes_the_buffer_of_the_layer_that_is_needed_last() -> None:
    buffers = LayerBuffers(num_layers=6, num_buffers=2, interval=1)
    memory = Memory(buffers, 6)
    memory.run(0, 3)
    assert sorted(buffers._buffer_of) == [3, 4]
    fetch, evicted = buffers.claim(0)
    assert (fetch, evicted) == (Fetch(0, buffers.buffer_of(0)), 4)


def test_layers_become_resident_where_they_were_staged() -> None:
    """From interval 3 to interval 4 and back, without a fetch more than the passes need anyway."""
    memory = Memory(LayerBuffers(num_layers=12, num_buffers=num_device_layers(12, 4), interval=3), 12)
    fetched = []
    for interval in (3, 3, 4, 4, 3, 3):
        memory.buffers.set_interval(interval)
        memory.fetched.clear()
        memory.run(0, 12)
        fetched.append(sorted(memory.fetched))
    of_3, of_4 = [2, 5, 8, 11], [3, 7, 11]
    assert fetched[1:4] == [of_3, of_4, of_4]
    assert fetched[-1] == of_3
    assert len(fetched[4]) <= 4


@pytest.mark.parametrize("interval", [0, 13, 5])
def test_an_interval_that_the_buffers_do_not_allow_is_refused(interval: int) -> None:
    buffers = LayerBuffers(num_layers=12, num_buffers=num_device_layers(12, 4), interval=4)
    with pytest.raises(ValueError, match="interval"):
        buffers.set_interval(interval)
    assert buffers.interval == 4
