"""Every layer is in its slot when it is computed, and no more is fetched than must be."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backfill.costs.offloading import num_device_layers, offloaded_layers
from backfill.execution.layer_slots import Fetch, LayerSlots


class Memory:
    """The slots' contents: fetches are made at once, in their order."""

    def __init__(self, slots: LayerSlots, num_layers: int) -> None:
        self.slots = slots
        self.num_layers = num_layers
        self.contents: dict[int, int] = {}
        self.fetched: list[int] = []
        self.make(slots.prefetch(0))

    def make(self, fetches: Iterable[Fetch]) -> None:
        for fetch in fetches:
            assert 0 <= fetch.slot < self.slots.num_slots
            self.contents[fetch.slot] = fetch.layer
            self.fetched.append(fetch.layer)

    def run(self, first: int, last: int) -> None:
        """Compute layers ``[first, last)`` as a streamer does."""
        for layer in range(first, last):
            fetch, _ = self.slots.claim(layer)
            self.make([] if fetch is None else [fetch])
            self.make(self.slots.prefetch(layer + 1))
            assert self.contents[self.slots.slot_of(layer)] == layer
            self.slots.release(layer)
            self.make(self.slots.prefetch(layer + 1))
            held = self.slots._slot_of
            assert sorted([*held.values(), *self.slots._free]) == list(range(self.slots.num_slots))


@st.composite
def schedules(draw: st.DrawFn) -> tuple[int, int, list[tuple[int, int, int]]]:
    """Layers, slots, and passes that begin and end anywhere, each with an interval that these slots allow."""
    num_layers = draw(st.integers(1, 16))
    residency = draw(st.integers(1, num_layers))
    num_slots = num_device_layers(num_layers, residency)
    allowed = [i for i in range(1, num_layers + 1) if num_device_layers(num_layers, i) <= num_slots]
    passes = []
    for _ in range(draw(st.integers(1, 8))):
        first = draw(st.integers(0, num_layers - 1))
        passes.append((draw(st.sampled_from(allowed)), first, draw(st.integers(first + 1, num_layers))))
    return num_layers, num_slots, passes


@settings(max_examples=300)
@given(schedules())
def test_each_layer_is_in_its_slot_when_it_is_computed(
    schedule: tuple[int, int, list[tuple[int, int, int]]],
) -> None:
    num_layers, num_slots, passes = schedule
    memory = Memory(LayerSlots(num_layers, num_slots, passes[0][0]), num_layers)
    for interval, first, last in passes:
        memory.slots.set_interval(interval)
        memory.run(first, last)
    # Whatever happened before: soon only offloaded layers are fetched, each once a pass, in order.
    for _ in range(num_layers + 2):
        memory.run(0, num_layers)
    memory.fetched.clear()
    memory.run(0, num_layers)
    assert sorted(memory.fetched) == list(offloaded_layers(num_layers, memory.slots.interval))


def test_a_transfer_begins_as_soon_as_a_staging_buffer_is_free_also_for_the_next_pass() -> None:
    memory = Memory(LayerSlots(num_layers=12, num_slots=num_device_layers(12, 3), interval=3), 12)
    memory.run(0, 12)
    assert sorted(memory.slots._slot_of) == [0, 1, 2, 3, 4, 5, 6, 7, 9, 10]
    begun = []
    for layer in range(12):
        memory.fetched.clear()
        memory.run(layer, layer + 1)
        begun.append((layer, memory.fetched[:]))
    assert [each for each in begun if each[1]] == [(2, [8]), (5, [11]), (8, [2]), (11, [5])]


def test_a_pass_that_begins_again_takes_the_buffer_of_the_layer_that_is_needed_last() -> None:
    slots = LayerSlots(num_layers=6, num_slots=2, interval=1)
    memory = Memory(slots, 6)
    memory.run(0, 3)
    assert sorted(slots._slot_of) == [3, 4]
    fetch, evicted = slots.claim(0)
    assert (fetch, evicted) == (Fetch(0, slots.slot_of(0)), 4)


def test_layers_become_resident_where_they_were_staged() -> None:
    """From interval 3 to interval 4 and back, without a fetch more than the passes need anyway."""
    memory = Memory(LayerSlots(num_layers=12, num_slots=num_device_layers(12, 4), interval=3), 12)
    fetched = []
    for interval in (3, 3, 4, 4, 3, 3):
        memory.slots.set_interval(interval)
        memory.fetched.clear()
        memory.run(0, 12)
        fetched.append(sorted(memory.fetched))
    of_3, of_4 = [2, 5, 8, 11], [3, 7, 11]
    assert fetched[1:4] == [of_3, of_4, of_4]
    assert fetched[-1] == of_3
    assert len(fetched[4]) <= 4


@pytest.mark.parametrize("interval", [0, 13, 5])
def test_an_interval_that_the_slots_do_not_allow_is_refused(interval: int) -> None:
    slots = LayerSlots(num_layers=12, num_slots=num_device_layers(12, 4), interval=4)
    with pytest.raises(ValueError, match="interval"):
        slots.set_interval(interval)
    assert slots.interval == 4
