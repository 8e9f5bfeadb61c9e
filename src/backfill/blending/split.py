"""A pool split among devices that each serve a part of it (data parallelism).

Source: BlendServe (section 6.1).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from backfill.blending.estimates import OutputHistory
from backfill.blending.requests import PoolRequest
from backfill.blending.resources import Floats, Ints, ResourceModel
from backfill.blending.run import Entry, Run
from backfill.blending.tree import shared_prefix_tokens
from backfill.core.errors import ConfigError, RequestError

CUT_LOSS_FRAC = 0.02
"""Of the prompt tokens of a pool, each shared prefix counted once, those that cuts may compute again."""

MOST_PAIRS = 16
"""More would hardly make shards more alike."""

_LEAST_BLOCK = 8  # requests of a block, in the mean


def split_requests(
    requests: Sequence[PoolRequest],
    num_shards: int,
    resources: ResourceModel,
    *,
    most_pairs: int = MOST_PAIRS,
) -> list[list[int]]:
    """Request ids of each shard, in the order given. Every request is in one shard.

    The blend's order is cut into ranges, of which the first and the last are a pair, and so on inwards. Each
    shard has one block from the left end of each pair and one from its right end, of equal expected compute
    and equal expected memory time in all shards, to within about a request at each end. So a shard has
    requests from all over the order, and its share of what is expected wrongly. There are as many pairs as
    keep what cuts compute again below ``CUT_LOSS_FRAC``. The result depends on the arguments alone.

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
    shards: list[list[int]] = [[] for _ in range(num_shards)]
    for sequence in _pairs(run, num_shards, most_pairs):
        cuts = _Cuts(run.costs.compute_s[sequence], run.costs.memory_s[sequence])
        shards.reverse()  # the first one has the outermost blocks
        for number, shard in enumerate(shards):
            for block in cuts.next(num_shards - number):
                shard += [run.entries[index].sequence for index in sequence[block]]
    return [[requests[number].request_id for number in sorted(shard)] for shard in shards]


def _pairs(run: Run, num_shards: int, most_pairs: int) -> list[Ints]:
    """Ranges of the order, each followed by the one as far from the other end."""
    prompts = [run.entries[index].prompt for index in run.sequence]
    num_shared = sum(shared_prefix_tokens(*neighbours) for neighbours in pairwise(prompts))
    loss_frac = 2 * num_shards * num_shared / len(prompts) / run.costs.num_unique_tokens  # of a pair's cuts
    most = min(len(prompts) // (2 * num_shards * _LEAST_BLOCK), most_pairs)
    num_pairs = max(1, min(most, int(CUT_LOSS_FRAC / loss_frac) if loss_frac else most))
    ranges = np.array_split(run.sequence, 2 * num_pairs)
    return [np.concatenate((ranges[pair], ranges[-1 - pair])) for pair in range(num_pairs)]


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
