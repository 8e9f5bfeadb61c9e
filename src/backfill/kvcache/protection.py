"""How much of what online requests used is kept from offline ones, and for how long."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from backfill.kvcache.content import BlockKey

_MOST_SHARE = 0.5  # of a pool
_REUSE_TIMES = 4.0  # protection lasts this many times the mean time until content is used again
_LEAST_S, _MOST_S = 5.0, 60.0
_WEIGHT = 0.1  # of the latest online request in the means; an idle night counts in them as a minute or two


@dataclass(frozen=True, slots=True)
class CacheReuse:
    """What online requests have used before, as far as it was cached or is remembered.

    Attributes:
        blocks: of one request, in the mean.
        interval_s: from one request to the next.
        per_s: how often a block that is protected is used again.
    """

    blocks: float
    interval_s: float
    per_s: float


class CacheProtection:
    """Learns from online requests whether protecting their cache pays.

    What pays is content that is used again. So the protected share follows the share of online prompt tokens
    that an online request had used before, and protection lasts as long as it typically takes until then.
    Keys of evicted content are remembered for a while, as in ARC (Megiddo and Modha, FAST 2003): otherwise
    content evicted too early would look like content that nobody uses again.

    Args:
        num_blocks: in the device's pool; as many keys of evicted content are remembered.

    Attributes:
        max_blocks: of the device, that are protected at most: what pays beside offline requests
            (``KeptCache``); inf where that is not known.
    """

    def __init__(self, num_blocks: int) -> None:
        self._evicted: OrderedDict[BlockKey, float] = OrderedDict()  # with the time of its release
        self._num_blocks = num_blocks
        self._reused_share = _MOST_SHARE  # until it shows that it does not pay
        self._reuse_s = _MOST_S / _REUSE_TIMES
        self._reused_blocks = 0.0
        self._observed_at_s = -math.inf
        self._interval_s = _MOST_S
        self.max_blocks = math.inf

    @property
    def max_share(self) -> float:
        """Most of a pool that is protected."""
        return min(_MOST_SHARE, self._reused_share)

    @property
    def kept_s(self) -> float:
        """How long content is protected after its release."""
        return min(max(_REUSE_TIMES * self._reuse_s, _LEAST_S), _MOST_S)

    @property
    def reuse(self) -> CacheReuse:
        """Observed lately. Content that nobody comes back for is protected for ``kept_s``."""
        share = self._reused_share
        kept_s = share * self._reuse_s + (1.0 - share) * self.kept_s
        return CacheReuse(self._reused_blocks, self._interval_s, share / kept_s)

    def remember(self, key: BlockKey, released_at_s: float) -> None:
        """Online content was evicted everywhere."""
        self._evicted[key] = released_at_s
        if len(self._evicted) > self._num_blocks:
            self._evicted.popitem(last=False)

    def observe(
        self, keys: Sequence[BlockKey], num_found: int, released_at_s: float | None, now_s: float
    ) -> None:
        """An online request has been looked up for the first time.

        Args:
            keys: of its full blocks.
            num_found: leading blocks of it that are cached.
            released_at_s: when an online request released the last of them; None if it is used, or none did.
        """
        if not keys:
            return
        num_used_before = num_found
        for key in keys[num_found:]:
            evicted_at_s = self._evicted.pop(key, None)
            if evicted_at_s is None:
                break
            num_used_before += 1
            released_at_s = evicted_at_s
        self._reused_share += _WEIGHT * (num_used_before / len(keys) - self._reused_share)
        self._reused_blocks += _WEIGHT * (num_used_before - self._reused_blocks)
        if self._observed_at_s > -math.inf:
            gap_s = min(now_s - self._observed_at_s, _MOST_S)
            self._interval_s += _WEIGHT * (gap_s - self._interval_s)
        self._observed_at_s = now_s
        if released_at_s is not None:
            reuse_s = min(now_s - released_at_s, 2 * _MOST_S)
            self._reuse_s += _WEIGHT * (reuse_s - self._reuse_s)
