"""Transfers over a bus, which are held to its bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable
from mmap import PAGESIZE

from backfill.bus.file import BusFile, BusReservations, bus_path
from backfill.core.config import EngineConfig

# What all engines together transfer while each has its turn once. Short beside the transfer of a layer.
ROUND_BYTES = 2 << 20
_LEAST_CHUNK_BYTES = 64 << 10  # of an engine
_COPIES_SHARE = 1 / 8  # of the bus, for an engine's KV copies


class BusThrottle:
    """Transfers of one thread over a bus, in chunks.

    A chunk ends when the bus has transferred it, after the chunks of others that came before. Every thread
    asks for its next chunk while the one before is transferred: one that wakes up late does not lose its
    turn. So threads that always have something to transfer take turns, and share the bus as the sizes of
    their chunks are.

    Attributes:
        num_bytes: transferred.
        wait_s: for which the bus was waited for, beside the transfers themselves.

    Args:
        num_ranks: of the engine. Each transfers its part of what is transferred, and has as large a part of
            the engine's turn.
    """

    def __init__(
        self,
        file: BusReservations,
        share: float,
        *,
        num_ranks: int = 1,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.num_bytes = 0
        self.wait_s = 0.0
        self._file = file
        self._num_ranks = num_ranks
        self._clock = clock
        self._sleep = sleep
        self.set_share(share)

    def set_share(self, share: float) -> None:
        """Of the engine, in comparison with the shares of others; at most 1."""
        turn_bytes = max(_LEAST_CHUNK_BYTES, int(share * ROUND_BYTES))
        self._chunk_bytes = max(1, turn_bytes // self._num_ranks // PAGESIZE) * PAGESIZE

    def transfer(self, num_bytes: int, work: Callable[[int, int], None]) -> None:
        """Returns when the bus would have transferred so many bytes.

        Args:
            work: transfers bytes from one position to another; called for one chunk after another. Chunks
                but the last are whole pages.
        """
        position = 0
        stop = min(num_bytes, self._chunk_bytes)
        ends_at_s = self._file.reserve(stop)
        while position < num_bytes:
            next_stop = min(num_bytes, stop + self._chunk_bytes)
            next_ends_at_s = (
                self._file.reserve(next_stop - stop, ends_at_s) if next_stop > stop else ends_at_s
            )
            work(position, stop)
            self._wait_until(ends_at_s)
            self.num_bytes += stop - position
            position, stop, ends_at_s = stop, next_stop, next_ends_at_s

    def _wait_until(self, at_s: float) -> None:
        wait_s = at_s - self._clock()
        if wait_s > 0.0:
            self._sleep(wait_s)
            self.wait_s += wait_s


class BusTransfers:
    """Those of one process over an emulated bus: they take the time that it would take.

    Attributes:
        weights: transfers of weights.
        copies: those of KV.

    Args:
        num_ranks: of the engine that the process belongs to.
    """

    def __init__(self, file: BusReservations, num_ranks: int = 1) -> None:
        self.weights = BusThrottle(file, 1.0, num_ranks=num_ranks)
        self.copies = BusThrottle(file, _COPIES_SHARE, num_ranks=num_ranks)
        self._taken = (0, 0.0)

    def take(self) -> tuple[int, float]:
        """Since the last call: bytes of KV copied, and seconds for which all transfers waited for the bus."""
        (num_bytes, wait_s), self._taken = self._taken, self._totals
        return self._taken[0] - num_bytes, self._taken[1] - wait_s

    @property
    def _totals(self) -> tuple[int, float]:
        return self.copies.num_bytes, self.weights.wait_s + self.copies.wait_s


def open_bus(config: EngineConfig) -> BusFile | None:
    """Join the bus that the configuration names; None if none. Raises: ConfigError."""
    bytes_per_s = config.offload_bus_bytes_per_s
    if config.offload_bus is None or bytes_per_s is None:
        return None
    return BusFile(bus_path(config.offload_bus), bytes_per_s)


def open_bus_of_rank(config: EngineConfig) -> BusReservations | None:
    """That bus in a rank's process, whose engine is on it; None if none. Raises: ConfigError."""
    bytes_per_s = config.offload_bus_bytes_per_s
    if config.offload_bus is None or bytes_per_s is None:
        return None
    return BusReservations(bus_path(config.offload_bus), bytes_per_s)
