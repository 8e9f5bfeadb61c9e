"""What ranks report of transfers, as one executor's."""

from __future__ import annotations

from backfill.core.plan import WeightTransfers
from backfill.parallel.merge import merge_transfers


def test_bytes_add_up_and_ranks_wait_beside_each_other() -> None:
    ranks = [WeightTransfers(2, 100, 0.25, 0.5), WeightTransfers(2, 60, 0.75, 0.25)]
    assert merge_transfers(ranks) == WeightTransfers(2, 160, 0.75, 0.5)


def test_without_offloading_there_are_none() -> None:
    assert merge_transfers([]) == WeightTransfers()
