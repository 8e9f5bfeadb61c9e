"""A simulated device whose layers take their time one by one: offloaded ones, safepoints and copies count."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from backfill.core.clock import VirtualClock
from backfill.core.plan import CopyDirections, SampledToken, StepOutcome, StepPlan, WeightTransfers
from backfill.costs.behaviour import DeviceBehaviour
from backfill.execution.executor import ExecutorInfo
from backfill.execution.layer_buffers import Fetch, LayerBuffers
from backfill.execution.simulated_executor import SimulatedExecutor
from backfill.offloading.interval import num_device_layers


@dataclass(frozen=True, slots=True)
class LayeredDevice(DeviceBehaviour):
    """See ``DeviceBehaviour``.

    Attributes:
        safepoint_s: seconds that each safepoint adds to a step that has them.
        copy_slowdown: fraction of its time that computing takes more while blocks are copied.
        layer_transfer_s: seconds to transfer the weights of an offloaded layer.
    """

    safepoint_s: float = 0.0
    copy_slowdown: float = 0.0
    layer_transfer_s: float = 0.0

    def __post_init__(self) -> None:
        DeviceBehaviour.__post_init__(self)
        for name in ("safepoint_s", "copy_slowdown", "layer_transfer_s"):
            value = getattr(self, name)
            if not 0.0 <= value < math.inf:
                raise ValueError(f"{name} must be a finite number of at least 0, got {value}")


class LayeredExecutor(SimulatedExecutor):
    """See ``SimulatedExecutor``. Offloaded layers wait for their weights, which have a link of their own.

    Moves within the device take as long as restores, and the step waits for them.
    """

    _device: LayeredDevice

    def __init__(
        self, info: ExecutorInfo, device: LayeredDevice, clock: VirtualClock, *, seed: int = 0
    ) -> None:
        super().__init__(info, device, clock, seed=seed)
        self._streamer: SimulatedStreamer | None = None
        if info.offload_interval is not None:
            self._streamer = SimulatedStreamer(
                info.num_layers, info.offload_interval, device.layer_transfer_s, info.layer_bytes
            )

    def run(self, plan: StepPlan) -> StepOutcome:
        if self._streamer is not None:
            largest = None if plan.memory is None else plan.memory.interval
            self._streamer.change(plan.offload_interval, largest, self._clock.now_s())
        if plan.moves and self._device.copies is not None:
            self._wait(len(plan.moves) * self._copy_block_s(CopyDirections.RESTORE))
        return super().run(plan)

    def _outcome(self, sampled: tuple[SampledToken, ...]) -> StepOutcome:
        outcome = super()._outcome(sampled)
        if self._streamer is None:
            return outcome
        return replace(outcome, weight_transfers=self._streamer.take_transfers())

    def _pass_layers(self, plan: StepPlan, first: int, last: int, ratio: float) -> int | None:
        points, events, streamer, clock = plan.safepoints, self.events, self._streamer, self._clock
        layer_s = ratio * self._seconds(plan.slices) / self.info.num_layers
        if points is not None:
            layer_s += self._device.safepoint_s / points.layers_apart
        for layer in range(first, last):
            at_safepoint = points is not None and layer > first and (layer - first) % points.layers_apart == 0
            if at_safepoint and self._step_to_stop == plan.step:
                return layer
            began_s = clock.now_s() if streamer is None else streamer.before(layer, clock.now_s())
            ends_at_s = self._computed_at_s(began_s, layer_s)
            while points is not None and events is not None and events.next_at_s() < ends_at_s:
                self._wait(events.next_at_s() - clock.now_s())
                events.deliver()
            self._wait(ends_at_s - clock.now_s())
            if streamer is not None:
                streamer.after(layer, clock.now_s())
        return last if last < self.info.num_layers else None

    def _computed_at_s(self, began_s: float, seconds: float) -> float:
        """When computing ends that begins at ``began_s`` and takes ``seconds`` without concurrent copies."""
        slowness = 1.0 + self._device.copy_slowdown
        beside_copies_s = min(slowness * seconds, max(0.0, self._copying_until_s - began_s))
        return began_s + beside_copies_s + (seconds - beside_copies_s / slowness)


class SimulatedStreamer:
    """When the weights of each layer are there, if a link transfers one layer after another.

    Which transfers are made, and in which order, is what the real executor decides. Before the first step
    every buffer is filled.

    Args:
        transfer_s: seconds for the weights of one layer.
    """

    def __init__(self, num_layers: int, interval: int, transfer_s: float, layer_bytes: int) -> None:
        self._buffers = LayerBuffers(num_layers, num_device_layers(num_layers, interval), interval)
        self._num_layers = num_layers
        self._transfer_s = transfer_s
        self._layer_bytes = layer_bytes
        self._ready_at_s: dict[int, float] = {}  # of buffers whose last transfer no layer has used
        self._link_free_at_s = 0.0
        self._num_transfers = 0
        self._stall_s = 0.0
        self._begin(self._buffers.prefetch(0), 0.0)
        for layer in range(num_layers):  # as the real executor's warm-up: then the right layers are resident
            self.before(layer, 0.0)
            self.after(layer, 0.0)
        self._ready_at_s = dict.fromkeys(self._ready_at_s, 0.0)
        self._link_free_at_s = 0.0
        self.take_transfers()

    def change(self, interval: int | None, largest: int | None, now_s: float) -> None:
        """See ``LayerStreamer``."""
        num_buffers = None if largest is None else num_device_layers(self._num_layers, largest)
        for buffer, _ in self._buffers.change(interval, num_buffers):
            self._ready_at_s.pop(buffer, None)
        if num_buffers is not None:
            self._begin(self._buffers.prefetch(0), now_s)

    def before(self, layer: int, now_s: float) -> float:
        """The instant from which a layer, the next one, can be computed."""
        fetch, _ = self._buffers.claim(layer)
        if fetch is not None:
            self._begin([fetch], now_s)
            self._begin(self._buffers.prefetch(layer + 1), now_s)
        ready_at_s = self._ready_at_s.pop(self._buffers.buffer_of(layer), None)
        if ready_at_s is None:
            return now_s
        self._num_transfers += 1
        self._stall_s += max(0.0, ready_at_s - now_s)
        return max(now_s, ready_at_s)

    def after(self, layer: int, now_s: float) -> None:
        """A layer was computed."""
        if self._buffers.release(layer):
            self._begin(self._buffers.prefetch(layer + 1), now_s)

    def take_transfers(self) -> WeightTransfers:
        """Transfers since the last call."""
        num_bytes = self._num_transfers * self._layer_bytes
        taken = WeightTransfers(self._buffers.interval, num_bytes, self._stall_s, self._transfer_s)
        self._num_transfers, self._stall_s = 0, 0.0
        return taken

    def _begin(self, fetches: Iterable[Fetch], now_s: float) -> None:
        for fetch in fetches:
            self._link_free_at_s = max(self._link_free_at_s, now_s) + self._transfer_s
            self._ready_at_s[fetch.buffer] = self._link_free_at_s
