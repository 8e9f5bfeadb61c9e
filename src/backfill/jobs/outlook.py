"""Whether a batch can end within its window, at the pace of the lines that ended before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from backfill.core.clock import Clock
from backfill.jobs.feeder import Feeder
from backfill.jobs.lines import LineResult
from backfill.jobs.open_batch import OpenBatch
from backfill.jobs.records import LineOutcome

_HALF_LIFE_S = 600.0
_LEAST_LINES = 20
_RAN = (LineOutcome.COMPLETED, LineOutcome.FAILED)
_UNITS = ((86400, "days"), (3600, "hours"), (60, "minutes"))


@dataclass(slots=True)
class _Ended:
    """Lines that ended while the time was measured; the older ones count less."""

    num_lines: float = 0.0
    num_bytes: float = 0.0
    seconds: float = 0.0


class Outlook:
    """Counts how fast lines end, of all owners together, while any are in flight.

    Args:
        jobs: the open batches, by name.
    """

    def __init__(self, jobs: Mapping[str, OpenBatch], feeder: Feeder, clock: Clock) -> None:
        self._jobs = jobs
        self._feeder = feeder
        self._clock = clock
        self._ended = _Ended()
        self._at_s: float | None = None  # of the last lines that ended; None if none were left then

    def on_ended(self, results: Sequence[LineResult]) -> None:
        """Lines have ended that still count as in flight."""
        now_s, at_s, feeder = self._clock.now_s(), self._at_s, self._feeder
        self._at_s = now_s if feeder.has_waiting or feeder.num_in_flight > len(results) else None
        results = [result for result in results if result.outcome in _RAN]
        if at_s is None or not results:
            return  # since when they ran is not known, or none ran
        ended, kept = self._ended, 0.5 ** ((now_s - at_s) / _HALF_LIFE_S)
        self._ended = _Ended(
            kept * ended.num_lines + len(results),
            kept * ended.num_bytes + sum(result.line.num_bytes for result in results),
            kept * ended.seconds + now_s - at_s,
        )

    def warning(self, batch_id: str) -> str | None:
        """That the batch will not end within its window; None if it may, and where that is not known.

        That is before lines have ended, and where several servers share the lines. The device is shared
        evenly between owners; of an owner's batches, those whose windows end before this one's go first.
        """
        job, ended = self._jobs.get(batch_id), self._ended
        if job is None or job.lease is not None or job.cancelled.done():
            return None
        if ended.num_lines < _LEAST_LINES or ended.seconds <= 0.0:
            return None
        owners = {each.batch.owner for each in self._jobs.values() if self._num_lines_left(each) > 0}
        num_lines = sum(
            self._num_lines_left(each)
            for each in self._jobs.values()
            if each.batch.owner == job.batch.owner and each.deadline_s <= job.deadline_s
        )
        needed_s = num_lines * max(1, len(owners)) * ended.seconds / ended.num_lines
        if needed_s <= job.left_s:
            return None
        return (
            f"At the present pace of its owner's lines, the batch needs about {_shown(needed_s)}, and its "
            f"window ends in {_shown(max(0.0, job.left_s))}. Lines that have not ended by then expire."
        )

    def _num_lines_left(self, job: OpenBatch) -> float:
        """Until the file is checked, by its bytes."""
        if job.batch.request_counts.total or not self._ended.num_bytes:
            return job.num_unfinished
        return job.num_input_bytes * self._ended.num_lines / self._ended.num_bytes


def _shown(seconds: float) -> str:
    for unit_s, name in _UNITS:
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {name}"
    return f"{seconds:.0f} seconds"
