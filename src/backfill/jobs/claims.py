"""Which lines of which open batches this server runs, of several on one database."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping

from sqlalchemy.exc import SQLAlchemyError

from backfill.jobs.leases import Claim, Leases
from backfill.jobs.open_batch import OpenBatch
from backfill.jobs.records import BatchStatus
from backfill.jobs.retry import is_temporary, reason_of
from backfill.jobs.storage import JobStorage

logger = logging.getLogger(__name__)

# A cancellation at another server is seen so late.
_LONGEST_PERIOD_S = 1.0
_RENEWALS_PER_LEASE = 5
# A server claims while it has fewer lines than so many times what it may have in flight; with several owners,
# fewer of each than its share of them. The more it has, the better is their order; where others wait for
# lines, what it has at the end runs while they are idle.
_LINES_AHEAD = 16
_LINES_AHEAD_BESIDE_OTHERS = 2


class BatchClaims:
    """Renews the leases of this server, and claims batches and lines while its engine has room for them.

    Batches that another server has taken are given up, and cancellations at other servers are passed on. One
    event loop owns it.

    Args:
        jobs: the batches, and lines of them, that this server runs, by name.
        begin: runs a batch that was claimed.
        is_ready: there is an engine.
        capacity: lines that may be in flight at once.
    """

    def __init__(
        self,
        storage: JobStorage,
        leases: Leases,
        jobs: Mapping[str, OpenBatch],
        *,
        begin: Callable[[Claim], object],
        is_ready: Callable[[], bool],
        capacity: Callable[[], int],
        model_names: Collection[str],
    ) -> None:
        self._storage = storage
        self._leases = leases
        self._jobs = jobs
        self._begin = begin
        self._is_ready = is_ready
        self._capacity = capacity
        self._model_names = list(model_names)
        self._lease_s = storage.config.batch_lease_timeout
        self._period_s = min(_LONGEST_PERIOD_S, self._lease_s / _RENEWALS_PER_LEASE)
        self._woken = asyncio.Event()
        self._clock = storage.clock
        self._takes_over_from_s = 0.0  # on that clock
        self._had_engine_at_s = self._clock.now_s()
        self._renewed_at_s = 0.0
        self._num_servers = 1  # with an engine

    def wake(self) -> None:
        """There may be something to claim, or room for it."""
        self._woken.set()

    async def run(self) -> None:
        """Without end. While the database does not answer, batches that this server runs wait for it."""
        renewing = asyncio.create_task(self._keep_renewing())
        try:
            await self._keep_claiming()
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)

    async def _keep_renewing(self) -> None:
        """While a claim, or what it waits for, takes long."""
        while True:
            await asyncio.sleep(self._period_s)
            if self._clock.now_s() - self._renewed_at_s > 2 * self._period_s:
                with self._logged_errors():
                    await self._renew()

    async def _keep_claiming(self) -> None:
        while True:
            self._woken.clear()
            with self._logged_errors():
                await self._renew()
                await self._leave_without_engine()
                await self._claim()
            await asyncio.sleep(max(0.0, self._takes_over_from_s - self._clock.now_s() - self._period_s))
            # Not ``wait_for``: on Python 3.11 it may swallow a cancellation.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._period_s):
                    await self._woken.wait()

    @contextlib.contextmanager
    def _logged_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if isinstance(error, SQLAlchemyError) and is_temporary(error):
                logger.error("the batch database does not answer: %s", reason_of(error))
            else:
                logger.exception("batches cannot be claimed; trying again")
            # Leases end meanwhile. Those whose servers live are renewed first when it is back.
            self._takes_over_from_s = self._clock.now_s() + 2 * self._period_s

    async def release_all(self) -> None:
        """Let other servers go on at once. An error is logged: the leases end by themselves."""
        try:
            await self._storage.threads.leases.run(self._leases.release_all)
        except SQLAlchemyError as error:
            logger.error("leases cannot be released, and end in %g s: %s", self._lease_s, reason_of(error))

    async def _renew(self) -> None:
        held = {job.lease: job for job in self._jobs.values() if job.lease is not None}
        renewal = await self._storage.threads.leases.run(
            self._leases.renew, list(held), is_ready=self._is_ready()
        )
        self._renewed_at_s = self._clock.now_s()
        self._num_servers = renewal.num_servers
        for lease, job in held.items():
            status = renewal.statuses.get(lease.batch_id)
            if status is None or status.is_final or status is BatchStatus.CANCELLING:
                job.cancel()
            elif lease not in renewal.held and job.lease is lease:
                self._give_up(job, "another server has taken it over")

    async def _leave_without_engine(self) -> None:
        """Release what runs once no engine was ready for the time of a lease: another server may have one."""
        if self._is_ready():
            self._had_engine_at_s = self._clock.now_s()
        if self._clock.now_s() - self._had_engine_at_s < self._lease_s:
            return
        for job in list(self._jobs.values()):
            is_over = job.cancelled.done() or job.left_s <= 0
            if is_over or job.batch.status is not BatchStatus.IN_PROGRESS:
                continue  # it needs none
            if job.lease is not None and job.task is not None:
                self._give_up(job, "there is no engine for it here")
                await asyncio.wait({job.task})
                await self._storage.threads.leases.run(self._leases.release, job.lease)

    def _give_up(self, job: OpenBatch, reason: str) -> None:
        if job.task is not None and not job.task.done():
            logger.warning("%s: given up: %s", job.name, reason)
            job.task.cancel()

    async def _claim(self) -> None:
        while True:
            max_lines = self._max_lines()
            claimed = await self._storage.threads.database.run(
                self._leases.claim,
                only_over=max_lines <= 0,
                takes_over=self._clock.now_s() >= self._takes_over_from_s,
                model_names=self._model_names,
                others_than=[job.batch.id for job in self._jobs.values() if not _may_claim_beside(job)],
                running=[job.lease for job in self._jobs.values() if job.lease is not None],
                num_servers=self._num_servers,
                max_lines=max_lines,
                lines_of=self._lines_of(),
            )
            if claimed is None:
                return
            what = claimed.batch.status.value
            if claimed.lease.lines is not None:
                what = f"{int.from_bytes(claimed.lease.lines, 'little').bit_count()} lines"
            logger.info("%s: claimed, %s", claimed.batch.id, what)
            self._begin(claimed)

    def _max_lines(self) -> int:
        """Lines that this server may have."""
        if any(job.batch.status is BatchStatus.VALIDATING for job in self._jobs.values()):
            return 0  # it may fill the server: how many lines it has is not known yet
        ahead = _LINES_AHEAD if self._num_servers == 1 else _LINES_AHEAD_BESIDE_OTHERS
        return ahead * self._capacity()

    def _lines_of(self) -> Counter[str]:
        """Lines of each owner that this server has."""
        lines = Counter[str]()
        for job in self._jobs.values():
            lines[job.batch.owner] += job.num_unfinished
        return +lines


def _may_claim_beside(job: OpenBatch) -> bool:
    """Lines of a batch may be claimed beside others that run; a batch, or what is ended here, not again."""
    is_ending = job.lease is None or (job.task is not None and job.task.cancelling() > 0)
    return job.lines is not None and not is_ending
