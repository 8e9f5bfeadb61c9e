"""A batch that this server runs, and what reads its input."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from backfill.core.clock import Clock
from backfill.jobs.database_results import BatchLog
from backfill.jobs.feed import Feed, LineSource
from backfill.jobs.leases import Lease
from backfill.jobs.records import BatchRecord, BatchStatus, RequestCounts
from backfill.preparation.messages import InputLimits, InputReport, LineSelection


class InputReader(Protocol):
    """Reads input files. Outside of tests it is a ``PreparationClient``."""

    async def check_input(self, path: str, limits: InputLimits) -> InputReport:
        """Raises: OSError."""
        ...

    def open_lines(self, selection: LineSelection) -> LineSource: ...


class OpenBatch:
    """An open batch in memory, or some of its lines.

    The deadline is on the monotonic clock: a change of the wall clock ends no batch early.

    Attributes:
        lease: None where one server has all batches, and for lines that have ended.
        lines: a bit for each that this job runs; None for a job of the whole batch.
        name: unique among the jobs of a server.
        num_input_bytes: of its input file; 0 if not known.
        error: that ended the drive of a run without a server.
    """

    def __init__(
        self, batch: BatchRecord, log: BatchLog, wall_s: float, clock: Clock, lease: Lease | None = None
    ) -> None:
        self.batch = batch
        self.log = log
        self.lease = lease
        self.cancelled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # The results of a batch that an earlier server began are unknown until its files are read.
        self.has_counts = batch.status is BatchStatus.VALIDATING
        self._clock = clock
        self.deadline_s = clock.now_s() + batch.expires_at - wall_s
        self.task: asyncio.Task[None] | None = None
        self.error: Exception | None = None
        self.num_input_bytes = 0
        self.lines = None if lease is None else lease.lines
        self.name = batch.id
        if lease is not None and lease.lines is not None:
            self.name = f"{batch.id}-{lease.parts[0]}"
        # To the file store; the next one that runs the batch is another.
        self.input_user = f"{self.name}-{0 if lease is None else lease.token}"

    @property
    def num_unfinished(self) -> int:
        """Lines of this job without a result."""
        return self.counts().unfinished if self.lines is None else self.log.num_undone(self.lines)

    def counts(self) -> RequestCounts:
        return self.log.counts(self.batch.request_counts.total)

    @property
    def lengths(self) -> dict[int, int]:
        """Output tokens of lines that have ended, by number, for the estimates of others.

        Parts that run are left out (``DatabaseResultLog``). Without parts nothing tells which lines ran
        together, of which the short ones end first: there are none until half of the lines are done.
        """
        counts = self.counts()
        is_biased = self.lines is None and 2 * counts.unfinished > counts.total
        return {} if is_biased else dict(self.log.observed)

    @property
    def left_s(self) -> float:
        """Of its window; negative where that has ended."""
        return self.deadline_s - self._clock.now_s()

    def cancel(self) -> None:
        """Its owner has cancelled the batch, or it has ended elsewhere."""
        if not self.cancelled.done():
            self.cancelled.set_result(None)

    async def until_over(self, feed: Feed) -> None:
        """Wait for the first of: the end of the window, a cancellation, the end of the feed."""
        ends = {self.cancelled, feed.finished}
        await asyncio.wait(ends, timeout=max(0.0, self.left_s), return_when=asyncio.FIRST_COMPLETED)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsSnapshot:
    """Open batches now. ``least_slack_s`` is None where there are none."""

    jobs_by_status: Mapping[BatchStatus, int]
    num_lines_queued: int
    oldest_line_s: float
    least_slack_s: float | None

    @classmethod
    def of_jobs(cls, jobs: Sequence[OpenBatch], now_s: float) -> JobsSnapshot:
        """What one server runs."""
        num_queued = [job.num_unfinished for job in jobs]
        statuses = {job.batch.id: job.batch.status for job in jobs}
        ages_s = [now_s - job.batch.created_at for job, num in zip(jobs, num_queued, strict=True) if num]
        return cls(
            jobs_by_status=Counter(statuses.values()),
            num_lines_queued=sum(num_queued),
            oldest_line_s=max(0.0, *ages_s) if ages_s else 0.0,
            least_slack_s=min((job.left_s for job in jobs), default=None),
        )

    @classmethod
    def of_batches(cls, batches: Sequence[BatchRecord], now_s: float) -> JobsSnapshot:
        """What a database has."""
        waiting = [batch for batch in batches if batch.request_counts.unfinished]
        return cls(
            jobs_by_status=Counter(batch.status for batch in batches),
            num_lines_queued=sum(batch.request_counts.unfinished for batch in waiting),
            oldest_line_s=max((now_s - batch.created_at for batch in waiting), default=0.0),
            least_slack_s=min((batch.expires_at - now_s for batch in batches), default=None),
        )
