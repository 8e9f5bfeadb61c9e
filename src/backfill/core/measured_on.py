"""What times were measured on: the key of every file that keeps them."""

from __future__ import annotations

from dataclasses import dataclass, fields

from backfill.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MeasuredOn:
    """What times were measured on. They are refused elsewhere.

    Attributes:
        model: the model's shape, and a digest of its dimensions.
        device: kind of device; on CPU also the processor, the kernels and the number of threads.
        dtype: of weights and KV.
    """

    model: str
    device: str
    dtype: str

    def check(self, here: MeasuredOn, file: str, remedy: str) -> None:
        """Raises: ConfigError, naming the file and what differs, if it was measured on something else."""
        for field in fields(self):
            measured, wanted = getattr(self, field.name), getattr(here, field.name)
            if measured != wanted:
                raise ConfigError(
                    f"The {file} is of another {field.name}: measured on {measured!r}, here it is "
                    f"{wanted!r}; {remedy}"
                )
