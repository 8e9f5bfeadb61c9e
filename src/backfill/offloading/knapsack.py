"""One option of each of several engines, within a budget: a multiple-choice knapsack, solved exactly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

ROUNDING = 1e-9  # relative: nothing is refused for less

# Losses that are tried: this part of what a quick guess lacks, then each time so many times more.
_FIRST_LOSS = 1 / 4
_MORE_LOSS = 4


class Option(NamedTuple):
    """An interval, what it needs of the bus, and the device memory that it saves."""

    demand: float
    saved_bytes: int
    interval: int | None


class Segment(NamedTuple):
    """From one option to a larger one on the upper hull of an engine's options."""

    bytes_per_demand: float
    demand: float
    choice: int  # the larger option


# Options of some engines: those of all but the last one, and the last one's.
_Link = tuple[()] | tuple["_Link", Option]
_State = tuple[float, int, float, _Link]  # demand, minus the bytes saved, loss, options


@dataclass(frozen=True, slots=True)
class Choices:
    """An engine's options.

    Attributes:
        options: at least one, each with more demand and more memory saved than the one before.
        hull: the upper hull of memory saved over demand, in segments of falling slope.
    """

    options: list[Option]
    hull: list[Segment]

    @classmethod
    def of(cls, options: Iterable[Option]) -> Choices:
        """Without options that another one dominates."""
        kept: list[Option] = []
        for each in sorted(options, key=lambda each: (each.demand, -each.saved_bytes)):
            if not kept or each.saved_bytes > kept[-1].saved_bytes:
                kept.append(each)
        hull: list[int] = []
        for index, each in enumerate(kept):
            while len(hull) > 1 and _slope(kept[hull[-2]], kept[hull[-1]]) <= _slope(kept[hull[-1]], each):
                hull.pop()
            hull.append(index)
        segments = [
            Segment(_slope(kept[low], kept[high]), kept[high].demand - kept[low].demand, high)
            for low, high in pairwise(hull)
        ]
        return cls(kept, segments)


def _slope(low: Option, high: Option) -> float:
    return (high.saved_bytes - low.saved_bytes) / (high.demand - low.demand)


def largest(choices: Sequence[Choices], bandwidth: float) -> list[Option]:
    """One option of each engine: the most memory saved within the bandwidth, and least demand among these.

    If not even the least demands fit, these.

    Along the hulls, steepest segment first, until one does not fit: the linear relaxation. Its slope there is
    the price of bandwidth. What a choice saves, less the price of its demand, is at most the best of its
    engine; what it lacks of that is its loss. A combination saves the bound of the relaxation, less its
    losses and the price of the bandwidth that it leaves. So if the best combination with at most some loss
    lacks no more than that of the bound, no other one is better. Few combinations have a small loss.
    """
    options = [each.options for each in choices]
    limit = bandwidth * (1.0 + ROUNDING)
    if sum(each[0].demand for each in options) > limit:
        return [each[0] for each in options]
    if sum(each[-1].demand for each in options) <= limit:
        return [each[-1] for each in options]
    steps = sorted(
        ((segment, engine) for engine, each in enumerate(choices) for segment in each.hull),
        key=lambda step: -step[0].bytes_per_demand,
    )
    reached = [0] * len(options)
    left = bandwidth - sum(each[0].demand for each in options)
    price: float | None = None
    blocked: set[int] = set()
    for segment, engine in steps:
        if engine in blocked:
            continue
        if segment.demand <= left:
            left -= segment.demand
            reached[engine] = segment.choice
        else:
            blocked.add(engine)
            if price is None:
                price = segment.bytes_per_demand
    assert price is not None, "all of the largest demands fit"
    found = sum(each[index].saved_bytes for each, index in zip(options, reached, strict=True))
    losses: list[list[tuple[float, Option]]] = []
    bound = price * limit
    for of in options:
        values = [each.saved_bytes - price * each.demand for each in of]
        best = max(values)
        bound += best
        losses.append([(best - value, each) for value, each in zip(values, of, strict=True)])
    rounding = bound * ROUNDING + 0.5  # bytes are whole
    half = len(options) // 2
    lacking = max(1.0, bound - found)
    allowed = lacking * _FIRST_LOSS
    while True:
        chosen = _best_pair(
            _undominated_combinations(losses[:half], allowed + rounding, limit),
            _undominated_combinations(losses[half:], allowed + rounding, limit),
            limit,
        )
        if chosen is not None and bound - sum(each.saved_bytes for each in chosen) <= allowed + rounding:
            return chosen
        assert allowed <= lacking, "the guess has no larger loss"
        allowed *= _MORE_LOSS


def _undominated_combinations(
    losses: Sequence[Sequence[tuple[float, Option]]], allowed: float, limit: float
) -> list[_State]:
    """Combinations of options of some engines with at most some loss, by rising demand and saved bytes."""
    states: list[_State] = [(0.0, 0, 0.0, ())]
    for of in losses:
        kept = [(loss, *each) for loss, each in of if loss <= allowed]
        combined = sorted(
            (demand + more, saved - more_saved, lost + loss, (chosen, Option(more, more_saved, interval)))
            for demand, saved, lost, chosen in states
            for loss, more, more_saved, interval in kept
            if lost + loss <= allowed and demand + more <= limit
        )
        states = []
        least = 1
        for state in combined:
            if state[1] < least:
                states.append(state)
                least = state[1]
    return states


def _best_pair(first: Sequence[_State], second: Sequence[_State], limit: float) -> list[Option] | None:
    """The options of a combination of each that save most, and demand least among these; None if none fit."""
    best: tuple[int, float, _State, _State] | None = None
    right = len(second) - 1
    for state in first:
        while right >= 0 and state[0] + second[right][0] > limit:
            right -= 1
        if right < 0:
            break
        other = second[right]
        found = state[1] + other[1], state[0] + other[0], state, other
        if best is None or found[:2] < best[:2]:
            best = found
    if best is None:
        return None
    return _unlinked(best[2][3]) + _unlinked(best[3][3])


def _unlinked(chosen: _Link) -> list[Option]:
    found: list[Option] = []
    while chosen:
        chosen, option = chosen
        found.append(option)
    return found[::-1]
