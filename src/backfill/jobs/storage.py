"""Where files and batches are kept: a data folder and a database, and the threads that wait for them."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from backfill.core.clock import Clock, WallClock
from backfill.core.durable_files import write_durably
from backfill.core.errors import ConfigError
from backfill.jobs.blobs import FileStore
from backfill.jobs.config import JobsConfig
from backfill.jobs.database import (
    exclusive_schema,
    open_database,
    open_in_memory,
    shown_option,
    shown_url,
    tie_to,
)
from backfill.jobs.database_results import DatabaseResults, FileResults, ResultStore
from backfill.jobs.errors import Busy
from backfill.jobs.leases import Leases, add_missing_leases
from backfill.jobs.object_store import open_file_store
from backfill.jobs.private_files import make_private
from backfill.jobs.retry import as_os_errors, reason_of, with_retries
from backfill.jobs.store import JobStore
from backfill.jobs.threads import JobThreads, until_done

logger = logging.getLogger(__name__)

Args = ParamSpec("Args")
Result = TypeVar("Result")


_HOLDER_FILE = "holder"
# A database or an object store that does not answer at the start is an error.
OPEN_TIMEOUT_S = 25.0
# A client that reads waits no longer for a database that hangs. A change waits: nobody else can know its end.
READ_TIMEOUT_S = 10.0
_WALL_CLOCK = WallClock()
_NO_ANSWER = "The database of files and batches does not answer. Please retry."


@dataclass(frozen=True, slots=True)
class JobStorage:
    """Everything that outlives the process.

    Attributes:
        blobs: the contents of files.
        results: of open batches.
        store_id: of the database and the files.
    """

    config: JobsConfig
    threads: JobThreads
    now: Callable[[], int]  # Unix seconds; the database's where servers share it
    clock: Clock
    store: JobStore
    blobs: FileStore
    results: ResultStore
    store_id: str

    @property
    def is_shared(self) -> bool:
        """Other servers may use the database and the files too."""
        return self.store.leases is not None

    @classmethod
    async def open(
        cls, config: JobsConfig, threads: JobThreads, now: Callable[[], int], clock: Clock = _WALL_CLOCK
    ) -> JobStorage:
        """Open the folder, the database and the file store, or create them.

        Args:
            now: Unix seconds, for a server that shares nothing.
        Raises: ConfigError.
        """
        data_dir = config.data_dir
        try:
            await threads.results.run(make_private, data_dir)
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"`data_dir` {data_dir} cannot be used: {reason}.") from error
        url = config.batch_database_url
        database = f"{shown_option(url)}: the database {shown_url(url, data_dir)}"
        engine = await _within(threads, threads.database.run(open_database, url, data_dir), database)
        blobs = open_file_store(config.batch_file_store, data_dir)
        try:
            store, store_id = await _within(
                threads, threads.results.run(_tie, engine, blobs, config, clock), blobs.shown
            )
            storage = cls(
                config,
                threads,
                now if store.leases is None else store.leases.now,
                clock,
                store,
                blobs,
                _results_of(engine, blobs, store),
                store_id,
            )
            known = None
            if not storage.is_shared and not blobs.is_remote:
                known = await storage.query_with_retries(store.blob_ids)
            await threads.results.run(blobs.open_folder, known)
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"{blobs.shown} cannot be used: {reason}.") from error
        except SQLAlchemyError as error:
            raise ConfigError(f"{database} cannot be used: {reason_of(error)}.") from error
        return storage

    @classmethod
    def in_memory(
        cls, config: JobsConfig, threads: JobThreads, now: Callable[[], int], results: ResultStore
    ) -> JobStorage:
        """Records that end with the process, and no files but those of ``results``. Blocking."""
        no_files = FileStore(config.data_dir)  # never opened
        return cls(
            config, threads, now, _WALL_CLOCK, JobStore(open_in_memory()), no_files, results, store_id=""
        )

    async def sweep_garbage(self) -> None:
        """Delete what servers that died left in a place of files that others may use. Raises: OSError."""
        names = await self.threads.results.run(self.blobs.garbage, self.now())
        # Only now: a file that was recorded meanwhile is known.
        known = await self.query_with_retries(self.store.blob_ids)
        left = [name for name in names if name not in known]
        for name in left:
            await self.threads.results.run(self.blobs.delete, name)
        if left:
            logger.info("%d files that belong to nothing were deleted", len(left))

    async def read(self, work: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs) -> Result:
        """As ``query``, for what changes nothing. Raises: Busy also where the database hangs."""
        reading = asyncio.ensure_future(self.query(work, *args, **kwargs))
        await asyncio.wait({reading}, timeout=READ_TIMEOUT_S)
        if not reading.done():
            reading.add_done_callback(_note_late)
            logger.error("the batch database has not answered for %g s", READ_TIMEOUT_S)
            raise Busy(_NO_ANSWER)
        return reading.result()

    async def query(self, work: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs) -> Result:
        """One query of the database, for a caller who waits. Raises: Busy where it does not answer."""
        try:
            return await self.threads.database.run(work, *args, **kwargs)
        except SQLAlchemyError as error:
            logger.error("the batch database does not answer: %s", reason_of(error))
            raise Busy(_NO_ANSWER) from error

    async def query_with_retries(
        self, work: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs
    ) -> Result:
        """Query the database until it answers. Raises: SQLAlchemyError where a retry cannot help."""

        def query() -> Result:
            with as_os_errors():
                return work(*args, **kwargs)

        return await with_retries(self.threads.database, query, "the batch database does not answer")


async def check_usable(config: JobsConfig) -> None:
    """Open all that ``JobStorage`` needs, and close it. Raises: ConfigError."""
    threads = JobThreads()
    try:
        storage = await JobStorage.open(config, threads, lambda: int(time.time()))
        await threads.database.run(storage.store.close)
    finally:
        threads.close()


def _note_late(reading: asyncio.Future[Any]) -> None:
    """Nobody awaits it any more."""
    if not reading.cancelled():
        reading.exception()


def _tie(engine: Engine, blobs: FileStore, config: JobsConfig, clock: Clock) -> tuple[JobStore, str]:
    """The records, and their id. Raises: ConfigError, OSError."""
    places = [blobs]
    if not config.is_shared and blobs.is_given:
        places.append(FileStore(config.data_dir))  # so that no second server opens the database
    store_id = tie_to(engine, places)
    if not config.is_shared:
        return JobStore(engine), store_id
    with exclusive_schema(engine) as connection:
        add_missing_leases(connection)
    return JobStore(engine, _leases(engine, config, clock)), store_id


def _leases(engine: Engine, config: JobsConfig, clock: Clock) -> Leases:
    """Of this server. What the last one on its data folder held is released: that one has ended.

    Raises: OSError.
    """
    path = config.data_dir / _HOLDER_FILE
    last = path.read_text().strip() if path.exists() else ""
    leases = Leases(engine, uuid.uuid4().hex, config.batch_lease_timeout, clock=clock)
    leases.read_clock()
    write_durably(path, f"{leases.holder}\n".encode())
    if last:
        leases.release_all(last)
    return leases


def _results_of(engine: Engine, blobs: FileStore, store: JobStore) -> ResultStore:
    kind = FileResults if store.leases is None and not blobs.is_remote else DatabaseResults
    return kind(engine, blobs, store.leases)


async def _within(threads: JobThreads, opening: Coroutine[Any, Any, Result], what: str) -> Result:
    """Raises: ConfigError where ``what`` does not answer; no thread is waited for then."""
    task = asyncio.ensure_future(opening)
    await asyncio.wait({task}, timeout=OPEN_TIMEOUT_S)
    if not task.done():
        threads.close()
        await until_done(task)
        raise ConfigError(f"{what} does not answer within {OPEN_TIMEOUT_S:g} s.")
    return task.result()
