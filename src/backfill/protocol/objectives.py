"""Latency objectives that a request sets, in its body or in its headers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from backfill.core.errors import RequestError

SLO_HEADERS = {"ttft": "x-slo-ttft-ms", "tpot": "x-slo-tpot-ms"}  # by the field of ``slo``

Number = Annotated[float, Field(allow_inf_nan=False)]


class SloFields(BaseModel):
    """The body's ``slo``, in seconds; the server's objectives stand in for absent ones."""

    model_config = ConfigDict(strict=True, extra="forbid")
    ttft: Number | None = None
    tpot: Number | None = None

    def as_dict(self) -> dict[str, float]:
        """The objectives that are set."""
        return self.model_dump(exclude_none=True)


@dataclass(frozen=True, slots=True)
class Objective:
    """One objective of a request, with the name and the unit that the client used."""

    seconds: float
    name: str
    unit: Literal["s", "ms"] = "s"

    @classmethod
    def from_header(cls, name: str, text: str) -> Objective:
        """Raises: RequestError for a header that is no positive number of milliseconds."""
        try:
            value = math.nan if "_" in text else float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            raise RequestError(
                f"{name} must be a number of milliseconds above 0, got {text[:40]!r}.", param=name
            )
        return cls(value / 1000, name, "ms")

    def show(self, seconds: float) -> str:
        """A time in the client's unit, such as ``0.5 s``."""
        return f"{seconds * (1000 if self.unit == 'ms' else 1):g} {self.unit}"
