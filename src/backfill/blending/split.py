"""A pool split among devices that each serve a part of it (data parallelism).

Source: BlendServe (section 6.1).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from backfill.blending.estimates import OutputHistory
from backfill.blending.requests import PoolRequest
from backfill.blending.resources import Floats, ResourceModel
from backfill.blending.run import Entry, Run
from backfill.core.errors import ConfigError, RequestError


def split_requests(
    requests: Sequence[PoolRequest], num_shards: int, resources: ResourceModel
) -> list[list[int]]:
    """Request ids of each shard, in the order given. Every request is in one shard.

    Each shard is one block from the left end of the blend's order and one from its right end, of equal
    expected compute and equal expected memory time in all shards, to within about a request at each end. So
    only prefixes on the cuts are computed by more than one shard. The result depends on the arguments
    alone.

    Raises: ConfigError for less than one shard; RequestError for a malformed request or an id used twice.
    """
    if num_shards < 1:
        raise ConfigError(f"must be at least 1, got {num_shards}", field="shards")
    if len({request.request_id for request in requests}) < len(requests):
        raise RequestError("request ids must be unique", param="request_id")
    if not requests:
        return [[] for _ in range(num_shards)]
    run = Run([Entry.of(request, number) for number, request in enumerate(requests)], 1)
    run.plan("blend", resources, OutputHistory())
    cuts = _Cuts(run.costs.compute_s[run.sequence], run.costs.memory_s[run.sequence])
    shards: list[list[int]] = []
    for num_left in range(num_shards, 0, -1):
        blocks = cuts.next(num_left)
        numbers = sorted(run.entries[index].sequence for block in blocks for index in run.sequence[block])
        shards.append([requests[number].request_id for number in numbers])
    return shards


class _Cuts:
    """Cuts equal shares from both ends of a sequence with the given costs."""

    def __init__(self, compute_s: Floats, memory_s: Floats) -> None:
        self._compute_s = np.concatenate(([0.0], np.cumsum(compute_s)))
        self._memory_s = np.concatenate(([0.0], np.cumsum(memory_s)))
        self._low, self._high = 0, len(compute_s)

    def next(self, num_left: int) -> tuple[slice, slice]:
        """The two blocks of the next shard, of so many that are left."""
        low, high = self._low, self._high
        if num_left == 1:
            self._low = high
            return slice(low, high), slice(high, high)
        share_s = (self._memory_s[high] - self._memory_s[low]) / num_left

        def has_little_memory(left_end: int) -> bool:
            right_start = self._right_start(left_end, num_left)
            of_left = self._memory_s[left_end] - self._memory_s[low]
            return bool(of_left + self._memory_s[high] - self._memory_s[right_start] <= share_s)

        # The longer the block on the left, which has the compute, the less memory time for the same compute.
        most = self._left_end(num_left)
        left_end = bisect_left(range(low, most), True, key=has_little_memory) + low
        right_start = self._right_start(left_end, num_left)
        self._low, self._high = left_end, right_start
        return slice(low, left_end), slice(right_start, high)

    def _left_end(self, num_left: int) -> int:
        """Where a block on the left alone has a share of the compute."""
        start_s, end_s = self._compute_s[self._low], self._compute_s[self._high]
        return self._nearest(start_s + (end_s - start_s) / num_left, self._low)

    def _right_start(self, left_end: int, num_left: int) -> int:
        """Where a block on the right begins that has what is left of a share of the compute."""
        start_s, end_s = self._compute_s[self._low], self._compute_s[self._high]
        rest_s = (end_s - start_s) / num_left - (self._compute_s[left_end] - start_s)
        return self._nearest(end_s - max(rest_s, 0.0), left_end)

    def _nearest(self, compute_s: float, at_least: int) -> int:
        """The index up to which the compute is nearest to the given."""
        end = min(int(np.searchsorted(self._compute_s, compute_s)), self._high)
        if end > 0 and compute_s - self._compute_s[end - 1] < self._compute_s[end] - compute_s:
            end -= 1
        return min(max(end, at_least), self._high)
