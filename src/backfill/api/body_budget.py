"""The memory that request bodies may take, over all connections."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

# A body up to this size finds room where larger ones find none.
SMALL_BODY_BYTES = 64 << 10
_RESERVED_PART = 16  # of the budget, for small bodies
_OFFLINE_PART = 4  # of the budget, for offline ones


class Unavailable(Exception):
    """The server cannot take this request now; the client may retry."""


class OfflineUnavailable(Unavailable):
    """The server cannot take an offline request now; the client may retry."""


class HeldBytes:
    """What one body takes of the budget."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.num_bytes = 0
        self.is_offline = False

    def add(self, num_bytes: int) -> None:
        """Raises, adding nothing: Unavailable."""
        is_small = self.num_bytes + num_bytes <= SMALL_BODY_BYTES
        if self._budget.num_bytes + num_bytes > self._budget.limit_of(is_small=is_small):
            raise Unavailable("The server holds as many request bodies as it may. Please retry.")
        self._budget.num_bytes += num_bytes
        self.num_bytes += num_bytes

    def become_offline(self) -> None:
        """Count the body among the offline ones. Raises, changing nothing: OfflineUnavailable."""
        if self._budget.num_offline_bytes + self.num_bytes > self._budget.max_offline_bytes:
            raise OfflineUnavailable(
                "The server holds as many bodies of flex requests as it may. Please retry."
            )
        self._budget.num_offline_bytes += self.num_bytes
        self.is_offline = True


class BodyBudget:
    """Counts the bytes of bodies that are being read or prepared.

    A body counts as it arrives and not as announced: who announces much and sends nothing takes nothing.
    Offline bodies may hold a quarter, so that they leave room for online ones. A sixteenth is for small
    bodies only, so that large ones that come slowly do not keep everybody out.

    Args:
        max_bytes: of all bodies.
        max_body_bytes: of one, for which there is room whatever its class, if there are no others.
    """

    def __init__(self, max_bytes: int, max_body_bytes: int) -> None:
        self.num_bytes = 0
        self.num_offline_bytes = 0
        self.max_offline_bytes = max(max_body_bytes, max_bytes // _OFFLINE_PART)
        self._max_bytes = max_bytes
        self._max_large_bytes = max(max_body_bytes, max_bytes - max_bytes // _RESERVED_PART)

    def limit_of(self, *, is_small: bool) -> int:
        """Bytes of all bodies up to which such a body may grow."""
        return self._max_bytes if is_small else self._max_large_bytes

    @contextmanager
    def hold(self) -> Iterator[HeldBytes]:
        """Room for one body until the block is left."""
        held = HeldBytes(self)
        try:
            yield held
        finally:
            self.num_bytes -= held.num_bytes
            if held.is_offline:
                self.num_offline_bytes -= held.num_bytes
