"""What an all-reduce among the devices of a machine takes, as it was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

from backfill.core.errors import ConfigError
from backfill.costs.model import PiecewiseLinear

A100_DGX = "a100-dgx"


@dataclass(frozen=True, slots=True)
class Collectives:
    """Collectives over the links of one machine.

    Attributes:
        all_reduce_s: seconds by bytes of the tensor, by number of devices.
    """

    all_reduce_s: Mapping[int, PiecewiseLinear]

    def all_reduce(self, num_devices: int) -> PiecewiseLinear:
        """Raises: ConfigError for a number of devices that was not measured."""
        if num_devices not in self.all_reduce_s:
            known = ", ".join(map(str, (1, *self.all_reduce_s)))
            raise ConfigError(
                f"must be one of {known}, among which all-reduces were measured, got {num_devices}.",
                field="tensor_parallel_size",
            )
        return self.all_reduce_s[num_devices]

    def transfer_s(self, num_bytes: float) -> float:
        """Seconds until another device has so many bytes.

        Not measured: an all-reduce between two devices moves as many bytes each way over the same link, so
        its time is an upper bound.
        """
        return self.all_reduce(2)(num_bytes)


@lru_cache(maxsize=4)
def load_collectives(name: str) -> Collectives:
    """Part of the package; its file says where the times come from."""
    file = resources.files(__package__).joinpath("collectives", f"{name}.json")
    content = json.loads(file.read_text(encoding="utf-8"))
    return Collectives(
        {
            int(num_devices): PiecewiseLinear(tuple(times["x"]), tuple(times["y"]))
            for num_devices, times in content["all_reduce"].items()
        }
    )
