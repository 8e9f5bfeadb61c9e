"""Latency objectives."""

from __future__ import annotations

import math
from dataclasses import dataclass

from backfill.core.errors import RequestError


@dataclass(frozen=True, slots=True)
class SLO:
    """Objectives of an online request, in seconds.

    Attributes:
        ttft_s: from arrival to the first token.
        tpot_s: bounds every gap between two tokens, not only their mean (ConServe's TPOT).
    """

    ttft_s: float
    tpot_s: float

    def validate(self, ttft_name: str, tpot_name: str) -> None:
        """Raise RequestError naming the objective that is not a positive, finite number."""
        for name, value in ((ttft_name, self.ttft_s), (tpot_name, self.tpot_s)):
            if not (math.isfinite(value) and value > 0):
                raise RequestError(f"{name} must be a number of seconds above 0, got {value:g}.", param=name)
