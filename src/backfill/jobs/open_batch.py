"""A batch that this server runs, and what reads its input."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Protocol

from backfill.jobs.database_results import BatchLog
from backfill.jobs.feed import Feed, LineSource
from backfill.jobs.leases import Lease
from backfill.jobs.records import BatchRecord, BatchStatus, RequestCounts
from backfill.preparation.lines import BatchLine
from backfill.preparation.messages import InputLimits, InputReport, LineSelection


class LineReader(LineSource, Protocol):
    """The lines of one file. ``read`` raises: BadLine, OSError."""

    def close(self) -> None: ...


class NameReader(Protocol):
    async def read(self, max_lines: int) -> Sequence[BatchLine]:
        """The next lines in the order of their file, without bodies. Raises: BadLine, OSError."""
        ...


class InputReader(Protocol):
    """Reads input files. Outside of tests it is a ``PreparationClient``."""

    async def check_input(self, path: str, limits: InputLimits) -> InputReport:
        """Raises: OSError."""
        ...

    def open_lines(self, selection: LineSelection) -> LineReader: ...

    def open_names(self, selection: LineSelection) -> NameReader: ...


class OpenBatch:
    """An open batch in memory.

    The deadline is on the monotonic clock: a change of the wall clock ends no batch early. ``lease`` is None
    where one server has all batches.
    """

    def __init__(self, batch: BatchRecord, log: BatchLog, wall_s: float, lease: Lease | None = None) -> None:
        self.batch = batch
        self.log = log
        self.lease = lease
        self.cancelled = asyncio.Event()
        # The results of a batch that an earlier server began are unknown until its files are read.
        self.has_counts = batch.status is BatchStatus.VALIDATING
        self.deadline_s = time.monotonic() + batch.expires_at - wall_s
        self.task: asyncio.Task[None] | None = None

    @property
    def input_user(self) -> str:
        """To the file store; the next one that runs the batch is another."""
        return f"{self.batch.id}-{0 if self.lease is None else self.lease.token}"

    def counts(self) -> RequestCounts:
        return self.log.counts(self.batch.request_counts.total)

    async def until_over(self, feed: Feed) -> None:
        """Wait for the first of: the end of the window, a cancellation, the end of the feed."""
        cancelled = asyncio.ensure_future(self.cancelled.wait())
        timeout_s = max(0.0, self.deadline_s - time.monotonic())
        ends: set[asyncio.Future[Any]] = {cancelled, feed.finished}
        try:
            await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            cancelled.cancel()
