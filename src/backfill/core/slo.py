"""Latency objectives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SLO:
    """Objectives of an online request, in seconds.

    Attributes:
        ttft_s: from arrival to the first token.
        tpot_s: bounds every gap between two tokens, not only their mean (ConServe's TPOT).
    """

    ttft_s: float
    tpot_s: float
