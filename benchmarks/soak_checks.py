"""The soak's pure functions: schedule, histograms, gaps, exactly-once, memory."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

KILL_ENGINE, KILL_SERVER, DISK_FULL, DISK_HANG = "kill_engine", "kill_server", "disk_full", "disk_hang"
DISTURBANCES = (KILL_ENGINE, KILL_SERVER, DISK_FULL, DISK_HANG)
# Largest difference between identical rounds after a warm-up.
MAX_GROWTH_FRAC = 0.05
_SAMPLE = re.compile(r"(\w[\w:]*)(?:\{(.*)\})? (\S+)")

Window = tuple[float, float]  # [start, end) in seconds of the monotonic clock


def schedule(seed: int, duration_s: float, interval_s: float) -> Iterator[tuple[float, str]]:
    """Pauses in seconds, each with the disturbance that follows it. Deterministic.

    Kinds come in shuffled rounds, so that a short run has each of them. Pauses are 0.2 to 1.8 times
    ``interval_s``, until they add up to ``duration_s``.
    """
    generator = random.Random(seed)
    left_s = duration_s
    while True:
        for kind in generator.sample(DISTURBANCES, len(DISTURBANCES)):
            pause_s = interval_s * generator.uniform(0.2, 1.8)
            left_s -= pause_s
            if left_s < 0:
                return
            yield pause_s, kind


# --- metrics ---


def samples(text: str, name: str) -> Iterator[tuple[str, float]]:
    """Labels and value of each sample of ``name`` in the Prometheus text format."""
    for line in text.splitlines():
        match = _SAMPLE.fullmatch(line)
        if match and match[1] == name:
            yield match[2] or "", float(match[3])


def gauge(text: str, name: str) -> float:
    """Sum of the samples of ``name`` over all labels; 0 where there is none."""
    return sum(value for _, value in samples(text, name))


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of observations by bucket; ``bounds`` are their upper ends, ascending, the last infinite."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]

    @classmethod
    def parse(cls, text: str, name: str) -> Histogram | None:
        """The histogram ``name``, summed over its labels; None where it is not exposed."""
        cumulative: dict[float, float] = {}
        for labels, value in samples(text, f"{name}_bucket"):
            bound = re.search(r'le="([^"]+)"', labels)
            if bound:
                cumulative[float(bound[1])] = cumulative.get(float(bound[1]), 0.0) + value
        if not cumulative:
            return None
        bounds = sorted(cumulative)
        totals = [cumulative[bound] for bound in bounds]
        counts = [total - before for total, before in zip(totals, [0.0, *totals], strict=False)]
        return cls(tuple(bounds), tuple(counts))

    @property
    def total(self) -> float:
        return sum(self.counts)

    def __add__(self, other: Histogram) -> Histogram:
        assert self.bounds == other.bounds
        return Histogram(self.bounds, tuple(a + b for a, b in zip(self.counts, other.counts, strict=True)))

    def since(self, before: Histogram | None) -> Histogram:
        """What was observed after ``before``; all of it where another process exposed that."""
        if before is None or before.bounds != self.bounds or before.total > self.total:
            return self
        return Histogram(self.bounds, tuple(a - b for a, b in zip(self.counts, before.counts, strict=True)))

    def quantile(self, frac: float) -> float:
        """The upper end of the bucket that holds it, so never too little; NaN without observations."""
        rank, seen = frac * self.total, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            seen += count
            if count and seen >= rank:
                return bound
        return math.nan


# --- times ---


def percentile(values: Sequence[float], frac: float) -> float:
    """By nearest rank; NaN without values."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(frac * len(values)) - 1)]


def figures(values: Sequence[float]) -> dict[str, float]:
    return {
        "count": len(values),
        "p50_s": percentile(values, 0.5),
        "p99_s": percentile(values, 0.99),
        "max_s": max(values, default=math.nan),
    }


def overlaps(start_s: float, end_s: float, windows: Iterable[Window]) -> bool:
    return any(start_s < end and start < end_s for start, end in windows)


def gaps(tokens: Iterable[tuple[int, float]], outages: Sequence[Window]) -> list[float]:
    """Seconds between consecutive tokens ``(stream, arrived_at_s)`` of a stream, outside outages."""
    found, last = [], (-1, 0.0)
    for stream, at_s in tokens:
        if stream == last[0] and not overlaps(last[1], at_s, outages):
            found.append(at_s - last[1])
        last = (stream, at_s)
    return found


# --- batches ---


@dataclass(frozen=True, slots=True)
class BatchAnswers:
    """An ended batch as its files show it; custom ids in the files' order, with repetitions.

    Attributes:
        asked: custom ids of the input; lines that must fail begin with ``BAD_LINE``.
    """

    batch_id: str
    status: str
    total: int
    completed: int
    failed: int
    asked: Sequence[str]
    output: Sequence[str]
    errors: Sequence[str]


BAD_LINE = "bad-"


def faults_of(batch: BatchAnswers) -> list[str]:
    """Violations of "every line is answered exactly once", in words."""
    faults = []
    if batch.status != "completed":
        faults.append(f"it ended as {batch.status}")
    asked = Counter(batch.asked)
    answered = Counter([*batch.output, *batch.errors])
    for what, ids in (
        ("no answer", asked.keys() - answered.keys()),
        ("an answer nobody asked for", answered.keys() - asked.keys()),
        ("more than one answer", {id_ for id_, count in answered.items() if count > 1}),
        ("an error", {id_ for id_ in batch.errors if not id_.startswith(BAD_LINE)}),
        ("an answer that should be an error", {id_ for id_ in batch.output if id_.startswith(BAD_LINE)}),
    ):
        if ids:
            faults.append(f"{what} for {len(ids)} lines, such as {min(ids)}")
    for what, counted, found in (
        ("total", batch.total, len(batch.asked)),
        ("completed", batch.completed, len(batch.output)),
        ("failed", batch.failed, len(batch.errors)),
    ):
        if counted != found:
            faults.append(f"request_counts.{what} is {counted}, the files have {found}")
    return [f"{batch.batch_id}: {fault}" for fault in faults]


# --- memory ---


def growth_fracs(rounds: Sequence[Mapping[str, int]]) -> dict[str, float]:
    """Growth by role of process after the first two rounds, a warm-up.

    Compares the most after one of the first two with the least after one of the last two: a leak is in both
    of the last two, memory that the allocator happens to keep is not.

    Args:
        rounds: bytes by role, when idle after each of at least four equal rounds without a restart.
    """
    roles = set.intersection(*(set(held) for held in rounds))
    return {
        role: min(held[role] for held in rounds[-2:]) / max(held[role] for held in rounds[:2]) - 1
        for role in sorted(roles)
    }
