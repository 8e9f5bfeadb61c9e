"""What a model with offloaded layers refuses: it has not all of its weights, and one thread runs it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn


class RunningThread:
    """The thread that runs a pass: two would take each other's layers away."""

    def __init__(self) -> None:
        self._thread: int | None = None
        self._lock = threading.Lock()

    def enter(self) -> None:
        """Raises: RuntimeError if another thread runs a pass."""
        own = threading.get_ident()
        with self._lock:
            if self._thread not in (None, own):
                raise RuntimeError("another thread runs the model; offloaded layers serve one at a time")
            self._thread = own

    def leave(self, *_: object) -> None:
        with self._lock:
            if self._thread == threading.get_ident():
                self._thread = None

    def __reduce__(self) -> NoReturn:
        refuse_copy()


def refuse_copy() -> NoReturn:
    """For what a copy of the model, or a pickle, comes to by the model's hooks."""
    raise RuntimeError("a model with offloaded layers cannot be copied; call `remove` of its handle first")


def refuse_state(*_: object) -> NoReturn:
    """A hook of ``state_dict``."""
    raise RuntimeError("the state of a model with offloaded layers is incomplete; call `remove` first")


class ConversionGuard:
    """Refuses what converts or moves a model's weights, such as ``half``, from now on.

    What leaves their types and devices as they are goes on: a pipeline calls ``to`` with the same device.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        for module in self._modules:  # torch has no hook for it
            module.__dict__["_apply"] = functools.partial(_apply_if_alike, module)

    def remove(self) -> None:
        for module in self._modules:
            module.__dict__.pop("_apply", None)


def _apply_if_alike(module: nn.Module, function: Callable[[Tensor], Tensor], *options: Any) -> nn.Module:
    """``Module._apply``. Raises: RuntimeError before anything is changed."""
    for dtype, device in {(each.dtype, each.device) for each in module.parameters()}:
        converted = function(torch.empty(0, dtype=dtype, device=device))
        if (converted.dtype, converted.device) != (dtype, device):
            raise RuntimeError(
                f"the weights of offloaded layers stay {dtype} on {device}; call `remove` of the handle, "
                "convert the model, and call `offload` again"
            )
    applied: nn.Module = type(module)._apply(module, function, *options)  # type: ignore[no-untyped-call]
    return applied
