"""Runs a model whose weights do not all have device memory: Select-N's memory manager (section 4.3)."""

from __future__ import annotations

import hashlib
import logging
import statistics
from collections import deque
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from backfill.bus.throttle import BusThrottle, BusTransfers
from backfill.core.plan import WeightTransfers
from backfill.execution.arena import DeviceArena
from backfill.execution.host_memory import allocating
from backfill.execution.layer_buffers import Fetch, LayerBuffers
from backfill.execution.micro_batches import MicroBatchStreams
from backfill.execution.weight_links import CudaLink, ThreadLink, WeightLink
from backfill.models.decoder import DecoderModel
from backfill.models.movable import MovableWeights, allocate_buffers
from backfill.models.packed import PackedFile, PackedFormat, layers_differ, packed_file
from backfill.models.resolve import cache_root
from backfill.models.shard import ModelShard
from backfill.models.weights import Checkpoint
from backfill.offloading.interval import num_device_layers

logger = logging.getLogger(__name__)

_NUM_TIMED = 31  # transfers of which the median is reported


class StreamedModel(Protocol):
    """A model whose layers are given to it. ``models.decoder.DecoderModel`` is one."""

    num_layers: int

    @property
    def layers(self) -> MutableMapping[int, Any]:
        """Weights of the layers that are there, by index."""


class LayerObserver(Protocol):
    """Is told when layers are computed, on the thread that issues them."""

    def reach(self) -> None:
        """A layer is next, and its weights are waited for."""

    def begin(self) -> None:
        """A layer has its weights and is computed next."""

    def end(self) -> None:
        """All computation of the layer was issued."""


class LayerStreamer:
    """Gives a model each layer's weights before it is computed.

    Attributes:
        observer: is told of every layer; None for none.

    Args:
        placed: a layer in each buffer's memory.
        layers: that the model has, if it is a part of one. The interval counts these.
        bus: that the link's transfers are held to, and KV copies with them; None if they are not.
    """

    def __init__(
        self,
        model: StreamedModel,
        placed: Sequence[MovableWeights],
        link: WeightLink,
        interval: int,
        layers: range | None = None,
        bus: BusTransfers | None = None,
    ) -> None:
        self.observer: LayerObserver | None = None
        self._model = model
        self._placed = placed
        self._link = link
        self._bus = bus
        layers = range(model.num_layers) if layers is None else layers
        self._first, self._num_layers = layers.start, len(layers)
        self._buffers = LayerBuffers(len(layers), len(placed), interval)
        self._reported_bytes = 0
        self._reported_stall_s = 0.0
        self._prefetch(0)

    @property
    def layer_bytes(self) -> int:
        """Bytes of a transfer."""
        return self._placed[0].buffer_bytes

    @property
    def num_buffers(self) -> int:
        """Layers' worth of device memory."""
        return self._buffers.num_buffers

    def change(
        self, interval: int | None, largest: int | None = None, bus_share: float | None = None
    ) -> None:
        """Change some of these, from the next pass on; None leaves one as it is.

        Nothing writes to buffers that are used no more, the last ones, when this returns. Not while a pass
        runs; one may be suspended.

        Args:
            interval: of the next passes.
            largest: the largest interval that there are buffers for; at most that of the start.
        Raises: ValueError if the interval needs more buffers.
        """
        num_buffers = None if largest is None else num_device_layers(self._num_layers, largest)
        if bus_share is not None and self._bus is not None:
            self._bus.weights.set_share(bus_share)
        for buffer, layer in self._buffers.change(interval, num_buffers):
            if layer is not None:
                del self._model.layers[self._first + layer]
            self._link.drop(buffer)
        if num_buffers is not None:
            self._prefetch(0)

    def before(self, layer: int) -> None:
        """A layer is computed next, on the streams of all micro-batches."""
        index = layer - self._first
        fetch, evicted = self._buffers.claim(index)
        if evicted is not None:
            del self._model.layers[self._first + evicted]
        if fetch is not None:
            self._begin(fetch)
            self._prefetch(index + 1)
        if self.observer is not None:
            self.observer.reach()
        self._link.wait(self._buffers.buffer_of(index))
        if self.observer is not None:
            self.observer.begin()

    def after(self, layer: int) -> None:
        """All computation of a layer was issued."""
        if self.observer is not None:
            self.observer.end()
        index = layer - self._first
        if self._buffers.release(index):
            del self._model.layers[layer]
            self._prefetch(index + 1)

    def take_transfers(self) -> WeightTransfers:
        """Transfers since the last call; call it when the device has computed the step."""
        link = self._link
        link.collect()
        copied_bytes, bus_wait_s = (0, 0.0) if self._bus is None else self._bus.take()
        taken = WeightTransfers(
            self._buffers.interval,
            link.num_bytes - self._reported_bytes,
            link.stall_s - self._reported_stall_s,
            _median(link.times_s),
            copied_bytes,
            bus_wait_s,
        )
        self._reported_bytes, self._reported_stall_s = link.num_bytes, link.stall_s
        return taken

    def transfer_again(self) -> None:
        """Transfer every layer that is held once more, one after another, and wait for all."""
        for fetch in self._buffers.held():
            self._link.begin(fetch)
            self._link.wait(fetch.buffer)
        if (device := self._placed[0].memory()[0].device).type == "cuda":
            torch.cuda.synchronize(device)

    def take_transfer_times_s(self) -> list[float]:
        """Seconds of each of the last transfers since the last call, on the link alone."""
        self._link.collect()
        times_s = self._link.times_s
        return [times_s.popleft() for _ in range(len(times_s))]

    def close(self) -> None:
        self._link.close()

    def _prefetch(self, next_index: int) -> None:
        for fetch in self._buffers.prefetch(next_index):
            self._begin(fetch)

    def _begin(self, fetch: Fetch) -> None:
        self._link.begin(fetch)
        self._model.layers[self._first + fetch.layer] = self._placed[fetch.buffer]


def create_streamer(
    model: DecoderModel,
    checkpoint: Checkpoint,
    *,
    name: str,
    interval: int,
    device: torch.device,
    streams: MicroBatchStreams,
    num_blocks: int,
    block_bytes: int,
    bus: BusTransfers | None = None,
) -> tuple[LayerStreamer, DeviceArena]:
    """Keep the layers of a model without layers outside of device memory, and allocate what that has.

    On a CPU they are kept in a file of the cache folder, elsewhere in pinned host memory. A rank keeps its
    own shard of its layers.

    Args:
        name: of the model, its shape and dtype; begins the file's name.
        num_blocks, block_bytes: of the KV pool, which lies in one memory with the layers.
        bus: that transfers are held to, on a CPU; None if they are not.
    Raises: ConfigError, ModelError, InsufficientMemory.
    """
    layers = model.shard.layers
    num_buffers = num_device_layers(len(layers), interval)
    formats = map(checkpoint.layer_formats, layers)
    if any(each != checkpoint.layer_formats(layers.start) for each in formats):
        raise layers_differ()
    first = model.load_layer(checkpoint, layers.start)

    def load(index: int) -> MovableWeights:
        return model.load_layer(checkpoint, layers[index])

    host: Tensor | None = None
    if device.type != "cpu":  # its layers are packed on the device, which the KV pool would leave no room for
        host = host_layers(len(layers), first, load)
        torch.cuda.empty_cache()
    num_bytes = num_blocks * block_bytes + num_buffers * first.buffer_bytes
    advice = "lower `kv_gib` or `offload_interval`"
    with allocating("A KV pool beside layers", num_bytes, f"on {device}", advice):
        arena = DeviceArena(num_blocks, block_bytes, num_buffers, first.buffer_bytes, device)
    buffers = arena.buffers
    link: WeightLink
    if host is None:
        part = _part_name(model.shard)  # ranks have other weights in the same layout
        source = checkpoint.digest + part
        form = PackedFormat(source, first.layout(), len(layers), first.buffer_bytes)
        digest = hashlib.sha256(form.header()).hexdigest()[:12]
        path = cache_root() / "packed" / f"{name}{part}-{digest}.layers"
        packed = packed_file(path, form, first, load)
        logger.info("offloaded layers are read from %s", path)
        read = packed.read if bus is None else _throttled(packed, bus.weights)
        link = ThreadLink(buffers, read, packed.close)
    else:
        link = CudaLink(buffers, host, streams)
    placed = [first.placed(buffer) for buffer in buffers]
    return LayerStreamer(model, placed, link, interval, layers, bus), arena


def _part_name(shard: ModelShard) -> str:
    """Of a rank's part of the layers; empty for whole models."""
    group, layers = shard.group, shard.layers
    name = "" if group.size == 1 else f"-part{group.rank + 1}of{group.size}"
    return name if len(layers) == shard.num_layers else f"{name}-layers{layers.start}to{layers.stop - 1}"


def _throttled(packed: PackedFile, throttle: BusThrottle) -> Callable[[int, Tensor], None]:
    def read(layer: int, buffer: Tensor) -> None:
        throttle.transfer(buffer.nbytes, lambda start, stop: packed.read(layer, buffer, start, stop))

    return read


def host_layers(num_layers: int, first: MovableWeights, load: Callable[[int], MovableWeights]) -> Tensor:
    """All layers in host memory: uint8 ``[num_layers, layer bytes]``. Raises: InsufficientMemory.

    Args:
        first: layer 0.
        load: a layer on its device.
    """
    with allocating(
        "Layers", num_layers * first.buffer_bytes, "in host memory", "use `offload_interval` none"
    ):
        layers = torch.empty((num_layers, first.buffer_bytes), dtype=torch.uint8)
    (buffer,) = allocate_buffers(1, first.buffer_bytes, first.memory()[0].device)
    for index in range(num_layers):
        load(index).copy_to(buffer)
        layers[index].copy_(buffer)
    return layers


def _median(times_s: deque[float]) -> float:
    """Of the latest ones; 0 without any."""
    # Not iterated over: the link's thread appends at any time, and a deque that changes cannot be.
    latest = [times_s[-age] for age in range(1, min(len(times_s), _NUM_TIMED) + 1)]
    return statistics.median(latest) if latest else 0.0
