"""Offloaded layers and what they cost: the offloading interval of Select-N, sections 4.3 and 4.4.

With interval i the last of every i layers has no device memory of its own: its weights are transferred into a
staging buffer for each step. ``docs/offloading.md`` compares the time of a step with the paper's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

NUM_STAGING_BUFFERS = 2


def offloaded_layers(num_layers: int, interval: int | None) -> range:
    """Indices of the layers without device memory of their own; None: every layer has it."""
    return range(0) if interval is None else range(interval - 1, num_layers, interval)


def num_device_layers(num_layers: int, interval: int | None) -> int:
    """Layers' worth of device memory: resident layers and staging buffers.

    Fewer than three offloaded layers save nothing, because each has a staging buffer.
    """
    num_offloaded = len(offloaded_layers(num_layers, interval))
    return num_layers - num_offloaded + min(NUM_STAGING_BUFFERS, num_offloaded)


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """What a step does, in seconds.

    Attributes:
        num_layers: layers of the model.
        compute_s: computing one layer.
        transfer_s: transferring one layer's weights to the device.
        other_s: what a step does outside its layers, from the end of its last one to the start of the first
            one of the next step. Transfers go on meanwhile.
    """

    num_layers: int
    compute_s: float
    transfer_s: float
    other_s: float = 0.0

    @property
    def resident_step_s(self) -> float:
        """A step without offloading."""
        return self.num_layers * self.compute_s + self.other_s


def step_time_s(times: LayerTimes, interval: int | None) -> float:
    """Mean time of a step among many back to back, with two staging buffers.

    A transfer begins as soon as the one before has ended and a staging buffer is free, also for the next
    step. This is the largest of

    - the computation of a step: L t_c + t_o;
    - its transfers one after another: n t_t;
    - with one offloaded layer, which has one buffer: its transfer and its computation, t_t + t_c;
    - with more than two: n - 2 transfers, and between them the stretch from the start of a step's last
      offloaded layer to the end of the next step's first one, in which only the two staging buffers can be
      filled: (n - 2) t_t + t_c + (L mod i) t_c + t_o + i t_c.

    With transfers and offloaded layers numbered over all steps, F and C when they end:

        F(k) = max(F(k-1), C(k-2)) + t_t
        C(k) = max(C(k-1) + gap(k), F(k)) + t_c

    where a gap is (i - 1) t_c, and (L mod i) t_c + t_o more before a step's first offloaded layer.

    So events wait for each other, and their rate is that of the slowest cycle of waits. Those above are waits
    of layers alone, of transfers alone, and of both by turns. Cycles that change between the two at other
    places have at most i t_c where a transfer would be: where transfers are the limit that is less, and where
    computation is, the first cycle is the slowest.
    """
    least_s, share, extra_s = step_bounds(times.num_layers, interval, times.transfer_s, times.other_s)
    return max(times.resident_step_s, least_s, share * (times.num_layers * times.compute_s) + extra_s)


class StepBounds(NamedTuple):
    """``step_time_s``, by what the layers take together.

    A step takes the most of its computation, ``least_s`` and ``share * compute_s + extra_s``.
    """

    least_s: float
    share: float
    extra_s: float

    def step_s(self, compute_s: float) -> float:
        """Of a step that does nothing outside its layers."""
        return max(compute_s, self.least_s, self.share * compute_s + self.extra_s)


def step_bounds(num_layers: int, interval: int | None, transfer_s: float, other_s: float = 0.0) -> StepBounds:
    """For steps of any load, while one layer's transfer takes ``transfer_s``; see ``LayerTimes``."""
    num_transfers = len(offloaded_layers(num_layers, interval))
    least_s = num_transfers * transfer_s
    if interval is None or num_transfers in (0, NUM_STAGING_BUFFERS):
        return StepBounds(least_s, 0.0, 0.0)
    if num_transfers == 1:
        return StepBounds(least_s, 1 / num_layers, transfer_s)
    share = (1 + num_layers % interval + interval) / num_layers
    return StepBounds(least_s, share, (num_transfers - NUM_STAGING_BUFFERS) * transfer_s + other_s)


class StagesBounds(NamedTuple):
    """Of a step that passes the stages of a pipeline one after another, each with a link of its own.

    Attributes:
        stages: the bounds of each stage, with its share of the layers.
    """

    stages: tuple[tuple[float, StepBounds], ...]

    def step_s(self, compute_s: float) -> float:
        """See ``StepBounds.step_s``."""
        return sum(bounds.step_s(share * compute_s) for share, bounds in self.stages)


def stages_bounds(
    stage_layers: Sequence[int], interval: int | None, transfer_s: float
) -> StepBounds | StagesBounds:
    """``step_bounds`` of a model that is divided into stages. The interval counts the layers of each."""
    num_layers = sum(stage_layers)
    stages = [(each / num_layers, step_bounds(each, interval, transfer_s)) for each in stage_layers]
    return stages[0][1] if len(stages) == 1 else StagesBounds(tuple(stages))


def smallest_interval(times: LayerTimes, objective_s: float) -> int | None:
    """The smallest interval whose steps take at most ``objective_s``; None if only no offloading might do.

    Every interval is tried: step times do not always fall as the interval grows, because the layers behind
    the last offloaded one are more or fewer.
    """
    for interval in range(1, times.num_layers + 1):
        if step_time_s(times, interval) <= objective_s:
            return interval
    return None
