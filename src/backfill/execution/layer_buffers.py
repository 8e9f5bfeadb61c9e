"""Which layers are in device memory while a model with offloaded layers runs: decisions only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from backfill.offloading.interval import num_device_layers, offloaded_layers


class Fetch(NamedTuple):
    """A layer's weights are to be transferred into a buffer."""

    layer: int
    buffer: int


class Withdrawn(NamedTuple):
    """A buffer that loses its memory, and the layer that it held or was to hold, if any."""

    buffer: int
    layer: int | None


class LayerBuffers:
    """Buffers in device memory, each of which holds one layer's weights.

    How many there are decides how many layers can be resident. The interval says which layers give their
    buffer away once they have been computed, and so are fetched again for the next pass. Both may change
    between two passes; there are never more buffers than at first, and fewer are the first of these. What
    is not held is fetched in the order in which it is needed, as soon as a buffer is free, over the end of a
    pass into the next one. So a layer that becomes resident stays where it was fetched for a pass, and one
    that becomes offloaded leaves after it was used.

    Every layer is held or fetched at most once at a time. Fetches are executed in the order they are made.
    """

    def __init__(self, num_layers: int, num_buffers: int, interval: int) -> None:
        self.num_buffers = self._most_buffers = num_buffers
        self._num_layers = num_layers
        self._buffer_of: dict[int, int] = {}  # of layers held or being fetched
        self._free = list(reversed(range(num_buffers)))
        self._offloaded = range(0)
        self.set_interval(interval)

    @property
    def interval(self) -> int:
        return self._interval

    def set_interval(self, interval: int) -> None:
        """Use another interval from the next layer on; with one above the layers, none is offloaded.

        Raises: ValueError if it needs more buffers.
        """
        if interval < 1:
            raise ValueError(f"an interval of at least 1 is needed, got {interval}")
        needed = num_device_layers(self._num_layers, interval)
        if needed > self.num_buffers:
            raise ValueError(
                f"interval {interval} needs {needed} layers in memory, and {self.num_buffers} fit"
            )
        self._interval = interval
        self._offloaded = offloaded_layers(self._num_layers, interval)

    def change(self, interval: int | None, num_buffers: int | None) -> list[Withdrawn]:
        """Change either or both; None leaves it. Raises: ValueError as the methods for each."""
        withdrawn: list[Withdrawn] = []
        if num_buffers is not None and num_buffers > self.num_buffers:
            self.set_num_buffers(num_buffers)
        if interval is not None:
            self.set_interval(interval)
        if num_buffers is not None and num_buffers < self.num_buffers:
            withdrawn = self.set_num_buffers(num_buffers)
        return withdrawn

    def set_num_buffers(self, num_buffers: int) -> list[Withdrawn]:
        """Use so many buffers from now on, the first ones. Not while a pass runs; one may be suspended.

        Layers in the others are fetched again where a buffer is free for them.

        Raises: ValueError if the interval needs more, or if there were never so many.
        """
        needed, most = num_device_layers(self._num_layers, self._interval), self._most_buffers
        if not needed <= num_buffers <= most:
            raise ValueError(f"{needed} to {most} buffers are possible, got {num_buffers}")
        layer_in = {buffer: layer for layer, buffer in self._buffer_of.items()}
        withdrawn = [Withdrawn(each, layer_in.get(each)) for each in range(num_buffers, self.num_buffers)]
        for _, layer in withdrawn:
            if layer is not None:
                del self._buffer_of[layer]
        self._free = [each for each in self._free if each < num_buffers]
        self._free += reversed(range(self.num_buffers, num_buffers))
        self.num_buffers = num_buffers
        return withdrawn

    def buffer_of(self, layer: int) -> int:
        """Slot of a layer that is held or being fetched."""
        return self._buffer_of[layer]

    def held(self) -> list[Fetch]:
        """Layers that are held or being fetched, as they were fetched."""
        return [Fetch(layer, buffer) for layer, buffer in self._buffer_of.items()]

    def claim(self, layer: int) -> tuple[Fetch | None, int | None]:
        """A layer is needed next.

        Returns: the fetch to make if it is neither held nor being fetched, and the layer that loses its
        buffer for it, if any.
        """
        if layer in self._buffer_of:
            return None, None
        evicted = None
        if not self._free:  # a pass began again while layers further on were fetched
            evicted = self._evict(layer)
        return self._fetch(layer), evicted

    def release(self, layer: int) -> bool:
        """A layer was computed. Returns: whether it lost its buffer."""
        if layer not in self._offloaded:
            return False
        self._free.append(self._buffer_of.pop(layer))
        return True

    def prefetch(self, next_layer: int) -> Iterator[Fetch]:
        """Fetches to make now for the layers that are needed first from ``next_layer`` on."""
        for ahead in range(self._num_layers):
            if not self._free:
                return
            layer = (next_layer + ahead) % self._num_layers
            if layer not in self._buffer_of:
                yield self._fetch(layer)

    def _evict(self, next_layer: int) -> int:
        """Free a buffer: of an offloaded layer if there is one, and of those needed last."""
        evicted = max(
            self._buffer_of, key=lambda held: (held in self._offloaded, self._distance(next_layer, held))
        )
        self._free.append(self._buffer_of.pop(evicted))
        return evicted

    def _fetch(self, layer: int) -> Fetch:
        buffer = self._buffer_of[layer] = self._free.pop()
        return Fetch(layer, buffer)

    def _distance(self, layer: int, other: int) -> int:
        """Layers from ``layer`` to the next use of ``other``."""
        return (other - layer) % self._num_layers
