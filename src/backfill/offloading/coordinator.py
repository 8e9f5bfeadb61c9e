"""Intervals of several engines whose transfers share a bus: Select-N's coordinator, section 4.5.

``docs/offloading.md`` derives when demands fit, and says what the paper's algorithm leaves open.
"""

from __future__ import annotations

import math
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
from backfill.offloading.knapsack import ROUNDING, Choices, Option, largest

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
    largest_interval = instance.max_interval
    if largest_interval is None:
        return instance.times(left).resident_step_s
    times = instance.times(left)
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
