"""Chooses the batch whose line runs next: fair between owners, in the order of the pool within an owner."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(slots=True, eq=False)
class _Owner(Generic[Item]):
    number: int
    weight: float
    last_served: int
    num_in_flight: int = 0
    num_items: int = 0
    waiting: list[_Entry[Item]] = field(default_factory=list)  # items with waiting lines, sorted by key

    @property
    def turn(self) -> tuple[float, int, int]:
        return self.num_in_flight / self.weight, self.last_served, self.number


@dataclass(slots=True, eq=False)
class _Entry(Generic[Item]):
    item: Item
    owner: str
    deadline_at_s: float
    sequence: int
    num_in_flight: int = 0
    is_waiting: bool = False

    @property
    def key(self) -> tuple[float, int]:
        return self.deadline_at_s, self.sequence


class FairOrder(Generic[Item]):
    """Items with waiting lines, and the number of lines in flight of each owner.

    The next owner has the fewest lines in flight over its weight; a tie goes to the owner served longest
    ago. The owner's next item has the least turn, then the earliest deadline; a tie goes to the item added
    first.

    Only owners with waiting lines are searched: the cost hardly depends on the number of owners.

    Args:
        turn: of an item's next line; by default all are equal.
        weight_of: an owner's weight, from its first item to its last.
    """

    def __init__(
        self,
        turn: Callable[[Item], float] = lambda item: 0.0,
        weight_of: Callable[[str], float] = lambda owner: 1.0,
    ) -> None:
        self._turn = turn
        self._weight_of = weight_of
        self._owners: dict[str, _Owner[Item]] = {}
        self._entries: dict[Item, _Entry[Item]] = {}
        self._in_turn: list[_Owner[Item]] = []  # owners with waiting lines, sorted by turn
        self._num_added = 0
        self._num_taken = 0
        self.num_in_flight = 0

    def add(self, item: Item, owner: str, deadline_at_s: float) -> None:
        """The item has waiting lines until ``set_waiting`` says otherwise."""
        self._num_added += 1
        self._entries[item] = _Entry(item, owner, deadline_at_s, self._num_added)
        # A new owner counts as served just now: else an owner that comes and goes would always be first.
        if owner not in self._owners:
            self._owners[owner] = _Owner(self._num_added, self._weight_of(owner), self._num_taken)
        of_owner = self._owners[owner]
        of_owner.num_items += 1
        self.set_waiting(item, True)

    def remove(self, item: Item) -> None:
        """Its lines are no longer in flight either. An unknown item is ignored."""
        if item not in self._entries:
            return
        self.set_waiting(item, False)
        entry = self._entries.pop(item)
        of_owner = self._owners[entry.owner]
        with self._changing(of_owner):
            of_owner.num_in_flight -= entry.num_in_flight
        self.num_in_flight -= entry.num_in_flight
        of_owner.num_items -= 1
        if of_owner.num_items == 0:
            del self._owners[entry.owner]

    def set_waiting(self, item: Item, is_waiting: bool) -> None:
        """Set whether the item has waiting lines. A removed item is ignored."""
        entry = self._entries.get(item)
        if entry is None or entry.is_waiting is is_waiting:
            return
        entry.is_waiting = is_waiting
        of_owner = self._owners[entry.owner]
        with self._changing(of_owner):
            if is_waiting:
                bisect.insort(of_owner.waiting, entry, key=lambda entry: entry.key)
            else:
                del of_owner.waiting[bisect.bisect_left(of_owner.waiting, entry.key, key=lambda e: e.key)]

    def next(self, accepts: Callable[[Item], bool] | None = None) -> Item | None:
        """The accepted item whose line is next; None where there is none. Changes nothing."""
        for of_owner in self._in_turn:
            items = [entry.item for entry in of_owner.waiting if accepts is None or accepts(entry.item)]
            if items:
                return min(items, key=self._turn)  # the first of equals: by deadline
        return None

    @property
    def has_waiting(self) -> bool:
        return bool(self._in_turn)

    def share_of(self, owner: str) -> float:
        """Of an owner with waiting lines, of all lines: its weight over that of all such owners."""
        return self._owners[owner].weight / sum(each.weight for each in self._in_turn)

    def num_in_flight_of(self, owner: str) -> int:
        """Lines of an owner in flight."""
        of_owner = self._owners.get(owner)
        return 0 if of_owner is None else of_owner.num_in_flight

    def note_taken(self, item: Item) -> None:
        """A line of the item is in flight."""
        self._num_taken += 1
        self._add_in_flight(item, 1, last_served=self._num_taken)

    def note_ended(self, item: Item, num_lines: int = 1) -> None:
        """Lines of the item are no longer in flight. A removed item is ignored."""
        if item in self._entries:
            self._add_in_flight(item, -num_lines)

    def _add_in_flight(self, item: Item, num_lines: int, last_served: int | None = None) -> None:
        entry = self._entries[item]
        of_owner = self._owners[entry.owner]
        with self._changing(of_owner):
            of_owner.num_in_flight += num_lines
            if last_served is not None:
                of_owner.last_served = last_served
        entry.num_in_flight += num_lines
        self.num_in_flight += num_lines
        assert entry.num_in_flight >= 0

    @contextlib.contextmanager
    def _changing(self, of_owner: _Owner[Item]) -> Iterator[None]:
        """Take the owner out of ``_in_turn``, and insert it again after its turn has changed."""
        if of_owner.waiting:
            place = bisect.bisect_left(self._in_turn, of_owner.turn, key=lambda owner: owner.turn)
            assert self._in_turn[place] is of_owner
            del self._in_turn[place]
        yield
        if of_owner.waiting:
            bisect.insort(self._in_turn, of_owner, key=lambda owner: owner.turn)
