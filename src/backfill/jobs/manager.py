"""Keeps files and runs batches: the Files and Batches API without HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from backfill.core.clock import Clock, WallClock
from backfill.core.errors import RequestError
from backfill.engine.tasks import TaskWatch
from backfill.jobs.claims import BatchClaims
from backfill.jobs.config import JobsConfig
from backfill.jobs.database_results import ResultStore
from backfill.jobs.errors import Busy, Conflict, NotFound, TooMany
from backfill.jobs.feeder import Feeder, LineRunner
from backfill.jobs.files import Files
from backfill.jobs.leases import Lease
from backfill.jobs.lifecycle import BatchDriver
from backfill.jobs.lines import LineResult, ServiceRunner
from backfill.jobs.open_batch import InputReader, JobsSnapshot, OpenBatch
from backfill.jobs.outlook import Outlook
from backfill.jobs.private_files import DataFolderLock
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
from backfill.jobs.storage import JobStorage
from backfill.jobs.threads import JobThreads
from backfill.protocol.service import CompletionService

logger = logging.getLogger(__name__)

# Limit of ``pause`` and ``stop`` together.
STOP_TIMEOUT_S = 10.0


class JobManager:
    """The Files and Batches API without HTTP. One event loop owns it, and one process its data folder.

    Where managers share a database (``JobStorage.is_shared``), each answers for all files and batches, and
    runs the batches that it has leases on (``BatchClaims``). Else it runs all.

    ``owner`` is the name of the caller's API key, the digest of one without a name: nobody sees
    another owner's files and batches.

    Args:
        reader: of input files.
        model_names: what lines may call the model.
        url: of the server, shown to a second server on the same folder.
        on_lines: called with every group of results once it is durable.
        on_batch_upload: called when a file for a batch begins to come.
        runner: runs lines; by default on the service of ``engine_ready``.
        results: of a run without a server. It has no data folder: records are in memory. An error ends its
            batch (``OpenBatch.error``).
        weight_of: an owner's weight, where several have batches.
        wall: Unix seconds, where no other server shares the database: else the database's clock counts.
    """

    def __init__(
        self,
        config: JobsConfig,
        reader: InputReader,
        *,
        model_names: Sequence[str],
        url: str = "",
        on_lines: Callable[[LineOutcome, int, TokenUsage], None] | None = None,
        on_batch_upload: Callable[[], None] = lambda: None,
        runner: LineRunner | None = None,
        results: ResultStore | None = None,
        weight_of: Callable[[str], float] = lambda owner: 1.0,
        wall: Callable[[], float] = time.time,
        clock: Clock | None = None,
        threads: JobThreads | None = None,
        tasks: TaskWatch | None = None,
    ) -> None:
        self.config = config
        self._reader = reader
        self._model_names = model_names
        self._on_lines, self._results = on_lines, results
        self.on_batch_upload = on_batch_upload
        self._lock = DataFolderLock(config.data_dir, url)
        self._service: CompletionService | None = None
        self._wall, self._clock = wall, clock or WallClock()
        self._threads, self._tasks = threads or JobThreads(), tasks or TaskWatch()
        self.feeder = Feeder(
            runner or ServiceRunner(lambda: self._service),
            self._threads.results,
            self._tasks,
            reports_progress=config.order == "blend",
            weight_of=weight_of,
        )
        self._jobs: dict[str, OpenBatch] = {}
        self.outlook = Outlook(self._jobs, self.feeder, self._clock)
        self._claims: BatchClaims | None = None  # None where this server runs all batches
        self._claiming: asyncio.Task[None] | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._is_open = self._is_paused = self._is_ready = False
        self._stop_by_s: float | None = None  # once it is pausing
        self._storage: JobStorage
        self._driver: BatchDriver
        self.files: Files

    async def start(self) -> None:
        """Lock the data folder and resume unfinished batches. Raises: ConfigError."""
        if self._results is None:
            await self._threads.results.run(self._lock.acquire)
        try:
            self._storage = await self._open_storage()
            self.files = Files(self._storage)
            self._driver = BatchDriver(
                self._storage,
                self.feeder,
                self._reader,
                model_names=self._model_names,
                on_lines=self._count,
                num_queued_lines=self._num_queued_lines,
                on_validated=self._wake_claims,
                ends_at_errors=self._results is not None,
            )
            batches = await self._storage.query_with_retries(self._storage.store.open_batches)
            if self._storage.store.leases is None:
                for batch in batches:
                    logger.info("%s: resumed, %s", batch.id, batch.status.value)
                    self._begin(batch)
            else:
                self._claims = BatchClaims(
                    self._storage,
                    self._storage.store.leases,
                    self._jobs,
                    begin=lambda claim: self._begin(claim.batch, claim.lease, claim.now_s),
                    is_ready=lambda: self._is_ready,
                    capacity=lambda: self.feeder.capacity,
                    model_names=self._model_names,
                )
                self._claiming = self._tasks.start(self._claims.run(), "batch-claims")
        except BaseException:
            self._lock.release()
            raise
        self._is_open = True
        self._sweeper = self._tasks.start(self.files.sweep(), "sweeper")

    async def _open_storage(self) -> JobStorage:
        if self._results is None:
            return await JobStorage.open(self.config, self._threads, lambda: int(self._wall()), self._clock)
        return await self._threads.database.run(
            JobStorage.in_memory, self.config, self._threads, lambda: int(self._wall()), self._results
        )

    async def drain(self, timeout_s: float) -> int:
        """Begin no more lines, and wait so long for those that have begun. Returns: as ``Feeder.drain``."""
        self._is_paused = True
        self._set_capacity(0)
        return await self.feeder.drain(timeout_s)

    async def pause(self) -> None:
        """Stop feeding at once. Lines in flight run again after the next start, or on another server.

        Requests are answered until ``stop``.
        """
        self._is_paused = True
        self._set_capacity(0)
        tasks = [job.task for job in self._jobs.values()]
        ending = [task for task in (*tasks, self._sweeper, self._claiming) if task is not None]
        for task in ending:
            task.cancel()
        if ending:
            await asyncio.wait(ending, timeout=self._stop_timeout_s())
        if self._claims is not None:
            # Nothing is claimed any more. A write that hangs is refused once another server has the batch.
            releasing = asyncio.ensure_future(self._claims.release_all())
            await asyncio.wait({releasing}, timeout=self._stop_timeout_s())

    async def stop(self) -> None:
        """Release the data folder, once no request uses it.

        Where a disk or database hangs for ``STOP_TIMEOUT_S`` from the pause on, this process keeps the lock
        until it ends: no other server may start during an unfinished write.
        """
        if not self._is_open:
            return
        self._is_open = False
        await self.pause()
        await self._threads.wait_idle(self._stop_timeout_s())
        closing = asyncio.ensure_future(self._threads.database.run(self._storage.store.close))
        await asyncio.wait([closing], timeout=self._stop_timeout_s())
        if num_left := self._threads.close():
            logger.error("stopped while the disk or the database did not answer %d calls", num_left)
        else:
            self._lock.release()

    def _stop_timeout_s(self) -> float:
        """Seconds left of ``STOP_TIMEOUT_S``, from the first call on."""
        if self._stop_by_s is None:
            self._stop_by_s = self._clock.now_s() + STOP_TIMEOUT_S
        return max(0.0, self._stop_by_s - self._clock.now_s())

    def engine_ready(self, service: CompletionService, max_num_seqs: int) -> None:
        if self._is_paused:
            return
        self._service = service
        self._set_capacity(self.config.max_in_flight or 2 * max_num_seqs)
        self._wake_claims()

    def feed(self, capacity: int) -> None:
        """Let so many lines be with the runner at once; with 0 no line starts. For a runner of one's own."""
        if not self._is_paused and capacity != self.feeder.capacity:
            self._set_capacity(capacity)
            self._wake_claims()

    def hold(self) -> None:
        """No line starts until ``engine_ready``. Those that run go on, and batches stay with this server."""
        self.feeder.set_capacity(0)

    def engine_lost(self) -> None:
        self._service = None
        self._set_capacity(0)

    @property
    def store_id(self) -> str:
        """The same for servers that share files and batches, once it has started."""
        return self._storage.store_id

    def snapshot(self) -> JobsSnapshot:
        return JobsSnapshot.of_jobs(list(self._jobs.values()), self._storage.now())

    async def store_snapshot(self) -> JobsSnapshot:
        """As ``snapshot``, of the batches of all servers that share the database. Raises: Busy."""
        batches = await self._storage.read(self._storage.store.open_batches)
        return JobsSnapshot.of_batches(batches, self._storage.now())

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
        """Raises: NotFound for an unknown file, RequestError for one of another purpose, TooMany where the
        owner's open batches are at a limit, StorageFull."""
        file = await self.files.get(owner, input_file_id)
        if file.purpose != "batch":
            message = f"The file {input_file_id} has purpose {file.purpose!r}; a batch needs 'batch'."
            raise RequestError(message, param="input_file_id")
        most = self.config.batch_max_queued_lines
        if await self._num_queued_lines(owner) >= most:
            raise TooMany(
                f"Your open batches have the {most} unfinished lines that they may "
                "have together. Wait until some have ended, or cancel them."
            )
        await self.files.check_free_space()
        now = self._storage.now()
        kept_s = self.config.retention_s if output_expires_after_s is None else output_expires_after_s
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
            output_retention_s=int(kept_s),
            user_metadata=metadata,
        )
        try:
            await self._storage.query(self._storage.store.add_batch, batch, self.config.batch_max_open)
        except (Busy, asyncio.CancelledError):
            self._tasks.start(self._begin_if_added(batch), "batch-begin")
            raise
        logger.info("%s: created for %s, window %s", batch.id, input_file_id, completion_window)
        self._begin_new(batch, file.num_bytes)
        return batch

    async def _begin_if_added(self, batch: BatchRecord) -> None:
        """Its creator has no answer, but there may be a record, which no lease would lead to."""
        if self._claims is None:
            with contextlib.suppress(NotFound):
                get = self._storage.store.get_batch
                self._begin_new(await self._storage.query_with_retries(get, batch.owner, batch.id))

    def _begin_new(self, batch: BatchRecord, num_input_bytes: int = 0) -> None:
        self._wake_claims()
        if self._claims is None and not self._is_paused:  # else the next start begins it
            self._begin(batch).num_input_bytes = num_input_bytes

    async def run_batch(self, file: FileRecord, batch: BatchRecord) -> OpenBatch:
        """Begin a new batch whose input ``reader`` knows. No other manager may share the database."""
        await self._storage.query(self._storage.store.add_file, file)
        await self._storage.query(self._storage.store.add_batch, batch, self.config.batch_max_open)
        return self._begin(batch)

    async def get_batch(self, owner: str, batch_id: str) -> BatchRecord:
        """Raises: NotFound."""
        return self._with_counts(await self._storage.read(self._storage.store.get_batch, owner, batch_id))

    async def list_batches(self, owner: str, *, limit: int, after: str | None) -> Page[BatchRecord]:
        """Newest first. Raises: NotFound for an unknown ``after``."""
        page = await self._storage.read(self._storage.store.list_batches, owner, limit=limit, after=after)
        return Page([self._with_counts(batch) for batch in page.items], page.has_more)

    async def cancel_batch(self, owner: str, batch_id: str) -> BatchRecord:
        """Raises: NotFound, Conflict when the batch has ended otherwise or is about to."""
        while True:
            batch = await self._storage.read(self._storage.store.get_batch, owner, batch_id)
            if batch.status in (BatchStatus.CANCELLING, BatchStatus.CANCELLED):
                return self._with_counts(batch)
            if batch.status is BatchStatus.VALIDATING:
                to, stamps = BatchStatus.CANCELLED, ["cancelling_at", "cancelled_at"]
            elif batch.status is BatchStatus.IN_PROGRESS:
                to, stamps = BatchStatus.CANCELLING, ["cancelling_at"]
            else:
                raise Conflict(f"The batch {batch_id} is {batch.status.value} and cannot be cancelled.")
            stamp = max(self._storage.now(), batch.last_timestamp)
            changes = {"status": to, **dict.fromkeys(stamps, stamp)}
            change = self._storage.store.change_batch
            if await self._storage.query(change, batch_id, changes, only_from=[batch.status]):
                for job in self._jobs.values():
                    if job.batch.id == batch_id:
                        job.cancel()
                logger.info("%s: cancelled by its owner while %s", batch_id, batch.status.value)

    def _begin(self, batch: BatchRecord, lease: Lease | None = None, now_s: float | None = None) -> OpenBatch:
        log = self._driver.log_of(batch, lease)
        job = OpenBatch(batch, log, self._wall() if now_s is None else now_s, self._clock, lease)
        self._jobs[job.name] = job
        if batch.status is BatchStatus.CANCELLING:
            job.cancel()
        job.task = self._tasks.start(self._driver.drive(job), "batch-driver")
        job.task.add_done_callback(partial(self._forget, job.name))
        return job

    def _forget(self, name: str, task: asyncio.Task[None]) -> None:
        job = self._jobs.pop(name)
        if self._storage.blobs.is_remote:
            self._tasks.start(
                self._threads.results.run(self._storage.blobs.release, job.input_user), "release"
            )
        if not task.cancelled() and task.exception() is not None:  # TaskWatch has logged it
            logger.error("%s: stays as it is until the next start", name)
        if not self._is_paused:
            self._wake_claims()

    def _wake_claims(self) -> None:
        if self._claims is not None:
            self._claims.wake()

    def _set_capacity(self, capacity: int) -> None:
        self._is_ready = capacity > 0
        self.feeder.set_capacity(capacity)

    async def _num_queued_lines(self, owner: str) -> int:
        """Unfinished lines of an owner's open batches whose counts are known."""
        if self._storage.is_shared:
            return await self._storage.query_with_retries(self._storage.store.num_queued_lines, owner)
        jobs = [job for job in self._jobs.values() if job.batch.owner == owner and job.has_counts]
        return sum(job.counts().unfinished for job in jobs)

    def _count(self, results: Sequence[LineResult]) -> None:
        self.outlook.on_ended(results)
        if self._on_lines is None:
            return
        for outcome, num_lines in Counter(result.outcome for result in results).items():
            usage = sum((result.usage for result in results if result.outcome is outcome), TokenUsage())
            self._on_lines(outcome, num_lines, usage)

    def _with_counts(self, batch: BatchRecord) -> BatchRecord:
        """The batch with the counts of its result files, which the database gets when it ends.

        Where servers share it, it always has them.
        """
        job = None if self._storage.is_shared else self._jobs.get(batch.id)
        if job is None or batch.status.is_final or batch.status is BatchStatus.VALIDATING:
            return batch
        counts = job.log.counts(batch.request_counts.total)
        return dataclasses.replace(batch, request_counts=counts, usage=job.log.usage)
