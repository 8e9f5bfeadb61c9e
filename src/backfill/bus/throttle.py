"""An engine's place on a bus, and its transfers, which are held to the bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable
from mmap import PAGESIZE

from backfill.bus.file import BusFile, bus_path
from backfill.core.config import EngineConfig

# What all engines together transfer while each has its turn once. Short beside the transfer of a layer.
ROUND_BYTES = 2 << 20
_LEAST_CHUNK_BYTES = 64 << 10
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
    """

    def __init__(
        self,
        file: BusFile,
        share: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.num_bytes = 0
        self.wait_s = 0.0
        self._file = file
        self._clock = clock
        self._sleep = sleep
        self.set_share(share)

    def set_share(self, share: float) -> None:
        """Of the bus, in comparison with the shares of others; at most 1."""
        num_pages = int(share * ROUND_BYTES) // PAGESIZE
        self._chunk_bytes = max(_LEAST_CHUNK_BYTES, num_pages * PAGESIZE)

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


class Bus:
    """An engine's place on a bus.

    On a CPU the bus is emulated: transfers of weights and KV take the time that it would take. On CUDA it is
    the one that is there.

    Attributes:
        weights: transfers of weights on a CPU.
        copies: those of KV on a CPU.
    """

    def __init__(self, file: BusFile) -> None:
        self.file = file
        self.weights = BusThrottle(file, 1.0)
        self.copies = BusThrottle(file, _COPIES_SHARE)

    @property
    def wait_s(self) -> float:
        return self.weights.wait_s + self.copies.wait_s


def open_bus(config: EngineConfig) -> Bus | None:
    """The bus that the configuration names; None if none. Raises: ConfigError."""
    bytes_per_s = config.offload_bus_bytes_per_s
    if config.offload_bus is None or bytes_per_s is None:
        return None
    return Bus(BusFile(bus_path(config.offload_bus), bytes_per_s))
