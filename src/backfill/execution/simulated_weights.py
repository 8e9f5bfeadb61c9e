"""Offloaded layers on a simulated device."""

from __future__ import annotations

from collections.abc import Iterable

from backfill.core.plan import WeightTransfers
from backfill.execution.layer_buffers import Fetch, LayerBuffers
from backfill.offloading.interval import num_device_layers


class SimulatedStreamer:
    """When the weights of each layer are there, if a link transfers one layer after another.

    Which transfers are made, and in which order, is what the real executor decides. Before the first step
    every buffer is filled.

    Args:
        transfer_s: seconds for the weights of one layer.
    """

    def __init__(self, num_layers: int, interval: int, transfer_s: float, layer_bytes: int) -> None:
        self._buffers = LayerBuffers(num_layers, num_device_layers(num_layers, interval), interval)
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

    def change(self, interval: int | None, num_buffers: int | None, now_s: float) -> None:
        """See ``LayerStreamer``."""
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
