"""A rank's process: loads its part of the model, then runs the plans that the driver writes."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import select
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass

from backfill.core.config import EngineConfig
from backfill.core.errors import BackfillError
from backfill.core.heap import freeze_heap
from backfill.ipc.log_lines import log_format
from backfill.parallel.frames import encode_frame
from backfill.parallel.messages import FromRank, Loaded, LoadFailed, StepRaised, step_done
from backfill.parallel.plan_codec import PlanDecoder
from backfill.parallel.rank import RankContext, RankExecutor, RankLoader
from backfill.parallel.ring import RingClosed, RingReader

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """What a rank's process is started with. File descriptors are inherited.

    Attributes:
        ring_fd: memory of the ring with plans.
        socket_fd: reports go to the driver, which sends nothing; it closes when the driver ends.
    """

    config: EngineConfig
    context: RankContext
    load: RankLoader
    ring_fd: int
    socket_fd: int
    log_level: int


def run_worker(setup: WorkerSetup) -> None:
    """Entry point of the process. Ends with the driver, or when the driver closes the socket."""
    context = setup.context
    logging.basicConfig(level=setup.log_level, format=log_format(f"rank {context.rank}"))
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # writes stacks, also of a rank that hangs
    if sys.platform.startswith("linux"):
        set_name = 15
        ctypes.CDLL(None).prctl(set_name, f"backfill-rank{context.rank}".encode(), 0, 0, 0)
    # The driver has ended, or no longer wants this rank.
    with socket.socket(fileno=setup.socket_fd) as link, suppress(RingClosed, OSError):
        executor = _load(setup, link)
        if executor is not None:
            num_ranks, rank = len(context.local_ranks), context.local_rank
            ring = RingReader(setup.ring_fd, num_ranks, rank, lambda: _check_open(link))
            _run_plans(executor, ring, link, context)


def _load(setup: WorkerSetup, link: socket.socket) -> RankExecutor | None:
    message: FromRank
    try:
        executor = setup.load(setup.config, setup.context)
    except BackfillError as error:
        message = LoadFailed(str(error))
    except Exception as error:
        logger.exception("the rank could not start")
        message = LoadFailed(f"Rank {setup.context.rank} could not start: {type(error).__name__}: {error}")
    else:
        freeze_heap()
        link.sendall(encode_frame(Loaded(executor.info)))
        return executor
    link.sendall(encode_frame(message))
    return None


def _check_open(link: socket.socket) -> None:
    """Raises: RingClosed if the driver has closed its end. It sends nothing."""
    links = select.poll()
    links.register(link, select.POLLIN)
    if links.poll(0):
        raise RingClosed


def _run_plans(executor: RankExecutor, ring: RingReader, link: socket.socket, context: RankContext) -> None:
    decoder = PlanDecoder()
    progress = None if context.progress is None else context.progress.of_rank(context.rank)
    while True:
        plan, sampled = decoder.decode(ring.read())
        if progress is not None:
            progress.begin_step(plan.step)
        report: FromRank
        try:
            report = step_done(plan.step, executor.run(plan, sampled))
        except Exception as error:
            logger.exception("step %d failed", plan.step)
            report = StepRaised(plan.step, f"{type(error).__name__}: {error}")
        link.sendall(encode_frame(report))
        del plan, sampled  # it takes a while, for which nobody waits now
