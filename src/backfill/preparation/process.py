"""A preparation process: work that would block the server's event loop for too long.

The server runs this program twice: for bodies of requests, and for input files of batches, whose lines are
planned here too. Lines and checks of files have threads of their own, so that neither waits for the other.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from backfill.blending.requests import OrderName
from backfill.core.errors import BackfillError
from backfill.core.heap import freeze_heap
from backfill.ipc.channel import Channel, open_channel
from backfill.ipc.log_lines import log_format
from backfill.models.config import ModelConfig
from backfill.preparation.division import Division
from backfill.preparation.line_file import LineFile
from backfill.preparation.line_pool import LinePool
from backfill.preparation.messages import (
    AnswerBody,
    Bug,
    CancelJob,
    CheckInput,
    CloseLines,
    Configure,
    EndLine,
    FromPreparation,
    IndexLines,
    InputReport,
    Job,
    JobBegun,
    JobDone,
    KVRoom,
    LineChange,
    LinesProgress,
    Loaded,
    OnlineTraffic,
    OpenLines,
    PreparationSetup,
    PrepareBody,
    Result,
    TakeLines,
    ToPreparation,
    failure_of,
)
from backfill.preparation.resources import create_pool, typical_resources
from backfill.preparation.validation import InputCheck
from backfill.protocol.preparer import RequestPreparer

logger = logging.getLogger(__name__)

# Two, so that a small body need not wait for a large one: encoding releases the interpreter's lock.
_NUM_BODY_THREADS = 2
# Where the engine computes on the same cores, each of its threads waits for the slowest. Beside two busy
# threads on two cores, 3 ms of work end after 6 ms at a niceness of 0 and of 5, and after 42 ms at 12.
_NICENESS = {"bodies": 5, "files": 12}
# A body or line takes seconds at most. One that takes longer hangs, and only ending the process stops it.
_MAX_WORK_S = 60.0
# Seconds for which a thread may keep the interpreter's lock while others wait for it, such as a check of a
# file while lines are planned, or the thread that receives jobs.
_SWITCH_INTERVAL_S = 0.0005

Args = ParamSpec("Args")
Prepared = TypeVar("Prepared")


def run_preparation_process(setup: PreparationSetup, kind: str, commands_url: str, reports_url: str) -> None:
    """Entry point of a child process. It ends when its parent ends or kills it.

    Args:
        kind: what it prepares, in its name and in log lines.
    """
    logging.basicConfig(level=setup.log_level, format=log_format(f"preparation of {kind}"))
    os.nice(_NICENESS[kind])
    # Encode a text in one thread: a pool of threads would compete with the engine's.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    with open_channel(f"backfill-{kind}", ToPreparation, commands_url, reports_url) as channel:
        try:
            preparer = setup.create_preparer(setup.load_tokenizer())
        except BackfillError as error:
            channel.send(Loaded(str(error)))
            return
        except Exception as error:
            logger.exception("the preparation process could not start")
            channel.send(Loaded(f"The tokenizer cannot be loaded: {type(error).__name__}: {error}"))
            return
        freeze_heap()
        channel.send(Loaded())
        Preparation(channel, preparer, setup.order).run()


class Preparation:
    """Receives jobs and sends their results, in the order in which they end."""

    def __init__(
        self,
        channel: Channel[ToPreparation, FromPreparation],
        preparer: RequestPreparer,
        order: OrderName,
    ) -> None:
        self._channel = channel
        self._preparer = preparer
        self._order = order
        self._prepare = self._in_time(preparer.prepare)
        self._bodies = ThreadPoolExecutor(_NUM_BODY_THREADS, "bodies")
        self._lines = ThreadPoolExecutor(1, "lines")
        self._checks = ThreadPoolExecutor(1, "checks")
        self._pool = LinePool(
            lambda learned: create_pool(
                order,
                preparer.engine_facts.info,
                preparer.engine_facts.profile,
                preparer.model.folder,
                learned,
            )
        )
        self._wanted: set[int] = set()  # jobs without a result that are not cancelled
        self._working: dict[int, float] = {}  # by thread: when it began the current body or line

    def run(self) -> None:
        """Serve until the channel is closed."""
        while (message := self._channel.receive(self._end_if_it_hangs)) is not None:
            match message:
                case Configure(facts):
                    self._preparer.facts = facts
                    self._pool.scope = facts.scheduler.prefix_cache_scope
                case CancelJob(job_id):
                    self._wanted.discard(job_id)
                case Job():
                    self._begin_job(message)
                case _:
                    self._lines.submit(self._change_lines, message)

    def _begin_job(self, job: Job) -> None:
        match job.work:
            case PrepareBody(endpoint, body, context):
                self._begin(self._bodies, job, partial(self._prepare, endpoint, body, context))
            case AnswerBody(endpoint, body):
                answer = self._in_time(self._preparer.answer)
                self._begin(self._bodies, job, partial(answer, endpoint, body))
            case IndexLines(reader_id, position, max_lines):
                self._begin(self._lines, job, partial(self._pool.index, reader_id, position, max_lines))
            case TakeLines(owner, max_lines):
                self._begin(self._lines, job, partial(self._pool.take, owner, max_lines))
            case CheckInput() as wanted:
                self._begin(self._checks, job, partial(self._check, job.job_id, wanted))

    def _change_lines(self, message: LineChange) -> None:
        """Runs in the thread of lines, which owns the pool."""
        try:
            match message:
                case OpenLines() as opened:
                    self._pool.open(opened, LineFile(opened.selection, self._prepare))
                case CloseLines(reader_id):
                    self._pool.close(reader_id)
                case EndLine(reader_id, number, num_output_tokens):
                    self._pool.end(reader_id, number, num_output_tokens)
                case LinesProgress(reader_id, num_output_tokens):
                    self._pool.note_progress(reader_id, num_output_tokens)
                case OnlineTraffic() as traffic:
                    self._pool.note_online(traffic)
                case KVRoom() as room:
                    self._pool.note_room(room)
        except BaseException:  # a panic in Rust too
            logger.exception("a %s failed", type(message).__name__)
            self._abandon_lines()

    def _abandon_lines(self) -> None:
        """End the process: what it knows of lines may be wrong. The next one indexes the files again."""
        logger.error("the state of batch lines may be wrong, so the process ends")
        os._exit(1)

    def _begin(self, pool: ThreadPoolExecutor, job: Job, work: Callable[[], Result]) -> None:
        def run() -> None:
            if job.job_id not in self._wanted:
                return
            self._channel.send(JobBegun(job.job_id))
            try:
                self._channel.send(JobDone(job.job_id, work()))
            except BaseException as error:  # a panic in Rust too: else its caller would wait for ever
                failure = failure_of(error)
                if isinstance(failure, Bug):
                    logger.exception("a %s failed", type(job.work).__name__)
                    if isinstance(job.work, IndexLines | TakeLines):
                        self._abandon_lines()
                self._channel.send(JobDone(job.job_id, failure))
            finally:
                self._wanted.discard(job.job_id)

        self._wanted.add(job.job_id)
        pool.submit(run)

    def _in_time(self, work: Callable[Args, Prepared]) -> Callable[Args, Prepared]:
        """``work``, during which the process ends if it takes too long. It must not wait for a disk."""

        def timed(*args: Args.args, **kwargs: Args.kwargs) -> Prepared:
            thread = threading.get_ident()
            self._working[thread] = time.monotonic()
            try:
                return work(*args, **kwargs)
            finally:
                del self._working[thread]

        return timed

    def _end_if_it_hangs(self) -> None:
        since_s = min(self._working.copy().values(), default=math.inf)
        if time.monotonic() - since_s > _MAX_WORK_S:
            logger.error("a body or line takes over %.0f s, so the process ends. Its stacks:", _MAX_WORK_S)
            faulthandler.dump_traceback()
            os._exit(1)

    def _check(self, job_id: int, wanted: CheckInput) -> InputReport:
        division = None
        if wanted.limits.divides:
            model = ModelConfig.from_folder(self._preparer.model.folder)
            division = Division(self._order, typical_resources(model))
        check = InputCheck(Path(wanted.path), wanted.limits, self._preparer.line_check, division)
        with closing(check):
            while job_id in self._wanted and not check.advance():
                pass
        return check.report
