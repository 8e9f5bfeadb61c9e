"""Residency where the link is shared: what an engine asks for, and what it makes of what it gets.

Select-N's coordinator (section 4.5) gives each engine an interval between the smallest that is of use to it
and the largest that its memory allows. Here that interval is a bound: with a smaller one others would miss
their objectives. Within it the engine decides as it does alone, with the transfers that its part of the link
gives it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from backfill.offloading.residency import Residency, ResidencyConfig, ResidencyPolicy, Situation

_NOTICED = 0.1  # a change of the objective by less is not told


@dataclass(frozen=True, slots=True)
class LinkWish:
    """What an engine would do with the link.

    Attributes:
        min_interval: the smallest interval that would be of use if nobody else used the link.
        max_interval: the largest one that its memory can be divided for.
        objective_s: what a step may take; None without online requests.
    """

    min_interval: int
    max_interval: int
    objective_s: float | None


@dataclass(frozen=True, slots=True)
class LinkGrant:
    """What an engine gets.

    Attributes:
        interval: the smallest that leaves the others what they need.
        transfer_s: of a layer, at least, once all have the intervals that they get.
        is_bounded: a smaller interval was wished for.
    """

    interval: int
    transfer_s: float
    is_bounded: bool


class LinkBudget(Protocol):
    """Divides a link among engines. ``engine.bus.BusMember`` does."""

    @property
    def free_transfer_s(self) -> float:
        """Of a layer while nobody else uses the link."""

    def ask(self, wish: LinkWish) -> LinkGrant | None:
        """Wish for this from now on. Returns: the latest grant; None while there is none."""


class SharedLinkPolicy(ResidencyPolicy):
    """Chooses among the residencies that the others on the link leave. See ``ResidencyPolicy``.

    A larger interval that others need is taken at once. A smaller one is taken when it was free for as long
    as offline work has to be alone: each change costs a drain.
    """

    def __init__(
        self,
        choices: Sequence[Residency],
        num_layers: int,
        budget: LinkBudget,
        config: ResidencyConfig | None = None,
    ) -> None:
        super().__init__(choices, num_layers, config)
        self._budget = budget
        self._floor = 1
        self._floor_at_s = -math.inf  # when the floor was last needed
        self._shortest_s = math.inf  # the shortest transfers that were measured
        self._wished: LinkWish | None = None

    def choose(self, situation: Situation) -> Residency:
        """See ``ResidencyPolicy.choose``. Without a grant nothing changes."""
        grant = self._budget.ask(self._wish(situation))
        if situation.transfer_s > 0.0:
            self._shortest_s = min(self._shortest_s, situation.transfer_s)
        if grant is None or self._shortest_s == math.inf:
            return self.target
        self._allow(grant, situation.now_s)
        # The device behind the link may be slower than the part of the link.
        transfer_s = max(grant.transfer_s, self._shortest_s)
        return super().choose(replace(situation, transfer_s=transfer_s))

    def _allow(self, grant: LinkGrant, now_s: float) -> None:
        needed = grant.interval if grant.is_bounded else 1
        if 1 < needed >= self._floor:
            self._floor, self._floor_at_s = needed, now_s
        elif now_s >= self._floor_at_s + self._config.offline_hold_s:
            self._floor = needed
        least = max(self._floor, grant.interval)
        allowed = [each for each in self.choices if each.interval >= least]
        self._allowed = allowed or self.choices[-1:]
        if self.target.interval < self._allowed[0].interval:
            self._change(self._allowed[0], now_s)

    def _wish(self, situation: Situation) -> LinkWish:
        free = replace(situation, transfer_s=self._budget.free_transfer_s)
        objective_s = situation.online_limit_s if situation.num_online else math.inf
        wanted = self._wanted_online(free) if situation.num_online else self._fastest_offline(free)
        wish = LinkWish(
            wanted.interval, self.choices[-1].interval, None if objective_s == math.inf else objective_s
        )
        if self._wished is None or not _is_near(wish, self._wished):
            self._wished = wish
        return self._wished

    def _wanted_online(self, situation: Situation) -> Residency:
        """The smallest that costs online requests no time, if offline ones want its blocks."""
        if situation.wanted_blocks <= self.target.num_blocks:
            return self.target
        return min(self._without_delay(situation, self.choices), self.target, key=_interval_of)

    def _fastest_offline(self, situation: Situation) -> Residency:
        if not situation.used_blocks:
            return self.target
        return self._fastest(situation, self.choices)


def _is_near(wish: LinkWish, other: LinkWish) -> bool:
    """Whether others need not be told: the predictor's margins change a little with each step."""
    if wish.objective_s is None or other.objective_s is None:
        return wish == other
    change = abs(wish.objective_s - other.objective_s)
    return replace(wish, objective_s=other.objective_s) == other and change <= _NOTICED * other.objective_s


def _interval_of(residency: Residency) -> int:
    return residency.interval
