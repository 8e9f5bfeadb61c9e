"""Keeps files and batches: what the Files and Batches API does, without HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from backfill.core.errors import RequestError
from backfill.jobs.blobs import BlobStore
from backfill.jobs.config import JobsConfig
from backfill.jobs.database import open_database
from backfill.jobs.errors import Conflict, NotFound, TooLarge
from backfill.jobs.feeder import Feeder, LineRunner
from backfill.jobs.lifecycle import BatchDriver, OpenBatch, num_unfinished
from backfill.jobs.lines import LineResult
from backfill.jobs.lock import DataFolderLock
from backfill.jobs.patience import ask, in_thread, persist
from backfill.jobs.records import (
    BatchRecord,
    BatchStatus,
    FileRecord,
    LineOutcome,
    Page,
    TokenUsage,
    new_batch_id,
    new_file_id,
)
from backfill.jobs.runner import ServiceRunner
from backfill.jobs.store import JobStore
from backfill.protocol.service import CompletionService

logger = logging.getLogger(__name__)

_SWEEP_INTERVAL_S = 60.0


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


class Upload:
    """A file on its way in. End it with ``finish`` or ``abort``."""

    def __init__(
        self, manager: JobManager, owner: str, file_id: str, file: BinaryIO, most_received: int | None
    ) -> None:
        self._manager = manager
        self._owner = owner
        self._id = file_id
        self._file = file
        self._most_received = most_received  # where the store is full, counted over all uploads
        self._num_bytes = 0

    async def write(self, data: bytes) -> None:
        """Raises: TooLarge beyond the limit of any file, or when the store is full."""
        limit = self._manager.config.max_file_bytes
        self._num_bytes += len(data)
        num_received = self._manager.receive(len(data))
        if self._num_bytes > limit:
            raise TooLarge(f"The file is over the limit of {limit} bytes.")
        if self._most_received is not None and num_received > self._most_received:
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
        self._manager.receive(-self._num_bytes)
        self._num_bytes = 0
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
        self._jobs: dict[str, OpenBatch] = {}
        self._sweeper: asyncio.Task[None] | None = None
        self._is_open = False
        self._is_paused = False
        self._num_received_bytes = 0  # of uploads, less those given up
        self._blobs: BlobStore
        self._store: JobStore
        self._driver: BatchDriver

    # ---- Life ----

    async def start(self) -> None:
        """Take the data folder and go on with unfinished batches. Raises: ConfigError."""
        self._lock.acquire()
        try:
            self._store = JobStore(
                await asyncio.to_thread(open_database, self.config.database_url, self.config.data_dir)
            )
            await asyncio.to_thread(self._store.tie_to_folder, self.config.data_dir)
            self._blobs = BlobStore(self.config.data_dir / "files")
            self._blobs.sweep(await persist(self._store.blob_ids))
            self._driver = BatchDriver(
                self.config,
                self._store,
                self._blobs,
                self._feeder,
                model_names=self._model_names,
                on_lines=self._count,
                now=self.now,
            )
            for batch in await persist(self._store.open_batches):
                logger.info("%s: goes on, %s", batch.id, batch.status.value)
                self._begin(batch)
        except BaseException:
            self._lock.release()
            raise
        self._is_open = True
        self._sweeper = asyncio.create_task(self._sweep())

    async def pause(self) -> None:
        """Stop feeding at once; lines that run are given up and run again at the next start.

        Requests are answered on until ``stop``.
        """
        self._is_paused = True
        self._feeder.set_capacity(0)
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        if self._sweeper is not None:
            tasks.append(self._sweeper)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def stop(self) -> None:
        """Let go of the data folder, once no request is at work any more."""
        if not self._is_open:
            return
        self._is_open = False
        await self.pause()
        self._store.close()
        self._lock.release()

    def engine_ready(self, service: CompletionService, max_num_seqs: int) -> None:
        if self._is_paused:
            return
        self._service = service
        self._feeder.set_capacity(self.config.max_in_flight or 2 * max_num_seqs)

    def engine_lost(self) -> None:
        self._service = None
        self._feeder.set_capacity(0)

    def now(self) -> int:
        return int(self._wall())

    def snapshot(self) -> JobsSnapshot:
        jobs = self._jobs.values()
        queued = {job.batch.id: num_unfinished(job.counts()) for job in jobs}
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
        most_received = None
        if self.config.max_stored_bytes is not None:
            num_received = self._num_received_bytes
            num_stored = await asyncio.to_thread(self._blobs.num_bytes)
            most_received = num_received + self.config.max_stored_bytes - num_stored
        file_id = new_file_id()
        file = await asyncio.to_thread(self._blobs.create, file_id)
        return Upload(self, owner, file_id, file, most_received)

    def receive(self, num_bytes: int) -> int:
        """For Upload: bytes of all uploads since the start, with these; negative ones were given up."""
        self._num_received_bytes += num_bytes
        return self._num_received_bytes

    async def keep(self, record: FileRecord, file: BinaryIO) -> None:
        """For Upload: the contents first, then the record of them."""
        await in_thread(self._blobs.commit, record.id, file)
        try:
            await ask(self._store.add_file, record)
        except BaseException:
            self._blobs.delete(record.id)
            raise

    async def discard(self, file_id: str, file: BinaryIO) -> None:
        await in_thread(self._blobs.discard, file_id, file)

    async def get_file(self, owner: str, file_id: str) -> FileRecord:
        """Raises: NotFound."""
        return await ask(self._store.get_file, owner, file_id)

    async def list_files(
        self, owner: str, *, purpose: str | None, order: str, limit: int, after: str | None
    ) -> Page[FileRecord]:
        """In order of creation, ``asc`` or ``desc``. Raises: NotFound for an unknown ``after``."""
        return await ask(
            self._store.list_files, owner, purpose=purpose, order=order, limit=limit, after=after
        )

    async def delete_file(self, owner: str, file_id: str) -> None:
        """Raises: NotFound, Conflict while a batch that has not ended reads it."""
        await ask(self._store.delete_file, owner, file_id)
        await asyncio.to_thread(self._blobs.delete, file_id)

    def content_path(self, record: FileRecord) -> Path:
        """Raises: NotFound where the bytes are gone from the disk, though nobody deleted the file."""
        path = self._blobs.path(record.id)
        if not path.is_file():
            logger.error("%s: its contents are missing from the data folder", record.id)
            raise NotFound(f"The contents of the file {record.id} are missing from the server's storage.")
        return path

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
        await ask(self._store.add_batch, batch)
        logger.info("%s: created for %s, window %s", batch.id, input_file_id, completion_window)
        if not self._is_paused:  # else the next start takes it up
            self._begin(batch)
        return batch

    async def get_batch(self, owner: str, batch_id: str) -> BatchRecord:
        """Raises: NotFound."""
        return self._with_counts(await ask(self._store.get_batch, owner, batch_id))

    async def list_batches(self, owner: str, *, limit: int, after: str | None) -> Page[BatchRecord]:
        """Newest first. Raises: NotFound for an unknown ``after``."""
        page = await ask(self._store.list_batches, owner, limit=limit, after=after)
        return Page([self._with_counts(batch) for batch in page.items], page.has_more)

    async def cancel_batch(self, owner: str, batch_id: str) -> BatchRecord:
        """Raises: NotFound, Conflict when the batch has ended otherwise or is about to."""
        while True:
            batch = await ask(self._store.get_batch, owner, batch_id)
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
            if await ask(self._store.change_batch, batch_id, changes, only_from=[batch.status]):
                job = self._jobs.get(batch_id)
                if job is not None:
                    job.cancelled.set()
                logger.info("%s: cancelled by its owner while %s", batch_id, batch.status.value)

    def _begin(self, batch: BatchRecord) -> None:
        job = self._jobs[batch.id] = OpenBatch(batch, self._driver.log_of(batch), self._wall())
        if batch.status is BatchStatus.CANCELLING:
            job.cancelled.set()
        job.task = asyncio.create_task(self._driver.drive(job), name=batch.id)
        job.task.add_done_callback(lambda _: self._jobs.pop(batch.id, None))

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

    async def _sweep(self) -> None:
        """Delete files past their time."""
        while True:
            for file_id in await persist(lambda: self._store.delete_expired_files(self.now())):
                self._blobs.delete(file_id)
                logger.info("%s: deleted, its time was over", file_id)
            await asyncio.sleep(_SWEEP_INTERVAL_S)


def _write_all(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
