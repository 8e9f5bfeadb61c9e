"""Takes a batch from validation to its end.

Each open batch has a task that drives it. What it decides is first made durable: results in the batch's
files (results.py), status in the database by compare-and-set, so that of a cancellation and a completion
that race one wins. A batch can therefore be taken up again from whatever a crash left.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from backfill.jobs.blobs import BlobStore
from backfill.jobs.config import JobsConfig
from backfill.jobs.feeder import Feed, Feeder, InputChanged
from backfill.jobs.lines import BadLine, BatchLine, LineResult, parse_line, read_lines, unrun
from backfill.jobs.patience import in_thread, persist, retry_delays_s, until_durable
from backfill.jobs.records import (
    FINAL_STATUSES,
    BatchRecord,
    BatchStatus,
    FileRecord,
    LineError,
    LineOutcome,
    RequestCounts,
    TokenUsage,
)
from backfill.jobs.results import ForeignResults, ResultLog, ResultsLost
from backfill.jobs.store import JobStore, counts_changes
from backfill.jobs.validation import InputCheck

logger = logging.getLogger(__name__)

# Batches with open files; others wait, the oldest first, so that descriptors are left for connections.
MAX_FED_AT_ONCE = 64
_MAX_CHECKED_AT_ONCE = 4
_MAX_ENDED_AT_ONCE = 4
# A batch is given up once something unforeseen has gone wrong with it so often.
MAX_UNEXPECTED = 5
_UNRUN_GROUP = 1000

_OPEN_STATUSES = [status for status in BatchStatus if status not in FINAL_STATUSES]
_UNRUN_CODES = {LineOutcome.CANCELLED: "batch_cancelled", LineOutcome.EXPIRED: "batch_expired"}


class OpenBatch:
    """An open batch in memory.

    The deadline is on the monotonic clock: a moved wall clock ends no batch early.
    """

    def __init__(self, batch: BatchRecord, log: ResultLog, wall_s: float) -> None:
        self.batch = batch
        self.log = log
        self.cancelled = asyncio.Event()
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


class _InputMissing(Exception):
    """The input file is gone from the disk."""


class BatchDriver:
    """Drives open batches; several at once, each in a task of its own.

    Args:
        on_lines: told of lines that ended, once they are durable.
        now: Unix seconds.
    """

    def __init__(
        self,
        config: JobsConfig,
        store: JobStore,
        blobs: BlobStore,
        feeder: Feeder,
        *,
        model_names: Sequence[str],
        on_lines: Callable[[Sequence[LineResult]], None],
        now: Callable[[], int],
    ) -> None:
        self._config = config
        self._store = store
        self._blobs = blobs
        self._feeder = feeder
        self._model_names = model_names
        self._on_lines = on_lines
        self._now = now
        self._checking = asyncio.Semaphore(_MAX_CHECKED_AT_ONCE)
        self._feeding = asyncio.Semaphore(MAX_FED_AT_ONCE)
        self._ending = asyncio.Semaphore(_MAX_ENDED_AT_ONCE)

    def log_of(self, batch: BatchRecord) -> ResultLog:
        """The batch's results, not opened yet."""
        return ResultLog(
            batch.id.removeprefix("batch_"),
            self._blobs.path(batch.output_blob),
            self._blobs.path(batch.error_blob),
        )

    async def drive(self, job: OpenBatch) -> None:
        """To the batch's end, whatever goes wrong: it is tried again, or ends as failed."""
        name = job.batch.id
        num_unexpected = 0
        verdict: LineError | None = None
        for delay_s in retry_delays_s():
            found = None
            try:
                if verdict is None:
                    await self._advance(job)
                else:
                    await self._fail(job, verdict)
                return
            except Exception as error:
                found = _verdict_on(error, job.batch)
                if isinstance(error, OSError):  # such as too many open files: it may pass
                    reason = error.strerror or error
                    logger.error("%s: cannot go on (%s); trying again in %g s", name, reason, delay_s)
                elif found is None:
                    logger.exception("%s: cannot go on; trying again in %g s", name, delay_s)
                    num_unexpected += 1
                    if num_unexpected == MAX_UNEXPECTED:
                        found = LineError("internal_error", "The server had an error that did not pass.")
            finally:
                job.log.close()
            if verdict is None and found is not None:
                verdict = found
                logger.error("%s: given up: %s", name, verdict.message)
            else:
                await asyncio.sleep(delay_s)

    async def _advance(self, job: OpenBatch) -> None:
        if job.batch.status is BatchStatus.VALIDATING:
            async with self._checking:
                if not await self._validate(job):
                    return
        async with self._place(job):
            log = self.log_of(job.batch)
            try:
                await in_thread(log.open)
            finally:
                job.log = log  # closed by who drives
            if job.batch.status is BatchStatus.IN_PROGRESS:
                await self._feed(job)
            elif job.batch.status is BatchStatus.FINALIZING and job.batch.expired_at is None:
                await self._run_lines(job)  # those whose results were lost since
            await self._finish(job)

    @contextlib.asynccontextmanager
    async def _place(self, job: OpenBatch) -> AsyncIterator[None]:
        """Among the batches that are fed; or, for one that is over, among those that are being ended."""
        waiting = asyncio.ensure_future(self._feeding.acquire())
        try:
            if job.batch.status is BatchStatus.IN_PROGRESS:
                await job.until_over(waiting)
            else:
                await asyncio.sleep(0)
        except BaseException:
            waiting.cancel()
            raise
        if waiting.done():
            place = self._feeding
        else:
            waiting.cancel()
            await asyncio.wait([waiting])
            place = self._feeding
            if waiting.cancelled():
                place = self._ending
                await place.acquire()
        try:
            yield
        finally:
            place.release()

    async def _validate(self, job: OpenBatch) -> bool:
        """Whether the batch is in progress now; else it has failed or was cancelled."""
        if job.cancelled.is_set():
            return False
        with self._open_input(job):  # or it is known to be missing
            check = InputCheck(
                self._blobs.path(job.batch.input_file_id),
                endpoint=job.batch.endpoint,
                model_names=self._model_names,
                max_lines=self._config.max_lines,
                max_line_bytes=self._config.max_line_bytes,
            )
        with contextlib.closing(check):
            while not await in_thread(check.advance):
                if job.cancelled.is_set():
                    return False
        stamp = self._stamp(job)
        if check.errors:
            logger.info("%s: failed validation: %s", job.batch.id, check.errors[0].message)
            errors = [dataclasses.asdict(error) for error in check.errors]
            await self._change(
                job, BatchStatus.FAILED, {"failed_at": stamp, "errors": errors}, [BatchStatus.VALIDATING]
            )
            return False
        model = check.model or self._model_names[0]
        counts = RequestCounts(total=check.total)
        changes = {"in_progress_at": stamp, "model": model, **counts_changes(counts, TokenUsage())}
        logger.info("%s: %d lines", job.batch.id, check.total)
        job.batch = dataclasses.replace(job.batch, request_counts=counts)
        return await self._change(job, BatchStatus.IN_PROGRESS, changes, [BatchStatus.VALIDATING])

    async def _feed(self, job: OpenBatch) -> None:
        """Run lines until all are done, the window is over or the owner cancels."""
        await self._run_lines(job)
        changes: dict[str, Any] = {"finalizing_at": self._stamp(job)}
        if num_unfinished(job.counts()):
            changes["expired_at"] = changes["finalizing_at"]
        if not await self._change(job, BatchStatus.FINALIZING, changes, [BatchStatus.IN_PROGRESS]):
            job.batch = dataclasses.replace(job.batch, status=BatchStatus.CANCELLING)

    async def _run_lines(self, job: OpenBatch) -> None:
        num_lines = num_unfinished(job.counts())
        if num_lines == 0:
            return
        with self._open_input(job) as file:
            lines = self._unfinished_lines(job, file)
            # The first unfinished line may be far into the file: too far to go there on the event loop.
            lines = itertools.chain(await in_thread(_take, lines, 1), lines)
            feed = Feed(job.batch.id, lines, num_lines, job.log, self._on_lines)
            self._feeder.add(feed)
            keeps_results = False
            try:
                await job.until_over(feed.finished)
                keeps_results = True
            finally:
                await self._feeder.remove(feed, keep_results=keeps_results)
        if feed.finished.done():
            feed.finished.result()

    async def _finish(self, job: OpenBatch) -> None:
        """From FINALIZING or CANCELLING to the end: every line gets its result, the files become readable."""
        if job.batch.status is BatchStatus.CANCELLING:
            end, outcome = BatchStatus.CANCELLED, LineOutcome.CANCELLED
        elif job.batch.expired_at is not None or num_unfinished(job.counts()):
            end, outcome = BatchStatus.EXPIRED, LineOutcome.EXPIRED
        else:
            end, outcome = BatchStatus.COMPLETED, LineOutcome.COMPLETED
        if num_unfinished(job.counts()):
            with self._open_input(job) as file:
                lines = _without_bodies(self._unfinished_lines(job, file))
                while group := await in_thread(_take, lines, _UNRUN_GROUP):
                    results = [unrun(line, _UNRUN_CODES[outcome], outcome) for line in group]
                    await until_durable(job.log, results, job.batch.id)
                    self._on_lines(results)
        await in_thread(job.log.check_intact)
        await self._end(job, end, {f"{end.value}_at": self._stamp(job)}, [job.batch.status])

    async def _fail(self, job: OpenBatch, reason: LineError) -> None:
        """End with the results there are."""
        log = self.log_of(job.batch)
        try:
            await in_thread(log.open)
        except ForeignResults:
            log.close()
        except BaseException:
            log.close()
            raise
        else:
            job.log = log
        changes = {"failed_at": self._stamp(job), "errors": [dataclasses.asdict(reason)]}
        await self._end(job, BatchStatus.FAILED, changes, _OPEN_STATUSES)

    async def _end(
        self,
        job: OpenBatch,
        status: BatchStatus,
        changes: dict[str, Any],
        only_from: Collection[BatchStatus],
    ) -> None:
        """The last status and the result files, in one transaction."""
        record = job.batch
        records, found = [], {}
        for column, blob, kind in (
            ("output_file_id", record.output_blob, "output"),
            ("error_file_id", record.error_blob, "error"),
        ):
            path = self._blobs.path(blob)
            num_bytes = path.stat().st_size if path.exists() else 0
            if num_bytes == 0:
                self._blobs.delete(blob)
                continue
            now = self._stamp(job)
            found[column] = blob
            records.append(
                FileRecord(
                    id=blob,
                    owner=record.owner,
                    num_bytes=num_bytes,
                    created_at=now,
                    expires_at=now + record.output_retention_s,
                    filename=f"{record.id}_{kind}.jsonl",
                    purpose="batch_output",
                )
            )
        counts = job.counts()
        changes = {**changes, **found, **counts_changes(counts, job.log.usage)}
        await self._change(job, status, changes, only_from, records)
        logger.info(
            "%s: %s, %d completed, %d failed", record.id, status.value, counts.completed, counts.failed
        )

    def _open_input(self, job: OpenBatch) -> BinaryIO:
        try:
            return self._blobs.path(job.batch.input_file_id).open("rb")
        except FileNotFoundError:
            raise _InputMissing from None

    def _unfinished_lines(self, job: OpenBatch, file: BinaryIO) -> Iterator[BatchLine]:
        limit = self._config.max_line_bytes
        for number, data in read_lines(file, limit):
            if not job.log.is_done(number):
                line = parse_line(number, data, limit)
                line.complete_by_s = job.deadline_s
                yield line

    def _stamp(self, job: OpenBatch) -> int:
        """Now, but never before anything that happened to the batch already."""
        return max(self._now(), job.batch.last_stamp)

    async def _change(
        self,
        job: OpenBatch,
        status: BatchStatus,
        changes: Mapping[str, Any],
        only_from: Collection[BatchStatus],
        new_files: Sequence[FileRecord] = (),
    ) -> bool:
        """Compare-and-set of the status, repeated until the database answers."""
        row = {"status": status.value, **changes}
        if not await persist(
            lambda: self._store.change_batch(job.batch.id, row, only_from=only_from, new_files=new_files)
        ):
            return False
        stamps = {name: value for name, value in changes.items() if name.endswith("_at")}
        job.batch = dataclasses.replace(job.batch, status=status, **stamps)
        return True


def _verdict_on(error: Exception, batch: BatchRecord) -> LineError | None:
    """Why the batch cannot go on, where trying again would not help."""
    match error:
        case _InputMissing():
            return LineError("file_not_found", f"The input file {batch.input_file_id} is missing.")
        case InputChanged():
            return LineError("file_changed", str(error))
        case BadLine():
            message = f"The input file was changed after it was checked: {error}"
            return LineError("file_changed", message, error.error.line)
        case ResultsLost() | ForeignResults():
            return LineError("results_lost", str(error))
        case _:
            return None


def num_unfinished(counts: RequestCounts) -> int:
    return counts.total - counts.completed - counts.failed


def _take(lines: Iterator[BatchLine], count: int) -> list[BatchLine]:
    return list(itertools.islice(lines, count))


def _without_bodies(lines: Iterator[BatchLine]) -> Iterator[BatchLine]:
    """For many lines at once, of which only the names are needed."""
    for line in lines:
        line.body = b""
        yield line
