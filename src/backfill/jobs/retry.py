"""Retries while a disk or a database refuses."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol, TypeVar

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from backfill.jobs.lines import LineResult
from backfill.jobs.threads import ThreadPool

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

FIRST_RETRY_S = 0.1
LONGEST_RETRY_S = 10.0
_IDLE_IN_TRANSACTION = "25P03"  # PostgreSQL has ended the transaction of a process that hung


class ResultSink(Protocol):
    def append(self, results: Sequence[LineResult]) -> None:
        """Make results durable, all or none; blocks. Raises: OSError, which may be temporary, and others."""
        ...


def retry_delays_s() -> Iterator[float]:
    """Delays that double up to a limit, without end."""
    delay_s = FIRST_RETRY_S
    while True:
        yield delay_s
        delay_s = min(LONGEST_RETRY_S, 2 * delay_s)


async def with_retries(threads: ThreadPool, work: Callable[[], Result], failure: str) -> Result:
    """Run ``work`` in a thread until it raises no OSError. ``failure`` is logged each time that it does."""
    for delay_s in retry_delays_s():
        try:
            return await threads.run(work)
        except OSError as error:
            logger.error("%s (%s); trying again in %g s", failure, error.strerror or error, delay_s)
        await asyncio.sleep(delay_s)
    raise AssertionError("delays have no end")


async def append_with_retries(
    threads: ThreadPool, sink: ResultSink, results: Sequence[LineResult], name: str
) -> None:
    """Append results; retry while the disk refuses."""
    await with_retries(threads, partial(sink.append, results), f"{name}: results cannot be written")


@contextlib.contextmanager
def as_os_errors() -> Iterator[None]:
    """A database that does not answer is to its callers what a disk is that refuses."""
    try:
        yield
    except SQLAlchemyError as error:
        if not is_temporary(error):
            raise
        raise OSError(errno.EIO, reason_of(error)) from error


def reason_of(error: SQLAlchemyError) -> str:
    return next(iter(str(getattr(error, "orig", None) or error).splitlines()), type(error).__name__)


def is_temporary(error: SQLAlchemyError) -> bool:
    """Whether a retry may help: the connection or a lock failed, not the statement."""
    if isinstance(error, OperationalError | InterfaceError | PoolTimeout):
        return True
    if not isinstance(error, DBAPIError):
        return False
    return error.connection_invalidated or getattr(error.orig, "sqlstate", None) == _IDLE_IN_TRANSACTION
