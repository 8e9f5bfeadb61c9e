"""The bus over which weights and KV are transferred, shared with other engines and held to its bandwidth."""

from __future__ import annotations

import torch

from backfill.core.config import EngineConfig
from backfill.execution.bus_file import BusFile, bus_path
from backfill.execution.bus_throttle import BusThrottle
from backfill.execution.copy_groups import CopyGroup
from backfill.execution.pool_pair import PoolPair

_COPIES_SHARE = 1 / 8  # of the bus, for an engine's KV copies


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


class ThrottledPools:
    """See ``PoolPair``. Copies also take the time that they need on a bus.

    Args:
        slot_bytes: of one token.
    """

    def __init__(self, pools: PoolPair, throttle: BusThrottle, slot_bytes: int) -> None:
        self.block_size = pools.block_size
        self.max_group_slots = pools.max_group_slots
        self._pools = pools
        self._throttle = throttle
        self._slot_bytes = slot_bytes

    def queued(self) -> torch.cuda.Event | None:
        return self._pools.queued()

    def copy(self, group: CopyGroup, after: torch.cuda.Event | None) -> None:
        num_slots = self.block_size * len(group.blocks) + sum(copy.num for copy in group.slots)

        def copy(start: int, stop: int) -> None:
            if start == 0:  # a group is one copy
                self._pools.copy(group, after)

        self._throttle.transfer(num_slots * self._slot_bytes, copy)

    def close(self) -> None:
        self._pools.close()
