"""A limit of the memory that request bodies take, over all connections."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# Bodies up to this size may use the reserved part of the budget.
SMALL_BODY_BYTES = 64 << 10
_RESERVED_PART = 16  # of the budget, for small bodies
_OFFLINE_PART = 4  # of the budget, for offline ones


class Unavailable(Exception):
    """The server cannot take this request now; the client may retry."""


class OfflineUnavailable(Unavailable):
    """The server cannot take an offline request now; the client may retry."""


@dataclass(slots=True)
class HeldBytes:
    """The part of the budget that one body holds."""

    _budget: BodyBudget
    num_bytes: int = 0
    is_offline: bool = False

    def add(self, num_bytes: int) -> None:
        """Raises, adding nothing: Unavailable."""
        is_small = self.num_bytes + num_bytes <= SMALL_BODY_BYTES
        if self._budget.num_bytes + num_bytes > self._budget.limit_of(is_small=is_small):
            raise Unavailable("The server holds too many request bodies. Please retry.")
        self._budget.num_bytes += num_bytes
        self.num_bytes += num_bytes

    def release(self) -> None:
        """Hold nothing any more, before the block is left."""
        self._budget.num_bytes -= self.num_bytes
        if self.is_offline:
            self._budget.num_offline_bytes -= self.num_bytes
        self.num_bytes = 0

    def mark_offline(self) -> None:
        """Count the body as offline. Raises, changing nothing: OfflineUnavailable."""
        if self._budget.num_offline_bytes + self.num_bytes > self._budget.max_offline_bytes:
            raise OfflineUnavailable("The server holds too many bodies of flex requests. Please retry.")
        self._budget.num_offline_bytes += self.num_bytes
        self.is_offline = True


class BodyBudget:
    """Counts the bytes of bodies that are being read or prepared.

    The bytes that have arrived count, not the Content-Length: a client that announces a large body and sends
    nothing holds nothing. Offline bodies may hold a quarter of the budget. A sixteenth is reserved for small
    bodies, so that large bodies that arrive slowly do not block all other requests.

    Args:
        max_bytes: limit of all bodies together.
        max_body_bytes: limit of one body. One such body of either class always fits when there are no others.
    """

    def __init__(self, max_bytes: int, max_body_bytes: int) -> None:
        self.num_bytes = 0
        self.num_offline_bytes = 0
        self.max_offline_bytes = max(max_body_bytes, max_bytes // _OFFLINE_PART)
        self._max_bytes = max_bytes
        self._max_large_bytes = max(max_body_bytes, max_bytes - max_bytes // _RESERVED_PART)

    def limit_of(self, *, is_small: bool) -> int:
        """The total of bytes, over all bodies, up to which a small or large body may grow."""
        return self._max_bytes if is_small else self._max_large_bytes

    @contextmanager
    def hold(self) -> Iterator[HeldBytes]:
        """Count one body until the block is left."""
        held = HeldBytes(self)
        try:
            yield held
        finally:
            held.release()
