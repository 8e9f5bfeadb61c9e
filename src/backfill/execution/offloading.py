"""Runs a model whose weights do not all have device memory: Select-N's memory manager (section 4.3)."""

from __future__ import annotations

import hashlib
import logging

import torch

from backfill.core.config import GIB
from backfill.core.errors import InsufficientMemory
from backfill.core.plan import WeightTransfers
from backfill.execution.layer_buffers import Fetch, LayerBuffers
from backfill.execution.micro_batches import MicroBatchStreams
from backfill.execution.weight_links import CudaLink, ThreadLink, WeightLink
from backfill.models.decoder import DecoderModel
from backfill.models.movable import MovableWeights, allocate_buffers
from backfill.models.packed import PackedFormat, packed_file
from backfill.models.resolve import cache_root
from backfill.models.weights import Checkpoint

logger = logging.getLogger(__name__)


class LayerStreamer:
    """Gives a model each layer's weights before it is computed.

    Args:
        placed: a layer in each buffer's memory.
    """

    def __init__(
        self, model: DecoderModel, placed: list[MovableWeights], link: WeightLink, interval: int
    ) -> None:
        self._model = model
        self._placed = placed
        self._link = link
        self._buffers = LayerBuffers(model.num_layers, len(placed), interval)
        self._reported_bytes = 0
        self._reported_stall_s = 0.0
        self._prefetch(0)

    def set_interval(self, interval: int) -> None:
        """Offload every ``interval``-th layer from the next pass on.

        Not while a pass runs; one may be suspended. Raises: ValueError if that needs more device memory.
        """
        self._buffers.set_interval(interval)

    def before(self, layer: int) -> None:
        """A layer is computed next, on the streams of all micro-batches."""
        fetch, evicted = self._buffers.claim(layer)
        if evicted is not None:
            del self._model.layers[evicted]
        if fetch is not None:
            self._begin(fetch)
            self._prefetch(layer + 1)
        self._link.wait(self._buffers.buffer_of(layer))

    def after(self, layer: int) -> None:
        """All computation of a layer was issued."""
        if self._buffers.release(layer):
            del self._model.layers[layer]
            self._prefetch(layer + 1)

    def take_transfers(self) -> WeightTransfers:
        """Transfers since the last call; call it when the device has computed the step."""
        link = self._link
        link.collect()
        taken = WeightTransfers(
            self._buffers.interval,
            link.num_bytes - self._reported_bytes,
            link.stall_s - self._reported_stall_s,
        )
        self._reported_bytes, self._reported_stall_s = link.num_bytes, link.stall_s
        return taken

    def close(self) -> None:
        self._link.close()

    def _prefetch(self, next_layer: int) -> None:
        for fetch in self._buffers.prefetch(next_layer):
            self._begin(fetch)

    def _begin(self, fetch: Fetch) -> None:
        self._link.begin(fetch)
        self._model.layers[fetch.layer] = self._placed[fetch.buffer]


def create_streamer(
    model: DecoderModel,
    checkpoint: Checkpoint,
    *,
    name: str,
    interval: int,
    num_buffers: int,
    device: torch.device,
    streams: MicroBatchStreams,
) -> LayerStreamer:
    """Keep the layers of a model without layers outside of device memory, and allocate the buffers.

    On a CPU they are kept in a file of the cache folder, elsewhere in pinned host memory.

    Args:
        name: of the model, its shape and dtype; begins the file's name.
    Raises: ConfigError, ModelError, InsufficientMemory.
    """
    first = model.load_layer(checkpoint, 0)
    try:
        buffers = allocate_buffers(num_buffers, first.buffer_bytes, device)
    except (RuntimeError, MemoryError) as error:
        gib = num_buffers * first.buffer_bytes / GIB
        raise InsufficientMemory(
            f"Layers of {gib:.2f} GiB could not be allocated on {device}; lower `offload_interval`."
        ) from error
    link: WeightLink
    if device.type == "cpu":
        form = PackedFormat(checkpoint.digest, first.layout(), model.num_layers, first.buffer_bytes)
        digest = hashlib.sha256(form.header()).hexdigest()[:12]
        path = cache_root() / "packed" / f"{name}-{digest}.layers"
        packed = packed_file(path, form, first, lambda index: model.load_layer(checkpoint, index))
        logger.info("offloaded layers are read from %s", path)
        link = ThreadLink(buffers, packed.read, packed.close)
    else:
        link = CudaLink(buffers, _host_layers(model, checkpoint, first), streams)
    return LayerStreamer(model, [first.placed(buffer) for buffer in buffers], link, interval)


def _host_layers(model: DecoderModel, checkpoint: Checkpoint, first: MovableWeights) -> torch.Tensor:
    """All layers in host memory: uint8 ``[num_layers, layer bytes]``."""
    num_bytes = model.num_layers * first.buffer_bytes
    try:
        layers = torch.empty((model.num_layers, first.buffer_bytes), dtype=torch.uint8)
    except (RuntimeError, MemoryError) as error:
        raise InsufficientMemory(
            f"Layers of {num_bytes / GIB:.2f} GiB could not be allocated in host memory; use "
            "`offload_interval` none."
        ) from error
    (buffer,) = allocate_buffers(1, first.buffer_bytes, first.memory()[0].device)
    for index in range(model.num_layers):
        model.load_layer(checkpoint, index).copy_to(buffer)
        layers[index].copy_(buffer)
    return layers
