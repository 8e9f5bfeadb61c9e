"""Where files and batches are kept: a data folder and a database, and the threads that wait for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from backfill.core.errors import ConfigError
from backfill.jobs.blobs import BlobStore
from backfill.jobs.config import JobsConfig
from backfill.jobs.database import open_database, tie_to_folder
from backfill.jobs.errors import Busy
from backfill.jobs.private_files import make_private
from backfill.jobs.retry import is_temporary, reason_of, retry_delays_s
from backfill.jobs.store import JobStore
from backfill.jobs.threads import JobThreads

logger = logging.getLogger(__name__)

Args = ParamSpec("Args")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class JobStorage:
    """Everything that outlives the process."""

    config: JobsConfig
    threads: JobThreads
    now: Callable[[], int]  # Unix seconds
    store: JobStore
    blobs: BlobStore

    @classmethod
    async def open(cls, config: JobsConfig, threads: JobThreads, now: Callable[[], int]) -> JobStorage:
        """Open the folder and the database, or create them. Raises: ConfigError."""
        data_dir = config.data_dir
        blobs = BlobStore(data_dir / "files")
        try:
            await threads.results.run(make_private, data_dir)
            engine = await threads.database.run(open_database, config.batch_database_url, data_dir)
            await threads.database.run(tie_to_folder, engine, data_dir)
            storage = cls(config, threads, now, JobStore(engine), blobs)
            known = await storage.query_with_retries(storage.store.blob_ids)
            await threads.results.run(blobs.open_folder, known)
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"`data_dir` {data_dir} cannot be used: {reason}.") from error
        return storage

    async def query(self, work: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs) -> Result:
        """One query of the database, for a caller who waits. Raises: Busy where it does not answer."""
        try:
            return await self.threads.database.run(work, *args, **kwargs)
        except SQLAlchemyError as error:
            logger.error("the batch database does not answer: %s", reason_of(error))
            raise Busy("The database of files and batches does not answer. Please retry.") from error

    async def query_with_retries(
        self, work: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs
    ) -> Result:
        """Query the database until it answers. Raises: SQLAlchemyError where a retry cannot help."""
        for delay_s in retry_delays_s():
            try:
                return await self.threads.database.run(work, *args, **kwargs)
            except SQLAlchemyError as error:
                if not is_temporary(error):
                    raise
                reason = reason_of(error)
                logger.error("the batch database does not answer (%s); trying again in %g s", reason, delay_s)
            await asyncio.sleep(delay_s)
        raise AssertionError("delays have no end")
