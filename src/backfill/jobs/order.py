"""Chooses the batch whose line runs next: fair between owners, in the order of the pool within an owner."""

from __future__ import annotations

import bisect
import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from backfill.jobs.feed import Feed


@dataclass(slots=True, eq=False)
class _Owner:
    number: int
    weight: float
    last_served: int
    num_in_flight: int = 0
    feeds: list[Feed] = field(default_factory=list)  # in the order in which they were added
    is_waiting: bool = False

    @property
    def turn(self) -> tuple[float, int, int]:
        return self.num_in_flight / self.weight, self.last_served, self.number


class FairOrder:
    """Feeds with waiting lines, and the number of lines in flight of each owner.

    The next owner has the fewest lines in flight over its weight; a tie goes to the owner served longest
    ago. The owner's next feed has the least turn, then the earliest deadline; a tie goes to the feed added
    first.

    Only owners with waiting lines are searched: the cost hardly depends on the number of owners.

    Args:
        weight_of: an owner's weight, from its first feed to its last.
    """

    def __init__(self, weight_of: Callable[[str], float]) -> None:
        self._weight_of = weight_of
        self._owners: dict[str, _Owner] = {}
        self._in_turn: list[_Owner] = []  # owners with waiting lines, sorted by turn
        self._num_added = 0
        self._num_taken = 0
        self.num_in_flight = 0

    def add(self, feed: Feed) -> None:
        self._num_added += 1
        # A new owner counts as served just now: else an owner that comes and goes would always be first.
        if feed.owner not in self._owners:
            weight = self._weight_of(feed.owner)
            self._owners[feed.owner] = _Owner(self._num_added, weight, self._num_taken)
        with self._changing(feed) as of_owner:
            of_owner.feeds.append(feed)

    def remove(self, feed: Feed) -> None:
        """Its lines are no longer in flight either. An unknown feed is ignored."""
        if not self._has(feed):
            return
        self.num_in_flight -= feed.num_in_flight
        with self._changing(feed) as of_owner:
            of_owner.num_in_flight -= feed.num_in_flight
            of_owner.feeds.remove(feed)
        if not of_owner.feeds:
            del self._owners[feed.owner]

    def next(self, accepts: Callable[[Feed], bool] = lambda feed: True) -> Feed | None:
        """The accepted feed whose line is next; None where there is none. Changes nothing."""
        for of_owner in self._in_turn:
            feeds = [feed for feed in of_owner.feeds if feed.has_lines and accepts(feed)]
            if feeds:
                return min(feeds, key=lambda feed: (feed.turn, feed.deadline_at_s))
        return None

    @property
    def has_waiting(self) -> bool:
        return bool(self._in_turn)

    def has_share(self, owner: str, capacity: int) -> bool:
        """Whether an owner with waiting lines has its share of the capacity in flight.

        That is its weight over the weights of all owners with waiting lines.
        """
        of_owner, weights = self._owners[owner], sum(each.weight for each in self._in_turn)
        return of_owner.num_in_flight >= math.ceil(capacity * of_owner.weight / weights)

    def note_taken(self, feed: Feed) -> None:
        """A line of the feed is in flight."""
        self._num_taken += 1
        self.num_in_flight += 1
        with self._changing(feed) as of_owner:
            of_owner.num_in_flight += 1
            of_owner.last_served = self._num_taken

    def note_ended(self, feed: Feed, num_lines: int = 1) -> None:
        """Lines of the feed are no longer in flight. A removed feed is ignored."""
        if self._has(feed):
            self.num_in_flight -= num_lines
            with self._changing(feed) as of_owner:
                of_owner.num_in_flight -= num_lines

    def note_waiting(self, feed: Feed) -> None:
        """The feed may have waiting lines now, or none any more. A removed feed is ignored."""
        if self._has(feed):
            with self._changing(feed):
                pass

    def _has(self, feed: Feed) -> bool:
        return feed.owner in self._owners and feed in self._owners[feed.owner].feeds

    @contextlib.contextmanager
    def _changing(self, feed: Feed) -> Iterator[_Owner]:
        """Take the feed's owner out of ``_in_turn``, and insert it again after its turn has changed."""
        of_owner = self._owners[feed.owner]
        if of_owner.is_waiting:
            place = bisect.bisect_left(self._in_turn, of_owner.turn, key=lambda owner: owner.turn)
            assert self._in_turn[place] is of_owner
            del self._in_turn[place]
        yield of_owner
        of_owner.is_waiting = any(each.has_lines for each in of_owner.feeds)
        if of_owner.is_waiting:
            bisect.insort(self._in_turn, of_owner, key=lambda owner: owner.turn)
