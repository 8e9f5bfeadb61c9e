"""Headers that a generation request may bring, and objectives as clients name them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from backfill.core.errors import RequestError

ServiceTier = Literal["auto", "default", "fast", "flex", "priority", "scale", "standard"]
SLO_HEADERS = {"ttft": "x-slo-ttft-ms", "tpot": "x-slo-tpot-ms"}  # by the field of ``slo``
PRIORITY_HEADER = "x-vllm-priority"
TIER_HEADER = "x-service-tier"
TRACE_HEADER = "traceparent"
# The least window of a batch too: near its end a request goes before all others of its class.
MIN_WINDOW_S = 60.0
REQUEST_HEADERS = (*SLO_HEADERS.values(), PRIORITY_HEADER, TIER_HEADER, TRACE_HEADER)


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


def is_flex(tier: bytes, header: str | None) -> bool:
    """Whether a request that was not parsed is offline.

    Args:
        tier: its body's ``service_tier`` as JSON, which goes before the header; empty for none.
        header: ``TIER_HEADER``.
    """
    return header == "flex" if tier in (b"", b"null") else tier == b'"flex"'


def tier_of(text: str) -> ServiceTier:
    """The tier that ``TIER_HEADER`` names. Raises: RequestError."""
    tiers: tuple[ServiceTier, ...] = get_args(ServiceTier)
    for tier in tiers:
        if tier == text:
            return tier
    raise RequestError(f"{TIER_HEADER} must be {', '.join(tiers)}, got {text[:40]!r}.", param=TIER_HEADER)
