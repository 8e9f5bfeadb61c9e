"""The interval that meets objectives within a device's memory: Select-N, sections 4.4 and 4.5."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from backfill.core.slo import SLO
from backfill.offloading.record import OBJECTIVE_GRAIN_S, PerformanceRecord, Phase, RecordedLoad

# Of a request's tokens, those that are behind its context in its last step: the one computed and the next.
RESERVED_TOKENS = 2

PHASES: tuple[Phase, ...] = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """The loads that an engine may have.

    Attributes:
        max_num_seqs: most requests in a step.
        max_model_len: most tokens of a request.
    """

    max_num_seqs: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class IntervalChooser:
    """Finds intervals for one engine's loads and memory.

    An interval *holds* an objective if offloading makes no recorded load miss it: every one whose step is in
    time without offloading is in time with it. What is late anyway constrains nothing, and what is beyond the
    record is not known. Where the machine makes more than few steps late without offloading, there may not be
    more of them with it.

    Attributes:
        fitting: intervals with which the model fits its device; with None if it fits without offloading.
    """

    record: PerformanceRecord
    limits: LoadLimits
    fitting: Collection[int | None]

    def smallest_interval(self, slo: SLO) -> int | None:
        """The smallest interval that fits and holds both objectives; None for no offloading.

        None also if every interval that holds saves no memory. Raises: NoIntervalHolds.
        """
        for interval in self.record.intervals:
            if self.record.saves_memory(interval) and interval in self.fitting and self.holds(interval, slo):
                return interval
        if None in self.fitting:
            return None
        raise NoIntervalHolds(self, slo)

    def holds(self, interval: int | None, slo: SLO) -> bool:
        return all(self._holds(phase, interval, _objective_s(slo, phase)) for phase in PHASES)

    def holding(self, slo: SLO) -> list[int]:
        """All intervals that hold both objectives, whether they fit or not."""
        return [each for each in self.record.intervals if self.holds(each, slo)]

    def achievable(self, phase: Phase, interval: int | None, asked_s: float) -> float:
        """The least objective of at least ``asked_s`` that an interval holds and that some load meets."""
        loads = self._loads(phase)
        if not loads or (self.least_alone_s(phase) <= asked_s and self._holds(phase, interval, asked_s)):
            return asked_s
        times_s = sorted(self.record.step_s(load, interval) for load in loads)
        offers = [each for each in map(_rounded_up, times_s) if each >= asked_s]
        return next((each for each in offers if self._holds(phase, interval, each)), asked_s)

    def least_alone_s(self, phase: Phase) -> float:
        """The shortest recorded step without offloading; 0 without one."""
        loads = self._loads(phase)
        return min((self.record.times_of(load).resident_step_s for load in loads), default=0.0)

    def beyond_record(self) -> dict[Phase, str]:
        """For each phase whose loads may be larger than any recorded one: which these are."""
        found: dict[Phase, str] = {}
        for phase in PHASES:
            loads = [each for each in self.record.loads if each.phase == phase]
            batch_size = max((each.batch_size for each in loads), default=0)
            length = max((each.length for each in loads), default=0)
            beyond = [
                f"more than {most} {what}"
                for most, limit, what in (
                    (batch_size, self.limits.max_num_seqs, "requests"),
                    (length, self.limits.max_model_len - RESERVED_TOKENS, "tokens"),
                )
                if limit > most
            ]
            if beyond:
                found[phase] = " or ".join(beyond)
        return found

    def _holds(self, phase: Phase, interval: int | None, objective_s: float) -> bool:
        return all(
            self.record.meets(load, interval, objective_s)
            for load in self._loads(phase)
            if self.record.meets(load, None, objective_s)
        )

    def _loads(self, phase: Phase) -> list[RecordedLoad]:
        """Recorded loads as which those within the limits count."""
        loads = [each for each in self.record.loads if each.phase == phase]
        batch_sizes = _sizes_within(self.limits.max_num_seqs, {each.batch_size for each in loads})
        lengths = _sizes_within(self.limits.max_model_len, {each.length for each in loads})
        return [each for each in loads if each.batch_size in batch_sizes and each.length in lengths]


class NoIntervalHolds(Exception):
    """No interval that fits the device holds the objectives.

    Attributes:
        holding: intervals that hold them and do not fit, the smallest first.
        nearest: the interval that fits with which the objectives are exceeded least.
        achievable: the least objectives that it holds.
    """

    def __init__(self, chooser: IntervalChooser, slo: SLO) -> None:
        super().__init__("no interval fits and holds the objectives")
        self.holding = chooser.holding(slo)
        self.nearest, self.achievable = _nearest(chooser, slo)


def _nearest(chooser: IntervalChooser, slo: SLO) -> tuple[int, SLO]:
    offers = {
        interval: SLO(
            chooser.achievable("prefill", interval, slo.ttft_s),
            chooser.achievable("decode", interval, slo.tpot_s),
        )
        for interval in chooser.fitting
        if interval is not None
    }
    nearest = min(
        offers,
        key=lambda each: (max(offers[each].ttft_s / slo.ttft_s, offers[each].tpot_s / slo.tpot_s), each),
    )
    return nearest, offers[nearest]


def _sizes_within(limit: int, recorded: Collection[int]) -> set[int]:
    """The recorded sizes up to a limit, and the next one, to which sizes are rounded up."""
    larger = [size for size in recorded if size >= limit]
    return {size for size in recorded if size <= min(larger, default=limit)}


def _objective_s(slo: SLO, phase: Phase) -> float:
    return slo.ttft_s if phase == "prefill" else slo.tpot_s


def _rounded_up(seconds: float) -> float:
    num_grains = math.ceil(seconds / OBJECTIVE_GRAIN_S)
    if num_grains * OBJECTIVE_GRAIN_S < seconds:  # the quotient was rounded
        num_grains += 1
    return num_grains * OBJECTIVE_GRAIN_S
