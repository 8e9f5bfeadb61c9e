"""Ranks of one stage as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class ThreadGroup:
    """A ``TensorGroup`` of the threads that share ``exchange``."""

    def __init__(self, rank: int, exchange: Exchange) -> None:
        self.rank = rank
        self.size = exchange.barrier.parties
        self._exchange = exchange

    def all_reduce(self, x: Tensor) -> Tensor:
        assert x.is_contiguous()
        return torch.stack(self._exchange.all_of(self.rank, x)).sum(0)

    def gather_columns(self, x: Tensor) -> Tensor | None:
        parts = self._exchange.all_of(self.rank, x)
        assert len({part.shape for part in parts}) == 1, "collectives need equal shapes"
        return torch.cat(parts, dim=1) if self.rank == 0 else None


class Exchange:
    """Where threads meet and see each other's tensors."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60.0)
        self._tensors: list[Tensor | None] = [None] * size

    def all_of(self, rank: int, x: Tensor) -> list[Tensor]:
        self._tensors[rank] = x.clone()
        self.barrier.wait()
        found = [each for each in self._tensors if each is not None]
        self.barrier.wait()
        return found


def on_ranks(size: int, run: Callable[[ThreadGroup], Result]) -> list[Result]:
    """``run`` on each of ``size`` threads; raises the first error of one of them."""
    exchange = Exchange(size)

    def guarded(rank: int) -> Result:
        try:
            with torch.inference_mode():
                return run(ThreadGroup(rank, exchange))
        except BaseException:
            exchange.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(guarded, rank) for rank in range(size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]
