"""Intervals of several engines whose transfers share a bus: Select-N's coordinator, section 4.5.

``docs/offloading.md`` says when demands fit, and what the paper's algorithm leaves open.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from backfill.offloading.interval import (
    NUM_STAGING_BUFFERS,
    LayerTimes,
    offloaded_layers,
    step_time_s,
)

ROUNDING = 1e-9  # relative: nothing is refused for less

# Losses that are tried: this part of what a quick guess lacks, then each time so many times more.
_FIRST_LOSS = 1 / 4
_MORE_LOSS = 4

_MAX_CACHED_INSTANCES = 1024
# Of the bandwidth, what engines without an objective keep together: their work must go on until it has ended
# or their memory is divided anew.
_LEAST_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class BusInstance:
    """What an engine needs of the bus.

    Attributes:
        name: unique on the bus.
        num_layers: layers of the model.
        layer_bytes: weights of one layer.
        step_s: how long a step may take: the objective, or more where computing alone takes more.
        compute_s: computing one layer.
        other_s: what a step does outside its layers.
        min_interval: the smallest interval of use: the one that meets the objective when no other engine uses
            the bus, or the one that the engine's memory is divided for.
        max_interval: the largest one whose layers fit in device memory; None: all layers fit, and not to
            offload is a choice too.
        has_objective: there are online requests. Without any, ``step_s`` is a pace that gives way: if not all
            demands fit, those of engines with an objective come first.
    """

    name: str
    num_layers: int
    layer_bytes: int
    step_s: float
    compute_s: float = 0.0
    other_s: float = 0.0
    min_interval: int = 1
    max_interval: int | None = None
    has_objective: bool = True

    def __post_init__(self) -> None:
        most = self.num_layers if self.max_interval is None else self.max_interval
        if not (self.min_interval >= 1 and 1 <= most <= self.num_layers and self.layer_bytes >= 1):
            raise ValueError(f"intervals of 1 to {self.num_layers} and layers of some bytes, got {self}")
        if not (0.0 < self.step_s < math.inf and self.compute_s >= 0.0 and self.other_s >= 0.0):
            raise ValueError(f"a step of some seconds is needed, got {self}")

    @property
    def intervals(self) -> Iterable[int | None]:
        """Those to choose from, perhaps none; None stands for no offloading."""
        if self.max_interval is None:
            return (*range(self.min_interval, self.num_layers + 1), None)
        return range(self.min_interval, self.max_interval + 1)

    def times(self, bytes_per_s: float) -> LayerTimes:
        """What a step does if the bus gives this engine so much."""
        return LayerTimes(self.num_layers, self.compute_s, self.layer_bytes / bytes_per_s, self.other_s)

    def demand(self, interval: int | None) -> float:
        """Bytes per second with which a step takes ``step_s`` at most; infinite if no bandwidth would do.

        At least the paper's n * layer_bytes / step_s for n offloaded layers, and equal to it if computation
        leaves the link no gaps.
        """
        num_offloaded = len(offloaded_layers(self.num_layers, interval))
        spare_s = self.step_s - (self.num_layers * self.compute_s + self.other_s)
        if spare_s < -ROUNDING * self.step_s:
            return math.inf
        if interval is None or num_offloaded == 0:
            return 0.0
        transfer_s = self.step_s / num_offloaded  # the longest, by each limit of ``step_time_s``
        if num_offloaded == 1:
            transfer_s = min(transfer_s, self.step_s - self.compute_s)
        if num_offloaded > NUM_STAGING_BUFFERS:
            num_computed = 1 + self.num_layers % interval + interval
            left_s = self.step_s - num_computed * self.compute_s - self.other_s
            transfer_s = min(transfer_s, left_s / (num_offloaded - NUM_STAGING_BUFFERS))
        return self.layer_bytes / transfer_s if transfer_s > 0.0 else math.inf

    def saved_bytes(self, interval: int | None) -> int:
        """Device memory that the interval saves: weights that are in host memory only."""
        num_offloaded = len(offloaded_layers(self.num_layers, interval))
        return max(0, num_offloaded - NUM_STAGING_BUFFERS) * self.layer_bytes


class Assignment(NamedTuple):
    """What a coordinator gives an engine.

    Attributes:
        interval: None for no offloading.
        demand: bytes per second that its objective needs.
        bytes_per_s: what it may use while all others use theirs.
    """

    interval: int | None
    demand: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class BusPlan:
    """Intervals of all engines on a bus.

    Attributes:
        of: by the engine's name.
        load: sum of demands over the bandwidth, without those that gave way. Above 1 nothing fits, and no
            step takes longer than this many times what it may.
    """

    of: dict[str, Assignment]
    load: float

    @property
    def fits(self) -> bool:
        return self.load <= 1.0 + ROUNDING


def coordinate(instances: Sequence[BusInstance], bandwidth: float) -> BusPlan:
    """The intervals that save the most device memory within the bandwidth, and least demand among these.

    Engines that compute the same from the same table need no leader: the answer does not depend on the order
    of ``instances``. It is exact for any number of them. If nothing fits, every engine has the interval with
    the least demand. Then engines without an objective get what the others leave, but some of it in any case;
    and if these alone do not fit, all are slowed down by the same factor.

    Args:
        instances: engines that have work, with different names. Others need nothing.
        bandwidth: bytes per second.
    Raises: ValueError if two have one name.
    """
    ordered = sorted(instances, key=lambda each: each.name)
    if any(first.name == second.name for first, second in pairwise(ordered)):
        raise ValueError(f"instances of one bus need different names, got {[each.name for each in ordered]}")
    chosen = largest([_choices(each) for each in ordered], bandwidth)
    total = sum(each.demand for each in chosen)
    first = sum(option.demand for each, option in zip(ordered, chosen, strict=True) if each.has_objective)
    gives_way = total > bandwidth * (1.0 + ROUNDING) and 0.0 < first < total
    # Parts of the bandwidth for a byte a second that is demanded, with an objective and without.
    scales = dict.fromkeys((True, False), bandwidth / total if total else 0.0)
    if gives_way:
        kept = min(first, (1.0 - _LEAST_SHARE) * bandwidth)
        scales = {True: kept / first, False: (bandwidth - kept) / (total - first)}
    return BusPlan(
        {
            instance.name: Assignment(
                option.interval, option.demand, option.demand * scales[instance.has_objective]
            )
            for instance, option in zip(ordered, chosen, strict=True)
        },
        (first / (1.0 - _LEAST_SHARE) if gives_way else total) / bandwidth,
    )


def attainable_step_s(instance: BusInstance, others: Iterable[BusInstance], bandwidth: float) -> float:
    """The shortest step that an engine could have beside the objectives of the others, in seconds.

    The others then have the intervals of their least demands, and those without an objective give way. What
    they leave may be nothing: then it is infinite.
    """
    needed = sum(
        min(option.demand for option in _choices(each).options) for each in others if each.has_objective
    )
    left = bandwidth - needed
    if left <= 0.0:
        return math.inf
    times, largest_interval = instance.times(left), instance.max_interval
    if largest_interval is None:
        return times.resident_step_s
    return min(step_time_s(times, interval) for interval in range(1, largest_interval + 1))


@lru_cache(_MAX_CACHED_INSTANCES)
def _choices(instance: BusInstance) -> Choices:
    """An engine's intervals that are worth choosing.

    Where the objective needs a larger interval than fits in memory, or cannot be met, the largest one that
    fits is the only choice. In the second case it demands what its transfers alone need.
    """
    found = [
        Option(demand, instance.saved_bytes(interval), interval)
        for interval in instance.intervals
        if (demand := instance.demand(interval)) < math.inf
    ]
    if not found:
        interval = instance.max_interval
        demand = instance.demand(interval)
        if demand == math.inf:
            num_offloaded = len(offloaded_layers(instance.num_layers, interval))
            demand = num_offloaded * instance.layer_bytes / instance.step_s
        found = [Option(demand, instance.saved_bytes(interval), interval)]
    return Choices.of(found)


# One option of each engine within a budget: a multiple-choice knapsack, solved exactly.


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


class Combination(NamedTuple):
    """Options of some engines."""

    demand: float
    lacking_bytes: int  # minus the bytes saved, so that the least is the best
    loss: float
    options: tuple[Option, ...]


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
    price, found = _relaxation(choices, bandwidth)
    losses: list[list[tuple[float, Option]]] = []
    bound = price * limit
    for of in options:
        values = [each.saved_bytes - price * each.demand for each in of]
        best = max(values)
        bound += best
        losses.append([(best - value, each) for value, each in zip(values, of, strict=True)])
    return _least_lacking(losses, bound, max(1.0, bound - found), limit)


def _relaxation(choices: Sequence[Choices], bandwidth: float) -> tuple[float, int]:
    """The price of bandwidth in bytes saved, and what the options save that fit along the hulls.

    The least demands fit, the largest ones do not.
    """
    steps = sorted(
        ((segment, engine) for engine, each in enumerate(choices) for segment in each.hull),
        key=lambda step: -step[0].bytes_per_demand,
    )
    reached = [0] * len(choices)
    left = bandwidth - sum(each.options[0].demand for each in choices)
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
    return price, sum(each.options[index].saved_bytes for each, index in zip(choices, reached, strict=True))


def _least_lacking(
    losses: Sequence[Sequence[tuple[float, Option]]], bound: float, lacking: float, limit: float
) -> list[Option]:
    """The combination that saves most, with the least demand among these.

    Args:
        losses: each engine's options and what they lose.
        bound: bytes that no combination exceeds.
        lacking: of them in a combination that is known to fit.
    """
    rounding = bound * ROUNDING + 0.5  # bytes are whole
    half = len(losses) // 2
    allowed = lacking * _FIRST_LOSS
    while True:
        first, second = (
            _undominated_combinations(of, allowed + rounding, limit) for of in (losses[:half], losses[half:])
        )
        demands = [each.demand for each in second]
        # Beside each of the first ones, the last of the second ones that fits saves most.
        pairs = [
            (each, second[index - 1])
            for each in first
            if (index := bisect_right(demands, limit - each.demand))
        ]
        if pairs:
            one, other = min(pairs, key=_lacking_and_demand)
            if bound + one.lacking_bytes + other.lacking_bytes <= allowed + rounding:
                return [*one.options, *other.options]
        assert allowed <= lacking, "the guess has no larger loss"
        allowed *= _MORE_LOSS


def _undominated_combinations(
    losses: Sequence[Sequence[tuple[float, Option]]], allowed: float, limit: float
) -> list[Combination]:
    """Those of some engines with at most some loss, by rising demand and saved bytes."""
    found = [Combination(0.0, 0, 0.0, ())]
    for of in losses:
        combined = sorted(
            Combination(
                each.demand + option.demand,
                each.lacking_bytes - option.saved_bytes,
                each.loss + loss,
                (*each.options, option),
            )
            for each in found
            for loss, option in of
            if each.loss + loss <= allowed and each.demand + option.demand <= limit
        )
        found = []
        for each in combined:
            if not found or each.lacking_bytes < found[-1].lacking_bytes:
                found.append(each)
    return found


def _lacking_and_demand(pair: tuple[Combination, Combination]) -> tuple[int, float]:
    return sum(each.lacking_bytes for each in pair), sum(each.demand for each in pair)
