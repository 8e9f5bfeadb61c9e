"""Keeps one preparation process running, and gives it jobs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from backfill.core.errors import BackfillError, NotReady
from backfill.engine.tasks import TaskWatch
from backfill.ipc.child import ChildProcess
from backfill.ipc.restarts import Restarts
from backfill.preparation.messages import (
    CancelJob,
    Failure,
    FromPreparation,
    Job,
    JobBegun,
    Loaded,
    PreparationSetup,
    Result,
    ToPreparation,
    Work,
    exception_of,
)
from backfill.preparation.process import run_preparation_process

logger = logging.getLogger(__name__)

# Failed launches in a row after which jobs are refused instead of kept waiting.
_MAX_FAILED_LAUNCHES = 3
_FIRST_RESTART_S = 0.1
_LONGEST_RESTART_S = 10.0
_NOT_READY = "The server cannot prepare requests at the moment. Please retry."

Wanted = TypeVar("Wanted", bound=Result)

_Child = ChildProcess[FromPreparation, ToPreparation]


class PreparationDied(BackfillError):
    """The process ended twice while it worked on a job, the second time on this job alone."""


@dataclass(slots=True)
class _PendingJob:
    """A job without a result."""

    job: Job
    done: asyncio.Future[Result | Failure]
    is_sent: bool = False  # the current process has it
    has_begun: bool = False  # the current process works on it
    is_suspect: bool = False  # a process ended while it worked on this job, and perhaps on others


class PreparationSupervisor:
    """Starts a process, sends it jobs, and restarts it when it dies. One event loop owns it.

    Jobs may be submitted before the process is up. When the process dies, the next one gets the jobs that
    have no result. The jobs that it worked on are suspects: the next process gets them one at a time, and a
    suspect that ends this process too fails. No other job fails.

    Attributes:
        num_deaths: processes that ended by themselves.

    Args:
        kind: what the process prepares, in its name and in log lines; at most 6 characters.
        on_launch: called when a new process is ready, before it gets jobs.
    """

    def __init__(
        self,
        kind: str,
        setup: PreparationSetup,
        tasks: TaskWatch,
        *,
        on_launch: Callable[[], None],
    ) -> None:
        self._kind = kind
        self._setup = setup
        self._tasks = tasks
        self._on_launch = on_launch
        self._child: _Child | None = None
        self._running: asyncio.Task[None] | None = None
        self._ids = itertools.count()
        self._jobs: dict[int, _PendingJob] = {}
        self._needed = asyncio.Event()
        self._launched: asyncio.Future[None] | None = None
        self._num_failed_launches = 0
        self.num_deaths = 0

    @property
    def pid(self) -> int | None:
        """Of the running process; None if there is none."""
        return None if self._child is None else self._child.pid

    @property
    def is_up(self) -> bool:
        """A process is ready."""
        return self._child is not None

    @property
    def is_needed(self) -> bool:
        """A job was submitted, or a launch was asked for."""
        return self._needed.is_set()

    def launch(self) -> None:
        """Launch a process now, if there is none."""
        self._needed.set()

    async def wait_ready(self) -> None:
        """Return once a process has been ready. Raises: BackfillError if the first launch failed."""
        assert self._launched is not None, "called after start"
        self.launch()
        await asyncio.shield(self._launched)

    def start(self, *, within_s: float | None = None) -> None:
        """Launch the process at the first job, or after ``within_s`` seconds where that is earlier."""
        self._launched = asyncio.get_running_loop().create_future()
        self._running = self._tasks.start(self._run(within_s), f"preparation-{self._kind}")

    async def stop(self) -> None:
        """End the process and cancel the jobs that have no result."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        if self._launched is not None:
            self._launched.cancel()
        for pending in self._jobs.values():
            pending.done.cancel()
        self._jobs.clear()
        if self._child is not None:
            self._child.close()
            self._child = None

    def send(self, message: ToPreparation) -> None:
        """Send to the process if there is one. ``on_launch`` sends the next one all it needs."""
        if self._child is not None:
            self._child.send(message)

    async def ask(self, work: Work, kind: type[Wanted]) -> Wanted:
        """Give the process a job. Raises: what the job raises; NotReady, PreparationDied."""
        if self._num_failed_launches >= _MAX_FAILED_LAUNCHES:
            raise NotReady(_NOT_READY)
        job = Job(next(self._ids), work)
        pending = _PendingJob(job, asyncio.get_running_loop().create_future())
        self._jobs[job.job_id] = pending
        self.launch()
        self._send_jobs()
        try:
            result = await pending.done
        except asyncio.CancelledError:
            self.send(CancelJob(job.job_id))
            raise
        finally:
            self._jobs.pop(job.job_id, None)
            self._send_jobs()  # others may have waited for this one, if it was a suspect
        if isinstance(result, Failure):
            raise exception_of(result)
        assert isinstance(result, kind)
        return result

    def _send_jobs(self) -> None:
        """Send the process all jobs, or one suspect at a time."""
        if self._child is None:
            return
        waiting = [each for each in self._jobs.values() if not each.done.done()]
        suspect = next((each for each in waiting if each.is_suspect), None)
        if suspect is not None:
            waiting = [] if any(each.is_sent for each in waiting) else [suspect]
        for each in waiting:
            if not each.is_sent:
                each.is_sent = True
                self.send(each.job)

    async def _launch(self) -> None:
        name = f"backfill-preparation-{self._kind}"
        child: _Child = ChildProcess(
            name, run_preparation_process, (self._setup, self._kind), FromPreparation
        )
        try:
            child.start()
            loaded = await child.receive() or Loaded("The preparation process ended.")
            assert isinstance(loaded, Loaded)
            if loaded.error is not None:
                raise BackfillError(loaded.error)
        except BaseException:
            child.close()
            raise
        self._child = child
        self._on_launch()
        for pending in self._jobs.values():
            pending.is_sent = pending.has_begun = False
        self._send_jobs()

    async def _run(self, within_s: float | None) -> None:
        """Keep a process running and dispatch its messages, until cancelled."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._needed.wait(), within_s)
        while True:
            await self._launch_until_ready()
            child = self._child
            assert child is not None
            try:
                while (message := await child.receive()) is not None:
                    self._take(message)
            except Exception:
                logger.exception("a message of a preparation process cannot be read; the process is ended")
            self._child = None
            child.close()
            self.num_deaths += 1
            logger.error(
                "the preparation process for %s %s; it is restarted", self._kind, child.how_it_ended()
            )
            self._find_suspects()

    def _take(self, message: FromPreparation) -> None:
        assert not isinstance(message, Loaded)
        pending = self._jobs.get(message.job_id)
        if pending is None or pending.done.done():
            return  # its caller was cancelled
        if isinstance(message, JobBegun):
            pending.has_begun = True
        else:
            pending.done.set_result(message.result)

    def _find_suspects(self) -> None:
        """After a death: suspect the jobs that the process worked on; one that was alone is to blame."""
        begun = [each for each in self._jobs.values() if each.has_begun and not each.done.done()]
        for pending in begun:
            if pending.is_suspect:
                message = "The server could not prepare the request: the process ended while preparing it."
                pending.done.set_exception(PreparationDied(message))
            pending.is_suspect = True

    async def _launch_until_ready(self) -> None:
        """Launch processes until one is ready."""
        name = f"the preparation process for {self._kind}"
        restarts = Restarts(name, _FIRST_RESTART_S, _LONGEST_RESTART_S)
        while True:
            try:
                await self._launch()
            except Exception as error:  # may pass, such as a lack of memory
                self._note_failed_launch(error)
                restarts.on_death(is_quick=True)
                await restarts.wait(f"it could not start ({error})")
            else:
                self._num_failed_launches = 0
                if self._launched is not None and not self._launched.done():
                    self._launched.set_result(None)
                return

    def _note_failed_launch(self, error: Exception) -> None:
        """Fail the wait for the first launch; after several failed launches, fail all jobs."""
        self._num_failed_launches += 1
        if self._launched is not None and not self._launched.done():
            self._launched.set_exception(
                error if isinstance(error, BackfillError) else BackfillError(str(error))
            )
            self._launched.exception()  # else asyncio warns if nobody waits for it
        if self._num_failed_launches >= _MAX_FAILED_LAUNCHES:
            for pending in self._jobs.values():
                if not pending.done.done():
                    pending.done.set_exception(NotReady(_NOT_READY))
