"""KV blocks and layers' buffers in one memory: none overlaps another that is in use."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backfill.execution.arena import DeviceArena
from backfill.models.movable import PAGE_BYTES
from backfill.offloading.interval import num_device_layers
from backfill.offloading.residency import common_residencies, residencies
from tests.shared import examples

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES, ids=str)
@settings(max_examples=examples(100), deadline=None)
@given(
    num_blocks=st.integers(1, 9),
    block_floats=st.integers(1, 3000),
    num_layers=st.integers(1, 9),
    buffer_pages=st.integers(1, 3),
    data=st.data(),
)
def test_what_blocks_and_buffers_hold_stays_when_memory_changes_hands(
    device: torch.device,
    num_blocks: int,
    block_floats: int,
    num_layers: int,
    buffer_pages: int,
    data: st.DataObject,
) -> None:
    largest = data.draw(st.integers(1, num_layers))
    sizes = buffer_pages * PAGE_BYTES, 4 * block_floats
    choices = residencies(num_layers, 1, largest, num_blocks, *sizes)
    arena = DeviceArena(num_blocks, sizes[1], num_device_layers(num_layers, largest), sizes[0], device)
    pool = arena.kv_pool((choices[0].num_blocks, block_floats), torch.float32)
    assert all(each.data_ptr() % PAGE_BYTES == 0 and len(each) == sizes[0] for each in arena.buffers)
    for _ in range(3):
        chosen = data.draw(st.sampled_from(choices))
        in_use = arena.buffers[: num_device_layers(num_layers, chosen.interval)]
        for number, buffer in enumerate(in_use):
            buffer.fill_(number)
        pool[: chosen.num_blocks] = -1.0
        assert all(buffer.eq(number).all() for number, buffer in enumerate(in_use))
        assert pool[: chosen.num_blocks].eq(-1.0).all()


def test_of_ranks_the_one_with_the_least_room_bounds_the_pool() -> None:
    stages = (7, 5)
    ranks = [residencies(layers, 1, 4, 10, 100, 10 * layers, stages) for layers in stages]
    assert [[each.num_blocks for each in rank] for rank in ranks] == [[17, 11, 10], [16, 10, 10]]
    larger = residencies(7, 1, 4, 10, 300, 70, stages)
    found = common_residencies([larger, ranks[1]])
    assert [(each.interval, each.num_blocks) for each in found] == [(1, 16), (2, 10), (4, 10)]
