"""Engines with offloaded layers beside each other on one bus, event by event.

Each engine makes the transfers that ``LayerBuffers`` decides on, one at a time. Transfers of several engines
at once share the bus evenly, as devices behind one switch do.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from backfill.execution.layer_buffers import LayerBuffers
from backfill.offloading.interval import num_device_layers
from experiments.selectn.model import WARM_UP_STEPS, StepTimes

_NEVER = math.inf


@dataclass(frozen=True, slots=True)
class BusEngine:
    """One engine that repeats a step.

    Attributes:
        interval: None without offloading.
        layer_bytes: transferred for an offloaded layer.
        draw_layer_s: seconds to compute one layer in the next step.
        other_s: seconds between two steps.
    """

    num_layers: int
    interval: int | None
    layer_bytes: float
    draw_layer_s: Callable[[], float]
    other_s: float = 0.0


class _Pipeline:
    """Where an engine is: at a layer, computing until an instant or waiting for its weights."""

    def __init__(self, engine: BusEngine) -> None:
        self.engine = engine
        self.ends_s: list[float] = [0.0]
        self.until_s = _NEVER  # end of what runs; never while it waits
        self.left_bytes = 0.0  # of the first transfer
        self._transfers: deque[int] = deque()  # buffers, in order
        self._layer = 0
        self._layer_s = engine.draw_layer_s()
        self._is_between = False
        self._buffers: LayerBuffers | None = None
        if engine.interval is not None:
            num_buffers = num_device_layers(engine.num_layers, engine.interval)
            self._buffers = LayerBuffers(engine.num_layers, num_buffers, engine.interval)
            deque(self._buffers.prefetch(0))
            for layer in range(engine.num_layers):  # then the right layers are resident
                if self._buffers.release(layer):
                    deque(self._buffers.prefetch(layer + 1))
        self._start(0.0)

    @property
    def transfers(self) -> bool:
        return bool(self._transfers)

    def arrive(self, now_s: float) -> None:
        """The first transfer is complete."""
        self._transfers.popleft()
        self.left_bytes = self.engine.layer_bytes
        if self.until_s == _NEVER:
            self._start(now_s)

    def advance(self, now_s: float) -> None:
        """What ran until now has ended."""
        if self._is_between:
            self._is_between = False
            self.ends_s.append(now_s)
            self._layer, self._layer_s = 0, self.engine.draw_layer_s()
            self._start(now_s)
            return
        if self._buffers is not None and self._buffers.release(self._layer):
            for fetch in self._buffers.prefetch(self._layer + 1):
                if not self._transfers:
                    self.left_bytes = self.engine.layer_bytes
                self._transfers.append(fetch.buffer)
        self._layer += 1
        if self._layer == self.engine.num_layers:
            self._is_between = True
            self.until_s = now_s + self.engine.other_s
        else:
            self._start(now_s)

    def _start(self, now_s: float) -> None:
        """Compute the layer, or wait for it."""
        waits = self._buffers is not None and self._buffers.buffer_of(self._layer) in self._transfers
        self.until_s = _NEVER if waits else now_s + self._layer_s


def run_beside(
    engines: Sequence[BusEngine], bytes_per_s: float, num_steps: int, warm_up: int = WARM_UP_STEPS
) -> list[StepTimes]:
    """At least ``num_steps`` steps of each engine, all of them running until the last one has its steps."""
    pipelines = [_Pipeline(engine) for engine in engines]
    now_s = 0.0
    while min(len(each.ends_s) for each in pipelines) <= warm_up + num_steps:
        active = [each for each in pipelines if each.transfers]
        rate = bytes_per_s / len(active) if active else bytes_per_s
        ends_s = min(each.until_s for each in pipelines)
        arrives_s = min((now_s + each.left_bytes / rate for each in active), default=_NEVER)
        at_s = min(ends_s, arrives_s)
        for each in active:
            each.left_bytes -= (at_s - now_s) * rate
        now_s = at_s
        for each in active:
            if each.left_bytes <= 1e-6 * each.engine.layer_bytes:
                each.arrive(now_s)
        for each in pipelines:
            if each.until_s <= now_s:
                each.advance(now_s)
    return [
        StepTimes(tuple(end_s - began_s for began_s, end_s in pairwise(each.ends_s[warm_up:])))
        for each in pipelines
    ]
