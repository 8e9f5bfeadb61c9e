"""Weights that can be moved: all bytes of a layer in one buffer, at fixed offsets."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from backfill.kernels.linears import as_bytes

ALIGNMENT = 64  # of each weight in its buffer: a cache line, as kernels want it
PAGE_BYTES = 4096  # of a buffer: direct reads need addresses, offsets and lengths in device blocks

Self = TypeVar("Self", bound="MovableWeights")


class MovableWeights:
    """Base of a dataclass whose fields are tensors, linears, other movable weights, or None."""

    __slots__ = ()

    def memory(self) -> tuple[Tensor, ...]:
        """All weights in the order of the fields, as flat uint8 views."""
        return tuple(part for value in self._values() for part in _memory_of(value))

    def layout(self) -> str:
        """Digest of what lies where: weights of one layout may exchange buffers."""
        parts = [f"{ALIGNMENT} {type(self).__name__}", *map(_layout_of, self._values())]
        return hashlib.sha256("; ".join(parts).encode()).hexdigest()[:16]

    @property
    def buffer_bytes(self) -> int:
        """Bytes of a buffer that holds all weights; whole pages."""
        return _round_up(sum(_round_up(part.nbytes, ALIGNMENT) for part in self.memory()), PAGE_BYTES)

    def placed(self: Self, buffer: Tensor) -> Self:
        """Weights of this layout that lie in ``buffer``: aligned uint8 ``[buffer_bytes]``, not set."""
        return self._with_memory(self._parts_of(buffer))

    def copy_to(self, buffer: Tensor) -> None:
        """Write the weights to ``buffer`` as ``placed`` weights read them; the gaps become 0."""
        buffer.zero_()
        for part, source in zip(self._parts_of(buffer), self.memory(), strict=True):
            part.copy_(source)

    def _parts_of(self, buffer: Tensor) -> Iterator[Tensor]:
        offset = 0
        for part in self.memory():
            yield buffer[offset : offset + part.nbytes]
            offset += _round_up(part.nbytes, ALIGNMENT)

    def _with_memory(self: Self, parts: Iterator[Tensor]) -> Self:
        names = [field.name for field in fields(self)]  # type: ignore[arg-type]  # a dataclass
        changes = {name: _with_memory(getattr(self, name), parts) for name in names}
        return replace(self, **changes)  # type: ignore[type-var]

    def _values(self) -> Iterable[Any]:
        return (getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]


def allocate_buffers(number: int, num_bytes: int, device: torch.device) -> list[Tensor]:
    """Buffers of ``num_bytes`` (whole pages), each aligned to a page; uninitialised."""
    memory = torch.empty(number * num_bytes + PAGE_BYTES, dtype=torch.uint8, device=device)
    first = -memory.data_ptr() % PAGE_BYTES
    return [memory[first + index * num_bytes :][:num_bytes] for index in range(number)]


def _memory_of(value: Any) -> tuple[Tensor, ...]:
    if value is None:
        return ()
    if isinstance(value, Tensor):
        return as_bytes(value)
    memory: tuple[Tensor, ...] = value.memory() if isinstance(value, MovableWeights) else value.memory
    return memory


def _layout_of(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, MovableWeights):
        return value.layout()
    sizes = [part.nbytes for part in value.memory]
    return f"{value.layout} {value.out_features} {value.in_features} {sizes}"


def _with_memory(value: Any, parts: Iterator[Tensor]) -> Any:
    if value is None:
        return None
    if isinstance(value, Tensor):
        return next(parts).view(value.dtype).view(value.shape)
    if isinstance(value, MovableWeights):
        return value._with_memory(parts)
    return value.placed([next(parts) for _ in value.memory])


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
