"""Workloads that experiments and benchmarks share."""

from __future__ import annotations

import numpy as np

from backfill.simulation.replay import Lengths, Workload
from backfill.simulation.workloads import online_requests


def gamma_workload(
    rate_per_s: float,
    cv: float,
    duration_s: float,
    lengths: Lengths,
    *,
    offline: tuple[Lengths, ...],
    seed: int,
) -> Workload:
    """Requests of equal lengths with gamma-distributed gaps (ConServe, section 6.3.2)."""
    count = max(1, round(rate_per_s * duration_s))
    online = online_requests(rate_per_s, cv, [lengths] * count, np.random.default_rng(seed))
    return Workload(online, duration_s, offline)
