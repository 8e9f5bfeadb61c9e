"""Keeps files and batches, and takes every batch from validation to its end.

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
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, ParamSpec, Protocol, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from backfill.core.errors import RequestError
from backfill.jobs.blobs import BlobStore
from backfill.jobs.config import JobsConfig
from backfill.jobs.database import open_database
from backfill.jobs.errors import Busy, Conflict, TooLarge
from backfill.jobs.feeder import Feed, Feeder, LineRunner, in_thread, until_durable
from backfill.jobs.lines import BatchLine, LineResult, parse_line, read_lines, unrun
from backfill.jobs.lock import DataFolderLock
from backfill.jobs.records import (
    BatchRecord,
    BatchStatus,
    FileRecord,
    LineError,
    LineOutcome,
    Page,
    RequestCounts,
    TokenUsage,
    new_batch_id,
    new_file_id,
)
from backfill.jobs.results import ResultLog
from backfill.jobs.runner import ServiceRunner
from backfill.jobs.store import JobStore, counts_changes
from backfill.jobs.validation import InputCheck
from backfill.protocol.service import CompletionService

Args = ParamSpec("Args")
Result = TypeVar("Result")

logger = logging.getLogger(__name__)

_SWEEP_INTERVAL_S = 60.0
_UNRUN_GROUP = 1000
_FIRST_RETRY_S = 0.1
_LONGEST_RETRY_S = 10.0

_UNRUN_CODES = {LineOutcome.CANCELLED: "batch_cancelled", LineOutcome.EXPIRED: "batch_expired"}


class JobObserver(Protocol):
    """Told of every group of lines that ended, once it is durable."""

    def on_lines(self, outcome: LineOutcome, num_lines: int, usage: TokenUsage) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobsSnapshot:
    """Open batches now. ``least_slack_s`` is None where there are none."""

    jobs_by_status: Mapping[BatchStatus, int]
    num_lines_queued: int
    oldest_line_s: float
    least_slack_s: float | None


class _Job:
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


class Upload:
    """A file on its way in. End it with ``finish`` or ``abort``."""

    def __init__(
        self, manager: JobManager, owner: str, file_id: str, file: BinaryIO, room: int | None
    ) -> None:
        self._manager = manager
        self._owner = owner
        self._id = file_id
        self._file = file
        self._room = room
        self._num_bytes = 0

    async def write(self, data: bytes) -> None:
        """Raises: TooLarge beyond the limit of any file, or when the store is full."""
        limit = self._manager.config.max_file_bytes
        self._num_bytes += len(data)
        if self._num_bytes > limit:
            raise TooLarge(f"The file is over the limit of {limit} bytes.")
        if self._room is not None and self._num_bytes > self._room:
            raise TooLarge("The server's file storage is full. Delete files that are no longer needed.")
        try:
            await in_thread(_write_all, self._file, data)
        except OSError as error:
            logger.error("an upload cannot be written: %s", error.strerror)
            raise TooLarge("The server's disk cannot take the file.") from error

    async def finish(self, *, filename: str, purpose: str, expires_after_s: int | None) -> FileRecord:
        """Make the file durable. Raises: TooLarge for a batch's input over its limit, which is then gone."""
        config = self._manager.config
        if purpose == "batch" and self._num_bytes > config.max_batch_bytes:
            await self.abort()
            raise TooLarge(f"The input file of a batch is limited to {config.max_batch_bytes} bytes.")
        lifetime_s = (
            int(config.retention_s) if expires_after_s is None and purpose == "batch" else expires_after_s
        )
        now = self._manager.now()
        record = FileRecord(
            id=self._id,
            owner=self._owner,
            num_bytes=self._num_bytes,
            created_at=now,
            expires_at=None if lifetime_s is None else now + lifetime_s,
            filename=filename,
            purpose=purpose,
        )
        await self._manager.keep(record, self._file)
        return record

    async def abort(self) -> None:
        await self._manager.discard(self._id, self._file)


class JobManager:
    """The Files and Batches API without HTTP. One event loop owns it, and one process its data folder.

    ``owner`` is the digest of the caller's API key: nobody sees another owner's files and batches.

    Args:
        model_names: what lines may call the model.
        url: where the server is reached, for whoever finds the folder taken.
        on_event: told of lines that ended.
        runner: runs lines; by default on the service of ``engine_ready``.
        wall: Unix seconds.
    """

    def __init__(
        self,
        config: JobsConfig,
        *,
        model_names: Sequence[str],
        url: str = "",
        on_event: JobObserver | None = None,
        runner: LineRunner | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.config = config
        self._model_names = model_names
        self._observer = on_event
        self._wall = wall
        self._lock = DataFolderLock(config.data_dir, url)
        self._service: CompletionService | None = None
        self._feeder = Feeder(runner or ServiceRunner(lambda: self._service))
        self._jobs: dict[str, _Job] = {}
        self._sweeper: asyncio.Task[None] | None = None
        self._is_open = False
        self._blobs: BlobStore
        self._store: JobStore

    # ---- Life ----

    async def start(self) -> None:
        """Take the data folder and go on with unfinished batches. Raises: ConfigError."""
        self._lock.acquire()
        try:
            self._store = JobStore(
                await asyncio.to_thread(open_database, self.config.database_url, self.config.data_dir)
            )
            self._blobs = BlobStore(self.config.data_dir / "files")
            self._blobs.sweep(await self._persist(self._store.blob_ids))
            for batch in await self._persist(self._store.open_batches):
                logger.info("%s: goes on, %s", batch.id, batch.status.value)
                self._begin(batch)
        except BaseException:
            self._lock.release()
            raise
        self._is_open = True
        self._sweeper = asyncio.create_task(self._sweep())

    async def stop(self) -> None:
        """Stop feeding at once; lines that run are given up and run again at the next start."""
        if not self._is_open:
            return
        self._is_open = False
        self._feeder.set_capacity(0)
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        if self._sweeper is not None:
            tasks.append(self._sweeper)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._jobs.clear()
        self._store.close()
        self._lock.release()

    def engine_ready(self, service: CompletionService, max_num_seqs: int) -> None:
        self._service = service
        self._feeder.set_capacity(self.config.max_in_flight or 2 * max_num_seqs)

    def engine_lost(self) -> None:
        self._service = None
        self._feeder.set_capacity(0)

    def now(self) -> int:
        return int(self._wall())

    def snapshot(self) -> JobsSnapshot:
        jobs = self._jobs.values()
        queued = {job.batch.id: _num_unfinished(job.counts()) for job in jobs}
        ages = [self._wall() - job.batch.created_at for job in jobs if queued[job.batch.id]]
        return JobsSnapshot(
            jobs_by_status=Counter(job.batch.status for job in jobs),
            num_lines_queued=sum(queued.values()),
            oldest_line_s=max(0.0, *ages) if ages else 0.0,
            least_slack_s=min((job.deadline_s - time.monotonic() for job in jobs), default=None),
        )

    # ---- Files ----

    async def begin_upload(self, owner: str) -> Upload:
        """Raises: TooLarge when the store is full."""
        room = None
        if self.config.max_stored_bytes is not None:
            room = self.config.max_stored_bytes - await asyncio.to_thread(self._blobs.num_bytes)
        file_id = new_file_id()
        return Upload(self, owner, file_id, await asyncio.to_thread(self._blobs.create, file_id), room)

    async def keep(self, record: FileRecord, file: BinaryIO) -> None:
        """For Upload: the contents first, then the record of them."""
        await in_thread(self._blobs.commit, record.id, file)
        try:
            await self._ask(self._store.add_file, record)
        except BaseException:
            self._blobs.delete(record.id)
            raise

    async def discard(self, file_id: str, file: BinaryIO) -> None:
        await in_thread(self._blobs.discard, file_id, file)

    async def get_file(self, owner: str, file_id: str) -> FileRecord:
        """Raises: NotFound."""
        return await self._ask(self._store.get_file, owner, file_id)

    async def list_files(
        self, owner: str, *, purpose: str | None, order: str, limit: int, after: str | None
    ) -> Page[FileRecord]:
        """In order of creation, ``asc`` or ``desc``. Raises: NotFound for an unknown ``after``."""
        return await self._ask(
            self._store.list_files, owner, purpose=purpose, order=order, limit=limit, after=after
        )

    async def delete_file(self, owner: str, file_id: str) -> None:
        """Raises: NotFound, Conflict while a batch that has not ended reads it."""
        await self._ask(self._store.delete_file, owner, file_id)
        await asyncio.to_thread(self._blobs.delete, file_id)

    def content_path(self, record: FileRecord) -> Path:
        return self._blobs.path(record.id)

    # ---- Batches ----

    async def create_batch(
        self,
        owner: str,
        *,
        input_file_id: str,
        endpoint: str,
        completion_window: str,
        completion_window_s: int,
        metadata: dict[str, str] | None,
        output_expires_after_s: int | None,
    ) -> BatchRecord:
        """Raises: NotFound for an unknown file, RequestError for one of another purpose."""
        file = await self.get_file(owner, input_file_id)
        if file.purpose != "batch":
            message = f"The file {input_file_id} has purpose {file.purpose!r}; a batch needs one of 'batch'."
            raise RequestError(message, param="input_file_id")
        now = self.now()
        batch = BatchRecord(
            id=new_batch_id(),
            owner=owner,
            endpoint=endpoint,
            input_file_id=input_file_id,
            completion_window=completion_window,
            status=BatchStatus.VALIDATING,
            created_at=now,
            expires_at=now + completion_window_s,
            output_blob=new_file_id(),
            error_blob=new_file_id(),
            output_retention_s=int(
                self.config.retention_s if output_expires_after_s is None else output_expires_after_s
            ),
            metadata=metadata,
        )
        await self._ask(self._store.add_batch, batch)
        logger.info("%s: created for %s, window %s", batch.id, input_file_id, completion_window)
        self._begin(batch)
        return batch

    async def get_batch(self, owner: str, batch_id: str) -> BatchRecord:
        """Raises: NotFound."""
        return self._with_counts(await self._ask(self._store.get_batch, owner, batch_id))

    async def list_batches(self, owner: str, *, limit: int, after: str | None) -> Page[BatchRecord]:
        """Newest first. Raises: NotFound for an unknown ``after``."""
        page = await self._ask(self._store.list_batches, owner, limit=limit, after=after)
        return Page([self._with_counts(batch) for batch in page.items], page.has_more)

    async def cancel_batch(self, owner: str, batch_id: str) -> BatchRecord:
        """Raises: NotFound, Conflict when the batch has ended otherwise or is about to."""
        while True:
            batch = await self._ask(self._store.get_batch, owner, batch_id)
            if batch.status in (BatchStatus.CANCELLING, BatchStatus.CANCELLED):
                return self._with_counts(batch)
            if batch.status is BatchStatus.VALIDATING:
                to, stamps = BatchStatus.CANCELLED, ["cancelling_at", "cancelled_at"]
            elif batch.status is BatchStatus.IN_PROGRESS:
                to, stamps = BatchStatus.CANCELLING, ["cancelling_at"]
            else:
                raise Conflict(f"The batch {batch_id} is {batch.status.value} and cannot be cancelled.")
            stamp = max(self.now(), batch.last_stamp)
            changes = {"status": to.value, **dict.fromkeys(stamps, stamp)}
            if await self._ask(self._store.change_batch, batch_id, changes, only_from=[batch.status]):
                job = self._jobs.get(batch_id)
                if job is not None:
                    job.cancelled.set()
                logger.info("%s: cancelled by its owner while %s", batch_id, batch.status.value)

    # ---- A batch's way ----

    def _begin(self, batch: BatchRecord) -> None:
        log = ResultLog(
            batch.id.removeprefix("batch_"),
            self._blobs.path(batch.output_blob),
            self._blobs.path(batch.error_blob),
        )
        job = self._jobs[batch.id] = _Job(batch, log, self._wall())
        if batch.status is BatchStatus.CANCELLING:
            job.cancelled.set()
        job.task = asyncio.create_task(self._drive(job), name=batch.id)

    async def _drive(self, job: _Job) -> None:
        try:
            if job.batch.status is BatchStatus.VALIDATING and not await self._validate(job):
                return
            await in_thread(job.log.open)
            if job.batch.status is BatchStatus.IN_PROGRESS:
                await self._feed(job)
            await self._finish(job)
        except FileNotFoundError:
            logger.error("%s: its input file is missing", job.batch.id)
            await self._end(
                job,
                BatchStatus.FAILED,
                {
                    "failed_at": self._stamp(job),
                    "errors": [dataclasses.asdict(LineError("file_not_found", "The input file is missing."))],
                },
            )
        except Exception:
            # The batch stays as it is in the database, and is tried again at the next start.
            logger.exception("%s: cannot go on", job.batch.id)
        finally:
            job.log.close()
            self._jobs.pop(job.batch.id, None)

    async def _validate(self, job: _Job) -> bool:
        """Whether the batch is in progress now; else it has failed or was cancelled."""
        check = InputCheck(
            self._blobs.path(job.batch.input_file_id),
            endpoint=job.batch.endpoint,
            model_names=self._model_names,
            max_lines=self.config.max_lines,
            max_line_bytes=self.config.max_line_bytes,
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

    async def _feed(self, job: _Job) -> None:
        """Run lines until all are done, the window is over or the owner cancels."""
        with self._blobs.path(job.batch.input_file_id).open("rb") as file:
            feed = Feed(job.batch.id, self._unfinished_lines(job, file), job.log, self._count)
            self._feeder.add(feed)
            cancelled = asyncio.create_task(job.cancelled.wait())
            keeps_results = False
            try:
                ends: set[asyncio.Future[Any]] = {feed.finished, cancelled}
                await asyncio.wait(
                    ends,
                    timeout=max(0.0, job.deadline_s - time.monotonic()),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                keeps_results = True
            finally:
                cancelled.cancel()
                await self._feeder.remove(feed, keep_results=keeps_results)
        changes: dict[str, Any] = {"finalizing_at": self._stamp(job)}
        if _num_unfinished(job.counts()):
            changes["expired_at"] = changes["finalizing_at"]
        if not await self._change(job, BatchStatus.FINALIZING, changes, [BatchStatus.IN_PROGRESS]):
            job.batch = dataclasses.replace(job.batch, status=BatchStatus.CANCELLING)

    async def _finish(self, job: _Job) -> None:
        """From FINALIZING or CANCELLING to the end: every line gets its result, the files become readable."""
        if job.batch.status is BatchStatus.CANCELLING:
            end, outcome = BatchStatus.CANCELLED, LineOutcome.CANCELLED
        elif job.batch.expired_at is not None:
            end, outcome = BatchStatus.EXPIRED, LineOutcome.EXPIRED
        else:
            end, outcome = BatchStatus.COMPLETED, LineOutcome.FAILED
        if _num_unfinished(job.counts()):
            with self._blobs.path(job.batch.input_file_id).open("rb") as file:
                lines = self._unfinished_lines(job, file)
                while group := await in_thread(_take, lines, _UNRUN_GROUP):
                    results = [unrun(line, _UNRUN_CODES[outcome], outcome) for line in group]
                    await until_durable(job.log, results, job.batch.id)
                    self._count(results)
        await self._end(job, end, {f"{end.value}_at": self._stamp(job)})

    async def _end(self, job: _Job, status: BatchStatus, changes: dict[str, Any]) -> None:
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
        await self._change(job, status, changes, [record.status], records)
        logger.info(
            "%s: %s, %d completed, %d failed", record.id, status.value, counts.completed, counts.failed
        )

    def _unfinished_lines(self, job: _Job, file: BinaryIO) -> Iterator[BatchLine]:
        limit = self.config.max_line_bytes
        for number, data in read_lines(file, limit):
            if not job.log.is_done(number):
                line = parse_line(number, data, limit)
                line.complete_by_s = job.deadline_s
                yield line

    def _count(self, results: Sequence[LineResult]) -> None:
        if self._observer is None:
            return
        for outcome, num_lines in Counter(result.outcome for result in results).items():
            usage = sum((result.usage for result in results if result.outcome is outcome), TokenUsage())
            self._observer.on_lines(outcome, num_lines, usage)

    def _with_counts(self, batch: BatchRecord) -> BatchRecord:
        """An open batch's counts are its result files', which the database gets when it ends."""
        job = self._jobs.get(batch.id)
        if job is None or batch.status.is_final or batch.status is BatchStatus.VALIDATING:
            return batch
        counts = job.log.counts(batch.request_counts.total)
        return dataclasses.replace(batch, request_counts=counts, usage=job.log.usage)

    def _stamp(self, job: _Job) -> int:
        """Now, but never before anything that happened to the batch already."""
        return max(self.now(), job.batch.last_stamp)

    # ---- The database, which may be locked for a while ----

    async def _change(
        self,
        job: _Job,
        status: BatchStatus,
        changes: Mapping[str, Any],
        only_from: Collection[BatchStatus],
        new_files: Sequence[FileRecord] = (),
    ) -> bool:
        """Compare-and-set of the status, repeated until the database answers."""
        row = {"status": status.value, **changes}
        if not await self._persist(
            lambda: self._store.change_batch(job.batch.id, row, only_from=only_from, new_files=new_files)
        ):
            return False
        stamps = {name: value for name, value in changes.items() if name.endswith("_at")}
        job.batch = dataclasses.replace(job.batch, status=status, **stamps)
        return True

    async def _persist(self, work: Callable[[], Result]) -> Result:
        delay_s = _FIRST_RETRY_S
        while True:
            try:
                return await in_thread(work)
            except SQLAlchemyError as error:
                logger.error(
                    "the batch database does not answer (%s); trying again in %g s", _reason(error), delay_s
                )
            await asyncio.sleep(delay_s)
            delay_s = min(_LONGEST_RETRY_S, 2 * delay_s)

    async def _ask(self, work: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs) -> Result:
        """For a caller who waits. Raises: Busy."""
        try:
            return await in_thread(work, *args, **kwargs)
        except SQLAlchemyError as error:
            logger.error("the batch database does not answer: %s", _reason(error))
            raise Busy("The database of files and batches does not answer. Please retry.") from error

    async def _sweep(self) -> None:
        """Delete files past their time."""
        while True:
            for file_id in await self._persist(lambda: self._store.delete_expired_files(self.now())):
                self._blobs.delete(file_id)
                logger.info("%s: deleted, its time was over", file_id)
            await asyncio.sleep(_SWEEP_INTERVAL_S)


def _num_unfinished(counts: RequestCounts) -> int:
    return counts.total - counts.completed - counts.failed


def _take(lines: Iterator[BatchLine], count: int) -> list[BatchLine]:
    return list(itertools.islice(lines, count))


def _write_all(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _reason(error: SQLAlchemyError) -> str:
    return str(getattr(error, "orig", None) or error).splitlines()[0]
