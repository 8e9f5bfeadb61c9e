"""The weights of a module's layers while they are elsewhere, and of the rest of it while it is moved."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from backfill.core.errors import ConfigError
from backfill.execution.micro_batches import MicroBatchStreams
from backfill.execution.offloading import host_layers
from backfill.execution.weight_links import CudaLink, ThreadLink, WeightLink
from backfill.models.movable import MovableWeights, allocate_buffers
from backfill.models.packed import PackedFormat, packed_file
from backfill.models.resolve import cache_root

ALLOWED = (
    "a decoder with a torch.nn.ModuleList of at least two layers of one class, such as model.layers of "
    "Llama, model.decoder.layers of OPT or transformer.h of GPT-2"
)


class MovedOthers:
    """What is not a layer's weights: parameters, and buffers such as rotary tables.

    Parameters keep their first memory, so that they need none to be moved back. Buffers may have changed, and
    are moved as they are.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = [(each, each.data) for each in parameters]
        self._buffers = [
            (module, name, buffer.device)
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]

    def move_to(self, device: torch.device) -> None:
        for parameter, tensor in self._parameters:
            parameter.data = tensor.to(device)
        for module, name, _ in self._buffers:
            _move_buffer(module, name, device)

    def move_back(self) -> None:
        for parameter, tensor in self._parameters:
            parameter.data = tensor
        for module, name, origin in self._buffers:
            _move_buffer(module, name, origin)


class _ModuleWeights(MovableWeights):
    """Parameters of a module in their order."""

    __slots__ = ("tensors",)

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors = tuple(tensors)

    def _values(self) -> Iterable[Tensor]:
        return self.tensors

    def _with_memory(self, parts: Iterator[Tensor]) -> _ModuleWeights:
        placed = (next(parts).view(each.dtype).view(each.shape) for each in self.tensors)
        return _ModuleWeights(placed)


class ModuleLayers(MutableMapping[int, _ModuleWeights]):
    """The parameters of layers, which get their memory and lose it. A ``StreamedModel``.

    Raises: ConfigError if the layers are not alike, or share parameters.
    """

    def __init__(self, layers: nn.ModuleList) -> None:
        self.num_layers = len(layers)
        self._parameters = [list(layer.parameters()) for layer in layers]
        self._origins = [[each.device for each in parameters] for parameters in self._parameters]
        self._there: dict[int, _ModuleWeights] = {}
        all_of_them = [each for parameters in self._parameters for each in parameters]
        if len({id(each) for each in all_of_them}) < len(all_of_them):
            raise ConfigError(f"model has layers that share parameters; it must be {ALLOWED}.")
        if any(each.is_meta for each in all_of_them):
            raise ConfigError("model has layers on the meta device, without weights; load them first.")
        layouts = [self.load(index).layout() for index in range(self.num_layers)]
        for index, layout in enumerate(layouts):
            if layout != layouts[0]:
                raise ConfigError(
                    f"model has layers of several kinds: {index} does not have the parameters of 0; it must "
                    f"be {ALLOWED}, with parameters of the same shapes and types."
                )
        # Only shapes count from here on.
        self.first = _ModuleWeights(torch.empty_like(each, device="meta") for each in self._parameters[0])

    @property
    def layers(self) -> MutableMapping[int, _ModuleWeights]:
        return self

    def parameters(self, index: int) -> list[nn.Parameter]:
        return self._parameters[index]

    def load(self, index: int) -> _ModuleWeights:
        """The present memory of a layer."""
        return _ModuleWeights(each.detach().contiguous() for each in self._parameters[index])

    def restore(self, index: int, source: Source) -> None:
        """Give a layer memory of its own."""
        (buffer,) = allocate_buffers(1, self.first.buffer_bytes, torch.device("cpu"))
        source.read(index, buffer)
        placed = self.first.placed(buffer).tensors
        for parameter, tensor, origin in zip(
            self._parameters[index], placed, self._origins[index], strict=True
        ):
            parameter.data = tensor.to(origin, copy=True)

    def __setitem__(self, index: int, weights: _ModuleWeights) -> None:
        for parameter, tensor in zip(self._parameters[index], weights.tensors, strict=True):
            parameter.data = tensor
        self._there[index] = weights

    def __delitem__(self, index: int) -> None:
        self.take_memory(index)

    def take_memory(self, index: int) -> None:
        """Leave a layer without weights."""
        for parameter in self._parameters[index]:
            parameter.data = parameter.new_empty(0)
        self._there.pop(index, None)

    def __getitem__(self, index: int) -> _ModuleWeights:
        return self._there[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._there)

    def __len__(self) -> int:
        return len(self._there)


class _FileSource:
    """Layers in a file that no folder names any more."""

    def __init__(self, layers: ModuleLayers) -> None:
        first = layers.load(0)
        form = PackedFormat("module", first.layout(), layers.num_layers, first.buffer_bytes)
        folder = cache_root() / "packed"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="module-", dir=folder) as made:
            self._file = packed_file(Path(made) / "module.layers", form, first, layers.load)
        self.read = self._file.read
        self.close = self._file.close

    def link(self, buffers: Sequence[Tensor]) -> WeightLink:
        """A link that fills the buffers; it is closed before another one is made."""
        return ThreadLink(buffers, self._file.read, lambda: None)


class _HostSource:
    """Layers in host memory, for a CUDA device."""

    def __init__(self, layers: ModuleLayers, device: torch.device) -> None:
        self._layers = host_layers(layers.num_layers, layers.load(0), layers.load)
        self._device = device

    def link(self, buffers: Sequence[Tensor]) -> WeightLink:
        return CudaLink(buffers, self._layers, MicroBatchStreams(self._device, 1))

    def read(self, index: int, buffer: Tensor) -> None:
        """Fill a buffer in host memory with a layer."""
        buffer.copy_(self._layers[index])

    def close(self) -> None:
        pass


Source = _FileSource | _HostSource


def pack(layers: ModuleLayers, device: torch.device) -> Source:
    return _FileSource(layers) if device.type == "cpu" else _HostSource(layers, device)


def _move_buffer(module: nn.Module, name: str, device: torch.device) -> None:
    buffer = module._buffers.get(name)
    if buffer is not None and buffer.device != device:
        module.register_buffer(name, buffer.to(device), name not in module._non_persistent_buffers_set)
