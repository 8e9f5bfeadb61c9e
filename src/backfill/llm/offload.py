"""``offload``: the offloading interval (Select-N, section 4.3) for models of ``transformers``."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from backfill.core.config import GIB
from backfill.core.errors import ConfigError, InsufficientMemory
from backfill.execution.offloading import LayerStreamer
from backfill.execution.weight_links import WeightLink
from backfill.llm.offloaded_layers import ALLOWED, ModuleLayers, MovedOthers, pack
from backfill.llm.options import in_library_terms
from backfill.models.movable import allocate_buffers
from backfill.offloading.interval import num_device_layers

_offloaded: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def offload(model: nn.Module, interval: int = 4, device: str | torch.device | None = None) -> OffloadedModel:
    """Keep the weights of every ``interval``-th decoder layer outside device memory.

    They are transferred into two staging buffers while the layers before them are computed. The model is used
    as before, for inference only: its forward passes and ``generate`` give the same results. On CUDA all
    layers are kept in pinned host memory; on a CPU in a temporary file of the cache folder
    (``BACKFILL_CACHE_ROOT``).

    Args:
        model: of ``transformers``, or any module that calls the layers of a ``ModuleList`` in their order.
        interval: from 1, where every layer is offloaded, to the number of layers.
        device: where the model is to compute, and moves to; None: where its other parameters are.
    Returns: a handle, also a context manager, whose ``remove`` restores the model.
    Raises: InvalidOption, a ValueError, for an interval out of range or a model that cannot be offloaded,
        with what is allowed; BackfillError if memory or disk space is missing.
    """
    with in_library_terms():
        return OffloadedModel(model, interval, device)


class OffloadedModel:
    """A model with offloaded layers; made by ``offload``. Calls must not overlap with a forward pass.

    One thread runs the model at a time: while it does, a pass of another one raises RuntimeError. After an
    error of ``set_interval`` or ``remove`` that left layers without weights, ``remove`` may be called again.

    Attributes:
        device: where the model computes.
    """

    def __init__(self, model: nn.Module, interval: int, device: str | torch.device | None) -> None:
        if model in _offloaded:
            raise ConfigError("model is offloaded already; call `remove` of its handle first.")
        layers = _decoder_layers(model)
        _check_interval(interval, len(layers))
        others = _others(model, layers)
        self._model = model
        self._layers = ModuleLayers(layers)
        self.device = _device(device, [*others, *self._layers.parameters(0)])
        # The thread that runs a pass: two would take each other's layers away.
        self._running: int | None = None
        self._running_lock = threading.Lock()
        self._streamer: LayerStreamer | None = None
        self._link: WeightLink | None = None
        # Memory that is made in inference mode could not be used outside of it.
        with torch.inference_mode(False), torch.no_grad():
            self._source = pack(self._layers, self.device)
            self._finalizer = weakref.finalize(self, self._source.close)
            self._others = MovedOthers(model, others)
            try:
                self._others.move_to(self.device)
                for index in range(len(layers)):
                    self._layers.take_memory(index)
                self._begin(interval)
            except BaseException:
                self._end()
                self._restore()
                raise
        self._hooks = [model.register_state_dict_pre_hook(_refuse_state)]  # type: ignore[no-untyped-call]
        for index, layer in enumerate(layers):
            # They hold this handle, so that it lives as long as the model.
            self._hooks.append(layer.register_forward_pre_hook(functools.partial(self._before, index)))
            self._hooks.append(layer.register_forward_hook(functools.partial(self._after, index)))
        for module in {model, *_callers(model, layers)}:
            # Also where a pass raises, or leaves the last layers out.
            self._hooks.append(module.register_forward_hook(self._leave, always_call=True))
        for module in model.modules():  # torch has no hook for what converts or moves weights
            module.__dict__["_apply"] = functools.partial(_apply_if_alike, module)
        _offloaded.add(model)

    @property
    def interval(self) -> int:
        """One layer in so many is offloaded."""
        return self._interval

    @property
    def stall_s(self) -> float:
        """Seconds for which layers have waited for their weights since the interval was set.

        On CUDA as far as the device has computed.
        """
        if self._link is None:
            return 0.0
        self._link.collect()
        return self._link.stall_s

    def set_interval(self, interval: int) -> None:
        """Offload more or fewer layers; the memory of the others is taken, or freed.

        Raises: InvalidOption; InsufficientMemory. After them and other errors the interval is as it was.
        """
        with in_library_terms():
            self._check_offloaded()
            _check_interval(interval, self._layers.num_layers)
        previous = self._interval
        with in_library_terms(), torch.inference_mode(False), torch.no_grad():
            self._end()
            try:
                self._begin(interval)
            except BaseException:
                self._end()
                self._begin(previous)
                raise

    def remove(self) -> None:
        """Give every layer its weights back, on the device where they were. Further calls do nothing."""
        if self._model not in _offloaded:
            return
        with torch.inference_mode(False), torch.no_grad():
            self._end()
            self._restore()
        for hook in self._hooks:
            hook.remove()
        for module in self._model.modules():
            module.__dict__.pop("_apply", None)
        _offloaded.discard(self._model)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def __reduce__(self) -> NoReturn:
        """Copies and pickles of the model come to it by its hooks."""
        raise RuntimeError(
            "a model with offloaded layers cannot be copied; call `remove` of its handle first"
        )

    def _check_offloaded(self) -> None:
        if self._model not in _offloaded:
            raise ConfigError("the handle was removed; call `offload` again.")

    def _restore(self) -> None:
        for index in range(self._layers.num_layers):
            self._layers.restore(index, self._source)
        self._others.move_back()
        self._finalizer()

    def _begin(self, interval: int) -> None:
        """Raises: InsufficientMemory, leaving the layers without weights."""
        first = self._layers.first
        num_buffers = num_device_layers(self._layers.num_layers, interval)
        try:
            buffers = allocate_buffers(num_buffers, first.buffer_bytes, self.device)
        except (RuntimeError, MemoryError) as error:
            gib = num_buffers * first.buffer_bytes / GIB
            raise InsufficientMemory(
                f"Layers of {gib:.2f} GiB could not be allocated on {self.device}; lower `interval`."
            ) from error
        self._link = self._source.link(buffers)
        self._interval = interval
        self._streamer = LayerStreamer(
            self._layers, [first.placed(buffer) for buffer in buffers], self._link, interval
        )

    def _end(self) -> None:
        """Leave the layers without weights. Also after an error, and again."""
        link, self._link, self._streamer = self._link, None, None  # buffers are freed before others are made
        try:
            if link is not None:
                link.close()
        finally:
            self._layers.clear()

    def _before(self, index: int, *_: object) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "offloaded layers compute no gradients; run the model in "
                "torch.inference_mode() or torch.no_grad()"
            )
        if self._streamer is None:
            raise RuntimeError("the model has no weights since an error; call `remove` of its handle")
        own = threading.get_ident()
        with self._running_lock:
            if self._running not in (None, own):
                raise RuntimeError("another thread runs the model; offloaded layers serve one at a time")
            self._running = own
        self._streamer.before(index)

    def _after(self, index: int, *_: object) -> None:
        if self._streamer is not None:
            self._streamer.after(index)

    def _leave(self, *_: object) -> None:
        with self._running_lock:
            if self._running == threading.get_ident():
                self._running = None


def _decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The list of layers with the most parameters. Raises: ConfigError."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, {ALLOWED}, got {model!r:.80}.")
    lists = [
        each
        for each in model.modules()
        if isinstance(each, nn.ModuleList) and len(each) > 1 and len(set(map(type, each))) == 1
    ]
    sizes = [sum(parameter.numel() for parameter in each.parameters()) for each in lists]
    if max(sizes, default=0) == 0:
        raise ConfigError(f"model has no decoder layers: it must be {ALLOWED}; got {type(model).__name__}.")
    return lists[sizes.index(max(sizes))]


def _others(model: nn.Module, layers: nn.ModuleList) -> list[nn.Parameter]:
    """Parameters outside the layers. Raises: ConfigError if a layer has one of them too."""
    inside = set(layers.modules())
    others = [
        parameter
        for module in model.modules()
        if module not in inside
        for parameter in module.parameters(recurse=False)
    ]
    if {id(each) for each in others} & {id(each) for each in layers.parameters()}:
        raise ConfigError(
            "model has layers that share parameters with the rest of it; they cannot be offloaded."
        )
    return others


def _device(asked: str | torch.device | None, parameters: Sequence[nn.Parameter]) -> torch.device:
    """Raises: ConfigError for another device than a CPU or a CUDA device that is there."""
    try:
        device = parameters[0].device if asked is None else torch.device(asked)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"must be cpu or cuda, got {str(asked or device)!r}.", field="device")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError("cuda: torch finds no CUDA device here; use cpu.", field="device")
        return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    return device


def _callers(model: nn.Module, layers: nn.ModuleList) -> list[nn.Module]:
    """Modules whose forward pass calls the layers: those that have the list."""
    return [each for each in model.modules() if any(child is layers for child in each.children())]


def _check_interval(interval: int, num_layers: int) -> None:
    if type(interval) is not int or not 1 <= interval <= num_layers:
        raise ConfigError(
            f"must be a whole number from 1 to {num_layers}, the model's layers, got {interval!r:.80}.",
            field="interval",
        )


def _refuse_state(*_: object) -> NoReturn:
    """A hook of ``state_dict``."""
    raise RuntimeError("the state of a model with offloaded layers is incomplete; call `remove` first")


def _apply_if_alike(module: nn.Module, function: Callable[[Tensor], Tensor], *options: Any) -> nn.Module:
    """``Module._apply``, for functions that leave types and devices as they are.

    A pipeline calls ``to`` with the same device. Raises: RuntimeError before anything is changed.
    """
    for dtype, device in {(each.dtype, each.device) for each in module.parameters()}:
        converted = function(torch.empty(0, dtype=dtype, device=device))
        if (converted.dtype, converted.device) != (dtype, device):
            raise RuntimeError(
                f"the weights of offloaded layers stay {dtype} on {device}; call `remove` of the handle, "
                "convert the model, and call `offload` again"
            )
    applied: nn.Module = type(module)._apply(module, function, *options)  # type: ignore[no-untyped-call]
    return applied
