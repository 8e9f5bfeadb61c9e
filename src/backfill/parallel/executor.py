"""The executor of a model on several processes: sends each plan to all ranks, and merges what they report."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from backfill.core.block import BlockMove
from backfill.core.config import EngineConfig
from backfill.core.errors import BackfillError
from backfill.core.plan import Compute, SampledToken, StepOutcome, StepPlan
from backfill.core.request import RequestId
from backfill.execution.executor import ExecutorInfo
from backfill.parallel.merge import CompletedOnAll, merge_infos
from backfill.parallel.messages import (
    FromRank,
    Loaded,
    LoadFailed,
    StepDone,
    StepRaised,
    outcome_of,
    sampling_ids,
)
from backfill.parallel.plan_codec import PlanEncoder
from backfill.parallel.processes import RankProcesses, RankStarter
from backfill.parallel.rank import RankLoader, output_rank

# After one rank has failed in a step, for the others: they may wait for it in a collective, without end.
_FAILED_STEP_S = 10.0


class RankFailed(Exception):
    """A step raised an exception on a rank, and all ranks are ready for the next one."""


class ParallelExecutor:
    """See ``StoppableExecutor`` and ``PipelinedExecutor``. The tensors are in the ranks' processes.

    A step that fails on one rank has failed on all. If every rank comes out of it, the engine goes on, and
    what the others sampled is dropped. If one does not, or if a process ends, all are ended and every call
    raises ExecutorDead.

    Args:
        threads: of each rank.
        start: starts the ranks: processes of this machine by default.
    Raises: BackfillError with a message for the user if a rank cannot be loaded; none is left running.
    """

    def __init__(
        self,
        config: EngineConfig,
        threads: int,
        load: RankLoader,
        failed_step_s: float = _FAILED_STEP_S,
        start: RankStarter = RankProcesses,
    ) -> None:
        try:
            self._ranks = start(config, threads, load)
        except OSError as error:
            raise BackfillError(
                f"The processes of the ranks cannot be started: {error.strerror or error}."
            ) from error
        try:
            self.info = merge_infos(self._wait_loaded(), config.pipeline_parallel_size)
        except BaseException:
            self._ranks.close()
            raise
        self._output_rank = output_rank(config.tensor_parallel_size, config.pipeline_parallel_size)
        self._failed_step_s = failed_step_s
        self._encoder = PlanEncoder()
        self._completed = CompletedOnAll(config.num_ranks)
        self._in_flight: deque[tuple[int, list[RequestId]]] = deque()  # steps, and the requests that sample
        self._sampled: list[SampledToken] = []  # of steps collected since the last plan

    def _wait_loaded(self) -> list[ExecutorInfo]:
        ranks = self._ranks
        infos: dict[int, ExecutorInfo] = {}
        while len(infos) < len(ranks.reports):
            ranks.receive(None)
            for rank, reports in enumerate(ranks.reports):
                if not reports:
                    continue
                report = reports.popleft()
                if isinstance(report, LoadFailed):
                    raise BackfillError(report.message)
                assert isinstance(report, Loaded)
                infos[rank] = report.info
        return [infos[rank] for rank in sorted(infos)]

    @property
    def pids(self) -> list[int | None]:
        """Of the ranks' processes."""
        return self._ranks.pids

    def submit(self, plan: StepPlan) -> None:
        self._ranks.send(self._encoder.encode(plan, self._sampled))
        self._sampled = []
        self._in_flight.append((plan.step, sampling_ids(plan)))

    def collect(self) -> StepOutcome:
        step, sampling = self._in_flight[0]
        self._wait_for_reports(step)
        self._in_flight.popleft()
        reports = [each.popleft() for each in self._ranks.reports]
        failed = [
            f"{each.message} on rank {rank}"
            for rank, each in enumerate(reports)
            if isinstance(each, StepRaised)
        ]
        done = [each for each in reports if isinstance(each, StepDone)]
        for each in done:
            if each.others is not None:
                self._completed.add(each.others)
        if failed:
            raise RankFailed("; ".join(failed))
        outcome = outcome_of(done[self._output_rank], sampling)
        self._sampled += outcome.sampled
        copies, slot_copies = self._completed.take()
        if copies == outcome.completed_copies and slot_copies == outcome.completed_slot_copies:
            return outcome
        return replace(outcome, completed_copies=copies, completed_slot_copies=slot_copies)

    def run(self, plan: StepPlan) -> StepOutcome:
        self.submit(plan)
        return self.collect()

    def request_stop(self, step: int) -> None:
        self._ranks.stop.request(step)

    def fill_kv_pool(self, num_blocks: int) -> None:
        """Write to the first blocks of the pool, so that their pages are mapped."""
        moves = tuple(BlockMove(0, target) for target in range(num_blocks))
        self.run(StepPlan(step=0, work=Compute(slices=()), moves=moves))

    def check(self) -> None:
        """Raises: ExecutorDead if a rank has ended, also while no step is in flight."""
        self._ranks.check()

    def close(self) -> None:
        """End all ranks. May be called again."""
        self._ranks.close()

    def _wait_for_reports(self, step: int) -> None:
        """Until all ranks have reported the oldest step in flight. Raises: ExecutorDead."""
        reports = self._ranks.reports
        give_up_at_s: float | None = None
        while not all(reports):
            timeout_s = None if give_up_at_s is None else max(0.0, give_up_at_s - time.monotonic())
            self._ranks.receive(timeout_s)
            failed = _failures([each[0] if each else None for each in reports])
            if not failed:
                continue
            if give_up_at_s is None:
                give_up_at_s = time.monotonic() + self._failed_step_s
            elif timeout_s == 0:
                waiting = ", ".join(str(rank) for rank, each in enumerate(reports) if not each)
                self._ranks.fail(
                    f"Step {step} failed ({failed[0]}), and within {self._failed_step_s:g} s these ranks did "
                    f"not come out of it: {waiting}."
                )


def _failures(reports: Sequence[FromRank | None]) -> list[str]:
    """Of the ranks that have reported one; reports are by rank."""
    return [
        f"{each.message} on rank {rank}" for rank, each in enumerate(reports) if isinstance(each, StepRaised)
    ]
