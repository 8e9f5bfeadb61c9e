"""KV copies over a bus that engines share."""

from __future__ import annotations

from pathlib import Path

import torch

from backfill.bus.file import BusFile
from backfill.bus.throttle import BusThrottle
from backfill.core.block import BlockCopy, SlotCopy
from backfill.core.plan import BlockCopies, CopyDirections
from backfill.execution.copies import create_copier

BLOCK_SIZE = 8


def test_copies_take_the_time_that_the_bus_needs(tmp_path: Path) -> None:
    pool = torch.randn((12, 3, 2, 2, BLOCK_SIZE, 8))
    original = pool.clone()
    slept_s: list[float] = []
    bus = BusFile(tmp_path / "bus", 1e6, clock=lambda: 0.0)
    throttle = BusThrottle(bus, 1.0, clock=lambda: 0.0, sleep=slept_s.append)
    copier = create_copier(pool, 4, throttle)
    blocks = (BlockCopy(3, 1), BlockCopy(5, 2))
    both = CopyDirections.CHECKPOINT | CopyDirections.RESTORE
    copier.begin(BlockCopies(blocks, (), both, (SlotCopy(4, 3, 1, 3),), ()))
    pool.zero_()
    copier.begin(BlockCopies((), blocks, both, (), (SlotCopy(4, 3, 1, 3),)))
    copier.close()
    for copied in (3, 5):
        assert torch.equal(pool[copied], original[copied])
    assert torch.equal(pool[4, ..., 1:4, :], original[4, ..., 1:4, :])
    num_bytes = 2 * (2 * BLOCK_SIZE + 3) * pool[0].nbytes // BLOCK_SIZE
    assert throttle.num_bytes == num_bytes
    assert slept_s
    assert bus.reserve(0) * 1e6 - num_bytes < 1.0
    bus.close()
