"""Arrivals whose rate changes by phases, which two papers have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backfill.core.errors import ConfigError
from backfill.workloads.arrivals import Instants, RandomSource, unit_arrivals


@dataclass(frozen=True, slots=True)
class Phase:
    """A period with one arrival rate; a rate of 0 makes it an OFF phase."""

    duration_s: float
    rate_per_s: float


def phased_arrivals(count: int, phases: Sequence[Phase], burstiness: float, rng: RandomSource) -> Instants:
    """Arrivals whose rate follows ``phases``, which repeat until all requests have arrived.

    A process of rate 1 is drawn in operational time and mapped through the inverse of the accumulated rate.
    The expected number of arrivals in a phase is its rate times its duration. No request arrives in an OFF
    phase; a gap that began before an OFF phase continues after it.

    Raises: ConfigError for a phase without duration, a negative rate, or phases that all have rate 0.
    """
    expected_in_cycle = _check_phases(phases)
    num_cycles = math.ceil(count / expected_in_cycle) + 1
    durations = np.tile([p.duration_s for p in phases], num_cycles)
    rates = np.tile([p.rate_per_s for p in phases], num_cycles)
    ends_at_s = np.cumsum(durations)
    work_at_end = np.cumsum(durations * rates)
    work = unit_arrivals(count, burstiness, rng)
    # The first phase whose accumulated work reaches the arrival: never an OFF phase, which adds no work.
    index = np.minimum(np.searchsorted(work_at_end, work), len(rates) - 1)
    remaining = work_at_end[index] - work
    return np.asarray(ends_at_s[index] - remaining / rates[index])


def reshaped(instants: Instants, phases: Sequence[Phase]) -> Instants:
    """A trace's instants, moved so that its mean rate follows the phases once, from 0 to their end.

    Each phase takes a part of the trace in proportion to the phase's rate times its duration. Within a phase
    the trace keeps its own fluctuation. Only the ratios of the rates matter.

    Raises: ConfigError as ``phased_arrivals`` does, or when all requests arrive at once.
    """
    _check_phases(phases)
    from_start = instants - instants[0]
    if not from_start[-1] > 0:
        raise ConfigError("The trace's requests all arrive at one instant: it cannot be given phases.")
    durations = np.array([phase.duration_s for phase in phases])
    work = durations * np.array([phase.rate_per_s for phase in phases])
    share = from_start / from_start[-1] * work.sum()
    ends_at_s = np.cumsum(durations)
    busy = work > 0  # the end of an OFF phase would make the inverse ambiguous
    work, durations, ends_at_s = work[busy], durations[busy], ends_at_s[busy]
    work_at_end = np.cumsum(work)
    index = np.minimum(np.searchsorted(work_at_end, share), len(work) - 1)
    missing = (work_at_end[index] - share) / work[index]
    return np.asarray(ends_at_s[index] - missing * durations[index])


def _check_phases(phases: Sequence[Phase]) -> float:
    """Expected arrivals in one cycle of the phases. Raises: ConfigError."""
    if any(not (0 < p.duration_s < math.inf and 0 <= p.rate_per_s < math.inf) for p in phases):
        raise ConfigError("`phases`: every phase needs a duration above 0 s and a rate of at least 0 per s.")
    expected = sum(p.duration_s * p.rate_per_s for p in phases)
    if not expected > 0:
        raise ConfigError("`phases` must have at least one phase with a rate above 0.")
    return expected
