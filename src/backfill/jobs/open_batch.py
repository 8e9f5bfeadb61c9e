"""An open batch in memory."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from backfill.jobs.records import BatchRecord, BatchStatus, RequestCounts
from backfill.jobs.results import ResultLog


class OpenBatch:
    """An open batch in memory.

    The deadline is on the monotonic clock: a change of the wall clock ends no batch early.
    """

    def __init__(self, batch: BatchRecord, log: ResultLog, wall_s: float) -> None:
        self.batch = batch
        self.log = log
        self.cancelled = asyncio.Event()
        # The results of a batch that an earlier server began are unknown until its files are read.
        self.has_counts = batch.status is BatchStatus.VALIDATING
        self.deadline_s = time.monotonic() + batch.expires_at - wall_s
        self.task: asyncio.Task[None] | None = None

    def counts(self) -> RequestCounts:
        return self.log.counts(self.batch.request_counts.total)

    async def until_over(self, *others: asyncio.Future[Any]) -> None:
        """Wait for the first of: the end of the window, a cancellation, any of the others."""
        cancelled = asyncio.ensure_future(self.cancelled.wait())
        try:
            await asyncio.wait(
                {cancelled, *others},
                timeout=max(0.0, self.deadline_s - time.monotonic()),
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            cancelled.cancel()
