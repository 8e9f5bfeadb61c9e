from __future__ import annotations

import mmap

import pytest
import torch

from backfill.execution.host_memory import ReservedMemory

PAGE = mmap.PAGESIZE


def resident_pages(memory: ReservedMemory) -> int:
    """Pages of the range that have memory, as the system counts them."""
    address = memory.bytes.data_ptr()
    with open("/proc/self/smaps") as file:
        lines = iter(file)
        for line in lines:
            first, _, rest = line.partition("-")
            last = rest.split()[0] if rest else ""
            if last and int(first, 16) <= address < int(last, 16):
                kib = next(each for each in lines if each.startswith("Rss:")).split()[1]
                return int(kib) * 1024 // PAGE
    raise AssertionError("the range is not mapped")


def test_memory_is_taken_when_it_is_written_and_given_back() -> None:
    memory = ReservedMemory(64 * PAGE)
    before = resident_pages(memory)
    memory.bytes[: 16 * PAGE] = 1
    assert resident_pages(memory) >= before + 16
    memory.release(4 * PAGE, 16 * PAGE)
    assert resident_pages(memory) <= before + 4
    assert memory.bytes[: 4 * PAGE].eq(1).all()
    assert memory.bytes[4 * PAGE :].eq(0).all()
    memory.bytes[5 * PAGE] = 2
    assert memory.bytes[5 * PAGE] == 2


@pytest.mark.parametrize(("first", "last"), [(1, 2 * PAGE - 1), (PAGE + 1, 2 * PAGE), (7, 9), (PAGE, PAGE)])
def test_pages_that_are_in_use_in_part_are_kept(first: int, last: int) -> None:
    memory = ReservedMemory(4 * PAGE)
    memory.bytes[:] = 1
    memory.release(first, last)
    assert memory.bytes.eq(1).all()


def test_a_view_outlives_the_range_it_was_made_of() -> None:
    view = ReservedMemory(4 * PAGE).bytes.view(torch.float32)[:3]
    view[:] = 1.5
    assert view.tolist() == [1.5, 1.5, 1.5]
