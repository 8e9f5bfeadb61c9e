"""The thread that reads offloaded layers, and the CUDA stream that copies them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from backfill.execution.layer_buffers import Fetch
from backfill.execution.micro_batches import MicroBatchStreams
from backfill.execution.weight_links import CudaLink, ThreadLink
from backfill.models.movable import allocate_buffers

NUM_BYTES = 4096


class Disk:
    """Reads that wait for permission; a layer's bytes are its index."""

    def __init__(self) -> None:
        self.read_layers: list[int] = []
        self.has_closed = False
        self._may_go = threading.Semaphore(0)
        self.began = threading.Semaphore(0)

    def read(self, layer: int, buffer: Tensor) -> None:
        self.began.release()
        assert self._may_go.acquire(timeout=30.0)
        if layer > 100:
            raise OSError("the disk is gone")
        self.read_layers.append(layer)
        buffer.fill_(layer)

    def let(self, number: int) -> None:
        self._may_go.release(number)

    def close(self) -> None:
        self.has_closed = True


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk()
    yield disk
    disk.let(1000)


def create(disk: Disk, num_buffers: int = 2) -> tuple[ThreadLink, list[Tensor]]:
    buffers = allocate_buffers(num_buffers, NUM_BYTES, torch.device("cpu"))
    return ThreadLink(buffers, disk.read, disk.close), buffers


def later(call: Any, *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=call, args=arguments)
    thread.start()
    return thread


def test_a_wait_ends_when_the_buffer_is_filled(disk: Disk) -> None:
    link, buffers = create(disk)
    link.begin(Fetch(7, 1))
    link.begin(Fetch(8, 0))
    waiting = later(link.wait, 1)
    assert disk.began.acquire(timeout=30.0)
    waiting.join(0.05)
    assert waiting.is_alive()
    disk.let(1)
    waiting.join(30.0)
    assert (buffers[1] == 7).all()
    assert link.num_bytes == NUM_BYTES
    stalled_s = link.stall_s
    assert stalled_s >= 0.05
    link.wait(1)  # nothing is transferred to it any more
    assert (link.num_bytes, link.stall_s) == (NUM_BYTES, stalled_s)
    disk.let(1)
    link.wait(0)
    assert disk.read_layers == [7, 8]
    link.close()


def test_a_transfer_that_is_complete_stalls_nothing(disk: Disk) -> None:
    link, _ = create(disk)
    disk.let(1)
    link.begin(Fetch(3, 0))
    while not link._transfers[0][-1].done():
        pass
    link.wait(0)
    assert (link.num_bytes, link.stall_s) == (NUM_BYTES, 0.0)
    link.close()


def test_a_later_transfer_to_a_buffer_replaces_those_before(disk: Disk) -> None:
    link, buffers = create(disk)
    link.begin(Fetch(1, 0))  # is being read
    assert disk.began.acquire(timeout=30.0)
    link.begin(Fetch(2, 0))  # is dropped
    link.begin(Fetch(3, 1))
    link.begin(Fetch(4, 0))
    disk.let(3)
    link.wait(0)
    link.wait(1)
    assert disk.read_layers == [1, 3, 4]
    assert (buffers[0] == 4).all()
    assert (buffers[1] == 3).all()
    assert link.num_bytes == 2 * NUM_BYTES
    link.close()


def test_after_a_failed_read_every_wait_raises(disk: Disk) -> None:
    link, _ = create(disk)
    disk.let(1)
    link.begin(Fetch(101, 0))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="could not be read") as info:
            link.wait(0)
        assert "the disk is gone" in str(info.value.__cause__)
    link.begin(Fetch(1, 1))
    with pytest.raises(RuntimeError, match="could not be read"):
        link.wait(1)
    link.close()


@pytest.mark.parametrize("how", ["close", "collect"])
def test_its_thread_ends_and_the_file_is_closed(disk: Disk, how: str) -> None:
    before = set(threading.enumerate())
    link, _ = create(disk)
    disk.let(1)
    link.begin(Fetch(1, 0))
    link.wait(0)
    (thread,) = set(threading.enumerate()) - before
    if how == "close":
        link.close()
    del link
    gc.collect()
    thread.join(30.0)
    assert not thread.is_alive()
    assert disk.has_closed


@pytest.mark.gpu
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_on_cuda_a_buffer_is_overwritten_after_its_use_and_read_after_the_copy(
    num_micro_batches: int,
) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    num_layers, num_bytes = 16, 32 << 20
    host = torch.empty((num_layers, num_bytes), dtype=torch.uint8)
    for index in range(num_layers):
        host[index].fill_(index + 1)
    buffers = allocate_buffers(2, num_bytes, device)
    streams = MicroBatchStreams(device, num_micro_batches)
    link = CudaLink(buffers, host, streams)
    sums = []
    # Without synchronization by the host: queued far ahead of the device.
    with streams.forked():
        link.begin(Fetch(0, 0))
        link.begin(Fetch(1, 1))
        for layer in range(num_layers):
            link.wait(layer % 2)
            with streams.of(layer % num_micro_batches):
                torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
                sums.append(buffers[layer % 2].sum(dtype=torch.int64))
            if layer + 2 < num_layers:
                link.begin(Fetch(layer + 2, layer % 2))
    found = [int(each) for each in sums]
    assert found == [num_bytes * (index + 1) for index in range(num_layers)]
    torch.cuda.synchronize()
    link.collect()
    assert link.num_bytes == num_layers * num_bytes
    assert link.stall_s > 0.0  # of the first copy at least
    link.close()


def test_nothing_writes_to_a_buffer_whose_transfer_was_dropped(disk: Disk) -> None:
    link, buffers = create(disk)
    link.begin(Fetch(1, 0))  # is being read
    assert disk.began.acquire(timeout=30.0)
    link.begin(Fetch(2, 1))  # waits
    link.drop(1)
    dropping = later(link.drop, 0)
    dropping.join(0.05)
    assert dropping.is_alive(), "the buffer is still written"
    disk.let(1)
    dropping.join(30.0)
    assert not dropping.is_alive()
    link.begin(Fetch(3, 1))
    disk.let(1)
    link.wait(1)
    assert disk.read_layers == [1, 3]
    assert (buffers[1] == 3).all()
    assert link.num_bytes == NUM_BYTES, "what was dropped does not count"
    assert len(link.times_s) == 2
    link.close()
