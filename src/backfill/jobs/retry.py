"""Asking disks and databases again that refuse for a while."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from typing import Protocol

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from backfill.jobs.lines import LineResult
from backfill.jobs.threads import ThreadPool

logger = logging.getLogger(__name__)

FIRST_RETRY_S = 0.1
LONGEST_RETRY_S = 10.0


class ResultSink(Protocol):
    def append(self, results: Sequence[LineResult]) -> None:
        """Make results durable, all or none; blocking. Raises: OSError, which may pass, and others."""
        ...


def retry_delays_s() -> Iterator[float]:
    """Ever longer, without end."""
    delay_s = FIRST_RETRY_S
    while True:
        yield delay_s
        delay_s = min(LONGEST_RETRY_S, 2 * delay_s)


async def append_with_retries(
    threads: ThreadPool, sink: ResultSink, results: Sequence[LineResult], name: str
) -> None:
    """Append, and while the disk refuses try again, ever less often."""
    for delay_s in retry_delays_s():
        try:
            return await threads.run(sink.append, results)
        except OSError as error:
            reason = error.strerror or error
            logger.error("%s: results cannot be written (%s); trying again in %g s", name, reason, delay_s)
        await asyncio.sleep(delay_s)


def reason_of(error: SQLAlchemyError) -> str:
    return str(getattr(error, "orig", None) or error).splitlines()[0]


def may_pass(error: SQLAlchemyError) -> bool:
    """Whether it is the connection's or a lock's fault rather than the statement's."""
    if isinstance(error, OperationalError | InterfaceError | PoolTimeout):
        return True
    return isinstance(error, DBAPIError) and error.connection_invalidated
