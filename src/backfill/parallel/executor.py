"""The executor of a model on several processes: sends each plan to all ranks, and merges what they report."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from operator import add
from typing import NamedTuple

from backfill.core.block import BlockCopy, BlockMove, SlotCopy
from backfill.core.config import EngineConfig
from backfill.core.errors import BackfillError
from backfill.core.plan import Compute, StepOutcome, StepPlan, WeightTransfers
from backfill.core.request import RequestId
from backfill.execution.executor import ExecutorInfo, PipelinedExecutor
from backfill.offloading.residency import common_residencies
from backfill.parallel.messages import (
    Loaded,
    LoadFailed,
    Report,
    StepDone,
    StepRaised,
    outcome_of,
    sampled_of,
)
from backfill.parallel.plan_codec import PlanEncoder, Sampled
from backfill.parallel.rank import RankLoader, output_rank
from backfill.parallel.ranks import LocalRanks, RankStarter
from backfill.parallel.stall import StallWatch, describe_positions, stall_limit_s, unwatched_s
from backfill.parallel.worker import name_of

logger = logging.getLogger(__name__)

# After one rank has failed in a step, for the others: they may wait for it in a collective, without end.
_FAILED_STEP_S = 10.0
_LOOK_S = 0.25
_FILL_BYTES = 1 << 30
_LOADS_APART_S = 600.0
_LOG_LOADING_S = 30.0


class _InFlight(NamedTuple):
    """A step that is submitted and not collected. ``sampling_ids``: requests whose slices sample."""

    step: int
    predicted_s: float
    sampling_ids: tuple[RequestId, ...]


class RankFailed(Exception):
    """A step raised an exception on a rank, and all ranks are ready for the next one."""


class ParallelExecutor(PipelinedExecutor):
    """See ``PipelinedExecutor``. The tensors are in the ranks' processes.

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
        start: RankStarter = LocalRanks,
    ) -> None:
        try:
            self._ranks = start(replace(config, threads=threads), name_of(load))
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
        self._hang_timeout_s = config.engine_hang_timeout
        self._unwatched_s = unwatched_s(config.engine_hang_timeout)
        self._encoder = PlanEncoder()
        self._completed = CompletedOnAll(config.num_ranks)
        self._size = config.tensor_parallel_size
        self._transfers: list[tuple[int, WeightTransfers]] = []  # with their stage, since the last outcome
        self._in_flight: deque[_InFlight] = deque()
        self._unwatched_until_s = 0.0  # the oldest of these
        self._sampled = Sampled()  # in steps collected since the last plan

    def _wait_loaded(self) -> list[ExecutorInfo]:
        """Raises: BackfillError if a rank cannot be loaded, or long after another one still is not."""
        ranks = self._ranks
        infos: dict[int, ExecutorInfo] = {}
        first_at_s, log_at_s = math.inf, time.monotonic() + _LOG_LOADING_S
        while len(infos) < len(ranks.reports):
            ranks.receive(1.0)
            now_s = time.monotonic()
            missing = ", ".join(str(rank) for rank in range(len(ranks.reports)) if rank not in infos)
            if now_s > first_at_s + _LOADS_APART_S:
                raise BackfillError(
                    f"Another rank was loaded {_LOADS_APART_S:g} s ago, and these are not yet: {missing}."
                )
            if now_s > log_at_s:
                logger.info("ranks that still load: %s", missing)
                log_at_s = now_s + _LOG_LOADING_S
            for rank, reports in enumerate(ranks.reports):
                if not reports:
                    continue
                report = reports.popleft()
                if isinstance(report, LoadFailed):
                    raise BackfillError(ranks.where(rank) + report.message)
                assert isinstance(report, Loaded)
                infos[rank] = report.info
                first_at_s = min(first_at_s, now_s)
        return [infos[rank] for rank in sorted(infos)]

    @property
    def pids(self) -> list[int | None]:
        """Of the ranks' processes."""
        return self._ranks.pids

    def submit(self, plan: StepPlan) -> None:
        self._ranks.send(self._encoder.encode(plan, self._sampled))
        self._sampled = Sampled()
        # From here on the ranks work.
        if not self._in_flight:
            self._unwatched_until_s = time.monotonic() + self._unwatched_s
        self._in_flight.append(_InFlight(plan.step, plan.predicted_s, _sampling_ids(plan)))

    def collect(self) -> StepOutcome:
        oldest = self._in_flight[0]
        self._wait_for_reports(oldest)
        self._in_flight.popleft()
        self._unwatched_until_s = time.monotonic() + self._unwatched_s
        reports = [each.popleft() for each in self._ranks.reports]
        assert all(
            isinstance(each, StepDone | StepRaised) and each.step == oldest.step for each in reports
        ), f"step {oldest.step} is collected, and ranks report {reports}"
        failed = _failures(reports)
        done = [each for each in reports if isinstance(each, StepDone)]
        has_others = False
        for rank, each in enumerate(reports):
            if isinstance(each, StepDone) and each.others is not None:
                has_others = True
                self._completed.add(each.others)
                if each.others.weight_transfers.interval is not None:
                    self._transfers.append((rank // self._size, each.others.weight_transfers))
        if failed:
            self._transfers = [(stage, each.without_times) for stage, each in self._transfers]
            raise RankFailed("; ".join(failed))
        report = done[self._output_rank]
        sampled = sampled_of(report, oldest.sampling_ids)
        outcome = outcome_of(report, sampled)
        if outcome.forced:
            request_ids, token_ids = zip(*outcome.tokens, strict=True)
            sampled = Sampled(request_ids, token_ids)
        self._sampled = Sampled(*map(add, self._sampled, sampled))
        # A step that failed may have left some.
        has_more = has_others or self._completed.has_some or self._transfers
        return self._with_all_ranks(outcome) if has_more else outcome

    def _with_all_ranks(self, outcome: StepOutcome) -> StepOutcome:
        """The output rank's outcome, with what all ranks have completed and transferred."""
        copies, slot_copies = self._completed.take()
        transfers, self._transfers = merge_transfers(self._transfers), []
        return replace(
            outcome,
            completed_copies=copies,
            completed_slot_copies=slot_copies,
            weight_transfers=transfers,
        )

    def wait(self) -> bool:
        ranks = self._ranks
        # However many wake it: a step that is done is collected, and ``collect`` looks after ranks that hang.
        while not all(ranks.reports):
            left_s = self._unwatched_until_s - time.monotonic()
            if left_s <= 0.0 or _failures([each[0] if each else None for each in ranks.reports]):
                break
            if ranks.was_woken:
                ranks.was_woken = False
                return False
            ranks.receive(left_s)
        return True

    def wake(self) -> None:
        self._ranks.wake()

    def request_stop(self, step: int) -> None:
        self._ranks.stop(step)

    def fill_kv_pool(self, num_blocks: int) -> None:
        """Write to the first blocks of the pool, so that their pages are mapped."""
        at_once = max(1, _FILL_BYTES // self.info.block_bytes)  # so that no step takes minutes
        for first in range(0, num_blocks, at_once):
            targets = range(first, min(first + at_once, num_blocks))
            moves = tuple(BlockMove(0, target) for target in targets)
            self.run(StepPlan(step=0, work=Compute(slices=()), moves=moves))

    def check(self) -> None:
        """See ``Executor``: also if a rank has ended while no step is in flight."""
        self._ranks.check()

    def close(self) -> None:
        """End all ranks. May be called again."""
        self._ranks.close()

    def _wait_for_reports(self, oldest: _InFlight) -> None:
        """Until all ranks have reported the oldest step in flight. Raises: ExecutorDead."""
        ranks, reports = self._ranks, self._ranks.reports
        now_s = time.monotonic()
        watch, look_at_s = StallWatch(now_s), now_s + _LOOK_S
        while not all(reports):
            ranks.receive(max(0.0, look_at_s - now_s))
            now_s = time.monotonic()
            if now_s >= look_at_s:
                look_at_s = now_s + _LOOK_S
                self._check_progress(oldest, watch, now_s)

    def _check_progress(self, step: _InFlight, watch: StallWatch, now_s: float) -> None:
        """Raises: ExecutorDead if no rank has got on for too long."""
        ranks, state = self._ranks, self._ranks.state
        waiting = [rank for rank, each in enumerate(ranks.reports) if not each]
        failed = _failures([each[0] if each else None for each in ranks.reports])
        limit_s = stall_limit_s(self._hang_timeout_s, step.predicted_s)
        if failed:
            limit_s = min(limit_s, self._failed_step_s)
        watch.look((waiting, state.snapshot()), now_s)
        if watch.still_s < limit_s or not waiting:
            return
        positions = describe_positions(step.step, waiting, state.positions())
        if failed:
            message = f"Step {step.step} failed ({failed[0]}), and others did not come out of it within"
        else:
            message = f"Step {step.step} has stood still for"
        ranks.fail(f"{message} {limit_s:g} s: {positions}.")


def _sampling_ids(plan: StepPlan) -> tuple[RequestId, ...]:
    return tuple(each.request_id for each in plan.slices if each.samples)


def _failures(reports: Sequence[Report | None]) -> list[str]:
    """Of the ranks that have reported one; reports are by rank."""
    return [
        f"{each.message} on rank {rank}" for rank, each in enumerate(reports) if isinstance(each, StepRaised)
    ]


def merge_infos(infos: Sequence[ExecutorInfo], num_stages: int) -> ExecutorInfo:
    """Of all ranks together: a block exists where all ranks have memory for their part of it."""
    num_blocks = min(info.num_blocks for info in infos)
    return replace(
        infos[0],
        num_blocks=num_blocks,
        num_host_blocks=min(info.num_host_blocks for info in infos),
        max_model_len=min(info.max_model_len for info in infos),
        block_bytes=sum(info.block_bytes for info in infos),
        residencies=common_residencies([info.residencies for info in infos]),
        max_steps_in_flight=num_stages,
    )


def merge_transfers(transfers: Sequence[tuple[int, WeightTransfers]]) -> WeightTransfers:
    """Of all ranks in a step: each transfers its shard of its layers, while the others transfer theirs.

    Ranks of a stage wait beside each other. A step waits in one stage after another.

    Args:
        transfers: of each rank, by rank, with its stage; behind those of steps that have failed.
    """
    if not transfers:
        return WeightTransfers()
    stalls_s: dict[int, float] = {}
    for stage, each in transfers:
        stalls_s[stage] = max(each.stall_s, stalls_s.get(stage, 0.0))
    reported = [each for _, each in transfers]
    return WeightTransfers(
        reported[-1].interval,
        num_bytes=sum(each.num_bytes for each in reported),
        stall_s=sum(stalls_s.values()),
        transfer_s=max(each.transfer_s for each in reported),
        copied_bytes=sum(each.copied_bytes for each in reported),
        bus_wait_s=max(each.bus_wait_s for each in reported),
        timings=tuple(timing for each in reported for timing in each.timings),
        other_stalls_s=sum(stalls_s.values()) - max(stalls_s.values()),
    )


class CompletedOnAll:
    """Copies that all ranks have completed. Each rank copies its part of a block, at its own pace."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._counts: Counter[BlockCopy | SlotCopy] = Counter()
        self._completed: list[BlockCopy | SlotCopy] = []

    def add(self, outcome: StepOutcome) -> None:
        """Of one rank."""
        copies: tuple[BlockCopy | SlotCopy, ...] = (*outcome.completed_copies, *outcome.completed_slot_copies)
        for copy in copies:
            self._counts[copy] += 1
            if self._counts[copy] == self._num_ranks:
                del self._counts[copy]
                self._completed.append(copy)

    @property
    def has_some(self) -> bool:
        """``take`` has something to return."""
        return bool(self._completed)

    def take(self) -> tuple[tuple[BlockCopy, ...], tuple[SlotCopy, ...]]:
        """Those since the last call."""
        taken, self._completed = self._completed, []
        blocks = tuple(each for each in taken if isinstance(each, BlockCopy))
        return blocks, tuple(each for each in taken if isinstance(each, SlotCopy))
