"""Takes a batch from validation to its end.

A task drives each open batch. Its decisions are made durable first: results in the batch's files
(results.py) or the database (database_results.py), the status in the database. The status changes by
compare-and-set: when a cancellation and a completion race, one wins. So a batch goes on after any crash, on
any server that shares the database: each of the driver's changes holds the batch's lease (leases.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from backfill.core.errors import NotReady
from backfill.jobs.database_results import BatchLog
from backfill.jobs.feed import Feed, InputChanged
from backfill.jobs.feeder import Feeder
from backfill.jobs.leases import Lease, LeaseLost
from backfill.jobs.lines import LineResult, unanswered
from backfill.jobs.open_batch import InputReader, OpenBatch
from backfill.jobs.records import (
    OPEN_STATUSES,
    BatchRecord,
    BatchStatus,
    FileRecord,
    LineOutcome,
    RequestCounts,
    TokenUsage,
)
from backfill.jobs.results import ForeignResults, ResultsLost
from backfill.jobs.retry import append_with_retries, retry_delays_s
from backfill.jobs.storage import JobStorage
from backfill.jobs.suspects import BatchPoisoned, Suspects
from backfill.preparation.line_file import complement, read_names, union
from backfill.preparation.lines import WARNING, BadLine, LineError
from backfill.preparation.messages import START, InputLimits, InputReport, LineSelection

logger = logging.getLogger(__name__)

# A batch fails after this many unexpected errors.
MAX_UNEXPECTED = 5
_UNANSWERED_GROUP = 1000

_UNANSWERED_CODES = {LineOutcome.CANCELLED: "batch_cancelled", LineOutcome.EXPIRED: "batch_expired"}


class InputMissing(Exception):
    """The input file is gone from the disk."""


@dataclasses.dataclass(slots=True, eq=False)
class BatchDriver:
    """Drives open batches; several at once, each in a task of its own."""

    storage: JobStorage
    feeder: Feeder
    reader: InputReader
    _: dataclasses.KW_ONLY
    model_names: Sequence[str]
    on_lines: Callable[[Sequence[LineResult]], None]  # called with results once they are durable
    num_queued_lines: Callable[[str], Awaitable[int]]  # unfinished lines of an owner's open batches
    on_validated: Callable[[], None] = lambda: None  # called when a batch is in progress
    ends_at_errors: bool = False  # an error ends the drive, and is the job's; nothing is tried again
    # How many batches are checked, and how many with lines that never ran are ended, at once.
    _checking: asyncio.Semaphore = dataclasses.field(default_factory=lambda: asyncio.Semaphore(4), init=False)
    _ending: asyncio.Semaphore = dataclasses.field(default_factory=lambda: asyncio.Semaphore(4), init=False)

    def log_of(self, batch: BatchRecord, lease: Lease | None) -> BatchLog:
        """The batch's results, not opened yet."""
        return self.storage.results.log_of(batch, lease)

    async def drive(self, job: OpenBatch) -> None:
        """Take the batch to its end, or until another server has it.

        After an error it goes on, or the batch fails; with ``ends_at_errors`` it is left as it is.
        """
        name = job.batch.id
        num_unexpected = 0
        final_error: LineError | None = None
        for delay_s in retry_delays_s():
            found = None
            try:
                if final_error is None:
                    await self._advance(job)
                else:
                    await self._fail(job, final_error)
                return
            except LeaseLost:
                logger.warning("%s: another server goes on with it", name)
                return
            except Exception as error:
                if self.ends_at_errors:
                    job.error = error
                    return
                found = _final_error(error, job.batch)
                if isinstance(error, OSError | NotReady):  # such as too many open files: it may be temporary
                    reason = getattr(error, "strerror", None) or error
                    logger.error("%s: cannot go on (%s); trying again in %g s", name, reason, delay_s)
                elif found is None:
                    logger.exception("%s: cannot go on; trying again in %g s", name, delay_s)
                    num_unexpected += 1
                    if num_unexpected == MAX_UNEXPECTED:
                        found = LineError("internal_error", "The server had repeated errors with this batch.")
            if final_error is None and found is not None:
                final_error = found
                logger.error("%s: given up: %s", name, final_error.message)
            else:
                await asyncio.sleep(delay_s)

    async def _advance(self, job: OpenBatch) -> None:
        if job.batch.status is BatchStatus.VALIDATING:
            async with self._checking:
                if not await self._validate(job):
                    return
            if job.lease is None and self.storage.is_shared:  # any server runs the lines
                return
        log = self.log_of(job.batch, job.lease)
        await self.storage.threads.results.run(log.open)
        job.log = log
        job.has_counts = True
        if job.lines is not None:
            await self._run_lines(job)
            await self._end_lines(job)
            return
        if job.batch.status is BatchStatus.IN_PROGRESS:
            await self._feed(job)
        elif job.batch.status is BatchStatus.FINALIZING and job.batch.expired_at is None:
            await self._run_lines(job)  # lines whose results were lost after the status was set
        await self._finish(job)

    async def _validate(self, job: OpenBatch) -> bool:
        """Whether the batch goes on, its lines known; else it has failed or was cancelled."""
        if job.cancelled.done():
            return False
        report = await self._check_input(job)
        if report is None:
            return False
        stamp = self._timestamp(job)
        found = report.errors or await self._queue_errors(job, report.total)
        if found:
            line = f"line {found[0].line}: " if found[0].line is not None else ""
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            logger.info("%s: failed validation: %s%s%s", job.batch.id, line, found[0].message, more)
            changes = {"failed_at": stamp, "errors": found}
            await self._change(job, BatchStatus.FAILED, changes, [BatchStatus.VALIDATING])
            return False
        model = report.model or self.model_names[0]
        counts = RequestCounts(total=report.total)
        changes = {"in_progress_at": stamp, "model": model, "request_counts": counts, "usage": TokenUsage()}
        if report.warning is not None:
            logger.warning("%s: %s", job.batch.id, report.warning)
            changes["errors"] = [LineError(WARNING, report.warning)]
        logger.info("%s: %d lines", job.batch.id, report.total)
        job.batch = dataclasses.replace(job.batch, request_counts=counts)
        is_begun = await self._change(
            job, BatchStatus.IN_PROGRESS, changes, [BatchStatus.VALIDATING], parts=report.parts
        )
        if not is_begun:  # unless it began by an attempt without an answer, and was cancelled since
            get_batch = self.storage.store.get_batch
            job.batch = await self.storage.query_with_retries(get_batch, job.batch.owner, job.batch.id)
            is_begun = job.batch.status is BatchStatus.CANCELLING
        if report.parts:
            job.lease = None
        self.on_validated()
        return is_begun

    async def _check_input(self, job: OpenBatch) -> InputReport | None:
        """None where the owner cancels the batch meanwhile."""
        limits = InputLimits(
            endpoint=job.batch.endpoint,
            model_names=tuple(self.model_names),
            max_lines=self.storage.config.batch_max_lines,
            max_line_bytes=self.storage.config.max_line_bytes,
            divides=self.storage.is_shared,
        )
        path = str(await self._input_path(job))
        check = asyncio.ensure_future(self.reader.check_input(path, limits))
        ends: set[asyncio.Future[Any]] = {check, job.cancelled}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return None if job.cancelled.done() else check.result()
        except FileNotFoundError:
            raise InputMissing from None
        finally:
            check.cancel()
            await asyncio.gather(check, return_exceptions=True)

    async def _queue_errors(self, job: OpenBatch, num_lines: int) -> list[LineError]:
        """The error where ``num_lines`` more are over the limit of the owner's queue."""
        most = self.storage.config.batch_max_queued_lines
        if num_lines > most:
            message = f"The input file has {num_lines} lines; the batches of one owner are limited to {most}."
            return [LineError("too_many_tasks", message)]
        num_queued = await self.num_queued_lines(job.batch.owner)
        if num_queued + num_lines > most:
            message = (
                f"Enqueued line limit reached: your other open batches have {num_queued} unfinished lines, "
                f"this one has {num_lines}, and {most} are allowed together. Try again once some have ended."
            )
            return [LineError("token_limit_exceeded", message)]
        return []

    async def _feed(self, job: OpenBatch) -> None:
        """Run lines until all are done, the window is over or the owner cancels."""
        await self._run_lines(job)
        changes: dict[str, Any] = {"finalizing_at": self._timestamp(job)}
        if job.counts().unfinished:
            changes["expired_at"] = changes["finalizing_at"]
        if not await self._change(job, BatchStatus.FINALIZING, changes, [BatchStatus.IN_PROGRESS]):
            job.batch = dataclasses.replace(job.batch, status=BatchStatus.CANCELLING)

    async def _run_lines(self, job: OpenBatch) -> None:
        num_lines = job.num_unfinished
        if num_lines == 0:
            return
        counts = job.counts()
        if job.lines is None and counts.unfinished < counts.total:  # else parts are claimed all the time
            done = counts.total - counts.unfinished
            logger.info("%s: goes on, %d of %d lines are done", job.batch.id, done, counts.total)
        # Named as the results are: a run's batch is another each time, its input the same.
        suspects = Suspects(self.storage.results.losses_of(job.batch, job.lease), job.log.name)
        await self.storage.threads.results.run(suspects.load)
        if self.ends_at_errors:  # whoever runs it again may have mended what the engine died of
            suspects.num_blamed = 0
        suspects.check()
        path = await self._input_path(job)
        with contextlib.closing(self.reader.open_lines(self._unfinished_lines(job, path))) as lines:
            feed = Feed(
                job.batch.id,
                lines,
                num_lines,
                job.log,
                self.on_lines,
                owner=job.batch.owner,
                deadline_at_s=job.batch.expires_at,
                suspects=suspects,
            )
            self.feeder.add(feed)
            keeps_results = False
            try:
                await job.until_over(feed)
                keeps_results = True
            finally:
                await self.feeder.remove(feed, keep_results=keeps_results)
        if feed.finished.done():
            try:
                feed.finished.result()
            except FileNotFoundError:
                raise InputMissing from None

    async def _end_lines(self, job: OpenBatch) -> None:
        """Give lines without a result, if there are any, back to whoever ends the batch."""
        lease, job.lease = job.lease, None  # not renewed any more
        leases = self.storage.store.leases
        assert lease is not None and leases is not None, "lines are leased"
        await self.storage.query_with_retries(leases.end_lines, lease)

    async def _finish(self, job: OpenBatch) -> None:
        """From FINALIZING or CANCELLING to the end: every line gets its result, the files become readable."""
        if job.batch.status is BatchStatus.CANCELLING:
            end, outcome = BatchStatus.CANCELLED, LineOutcome.CANCELLED
        elif job.batch.expired_at is not None or job.counts().unfinished:
            end, outcome = BatchStatus.EXPIRED, LineOutcome.EXPIRED
        else:
            end, outcome = BatchStatus.COMPLETED, LineOutcome.COMPLETED
        if job.counts().unfinished:
            async with self._ending:
                await self._end_unfinished(job, outcome)
        await self.storage.threads.results.run(job.log.check_intact)
        await self._end(job, end, {f"{end.value}_at": self._timestamp(job)}, [job.batch.status])

    async def _end_unfinished(self, job: OpenBatch, outcome: LineOutcome) -> None:
        """Write a result that says why for each line without one."""
        selection = self._unfinished_lines(job, await self._input_path(job))
        threads, position = self.storage.threads.results, START
        try:
            while (found := await threads.run(read_names, selection, position, _UNANSWERED_GROUP)).lines:
                results = [unanswered(line, _UNANSWERED_CODES[outcome], outcome) for line in found.lines]
                await append_with_retries(threads, job.log, results, job.batch.id)
                self.on_lines(results)
                position = found.position
        except FileNotFoundError:
            raise InputMissing from None

    async def _fail(self, job: OpenBatch, reason: LineError) -> None:
        """End as failed, with the results there are. Lines are given back: their batch fails later."""
        if job.lines is not None:
            if job.lease is not None:
                await self._end_lines(job)
            return
        log = self.log_of(job.batch, job.lease)
        with contextlib.suppress(ForeignResults):
            await self.storage.threads.results.run(log.open)
            job.log = log
        changes = {"failed_at": self._timestamp(job), "errors": [*job.batch.errors, reason]}
        await self._end(job, BatchStatus.FAILED, changes, OPEN_STATUSES)

    async def _end(
        self,
        job: OpenBatch,
        status: BatchStatus,
        changes: dict[str, Any],
        only_from: Collection[BatchStatus],
    ) -> None:
        """Record the last status and the result files in one transaction."""
        record = job.batch
        now = self._timestamp(job)
        published = await self.storage.threads.results.run(self.storage.results.publish, record)
        records = [
            FileRecord(
                id=file_id,
                owner=record.owner,
                num_bytes=num_bytes,
                created_at=now,
                expires_at=now + record.output_retention_s,
                filename=f"{record.id}_{column.removesuffix('_file_id')}.jsonl",
                purpose="batch_output",
            )
            for column, (file_id, num_bytes) in published.items()
        ]
        counts = job.counts()
        found = {column: file_id for column, (file_id, _) in published.items()}
        changes = {**changes, **found, "request_counts": counts, "usage": job.log.usage}
        try:
            await self._change(job, status, changes, only_from, records)
        except LeaseLost:
            for file_id in found.values():
                await self.storage.threads.results.run(self.storage.blobs.delete, file_id)
            raise
        logger.info(
            "%s: %s, %d completed, %d failed", record.id, status.value, counts.completed, counts.failed
        )

    async def _input_path(self, job: OpenBatch) -> Path:
        """Where the input file can be read. Raises: InputMissing, OSError."""
        try:
            return await self.storage.threads.results.run(
                self.storage.blobs.fetch, job.batch.input_file_id, job.input_user
            )
        except FileNotFoundError:
            raise InputMissing from None

    def _unfinished_lines(self, job: OpenBatch, path: Path) -> LineSelection:
        not_here = b"" if job.lines is None else complement(job.lines)
        return LineSelection(
            path=str(path),
            max_line_bytes=self.storage.config.max_line_bytes,
            done=union(job.log.done, not_here),
            observed=job.lengths,
            complete_by_s=job.deadline_s,
            owner=job.batch.owner,
            owner_weight=self.feeder.weight_of(job.batch.owner),
            spool_folder=str(self.storage.config.data_dir),
            min_free_bytes=self.storage.config.min_free_bytes,
        )

    def _timestamp(self, job: OpenBatch) -> int:
        """Now, but never before the batch's latest timestamp."""
        return max(self.storage.now(), job.batch.last_timestamp)

    async def _change(
        self,
        job: OpenBatch,
        status: BatchStatus,
        changes: Mapping[str, Any],
        only_from: Collection[BatchStatus],
        new_files: Sequence[FileRecord] = (),
        parts: Sequence[bytes] = (),
    ) -> bool:
        """Compare and set the status, with retries. Returns: whether it is set."""
        change, row = self.storage.store.change_batch, {"status": status, **changes}
        if not await self.storage.query_with_retries(
            change, job.batch.id, row, only_from=only_from, new_files=new_files, lease=job.lease, parts=parts
        ):
            return False
        job.batch = dataclasses.replace(job.batch, **row)
        return True


def _final_error(error: Exception, batch: BatchRecord) -> LineError | None:
    """The error to end the batch with; None where a retry may help."""
    match error:
        case InputMissing():
            return LineError("file_not_found", f"The input file {batch.input_file_id} is missing.")
        case InputChanged():
            return LineError("file_changed", str(error))
        case BadLine():
            message = f"The input file was changed after it was checked: {error}"
            return LineError("file_changed", message, error.error.line)
        case BatchPoisoned():
            return LineError("engine_error", str(error))
        case ResultsLost() | ForeignResults():
            return LineError("results_lost", str(error))
        case _:
            return None
