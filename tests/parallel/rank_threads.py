"""All ranks of a model as threads of one process, behind one executor."""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from backfill.core.config import SchedulerConfig
from backfill.core.plan import SampledToken, StepOutcome, StepPlan
from backfill.execution.executor import PipelinedExecutor
from backfill.execution.torch_executor import TorchExecutor
from backfill.parallel.executor import CompletedOnAll, merge_infos
from backfill.parallel.load import load_rank
from backfill.parallel.rank import RankContext, output_rank
from backfill.parallel.shared_memory import create_memory
from backfill.parallel.shared_state import SharedState
from tests.engine.interruptions import Interruptions, all_requests, undisturbed
from tests.execution.tiny import tiny_config

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Sizes:
    tensor: int = 1
    pipeline: int = 1

    def __str__(self) -> str:
        return f"tp{self.tensor}-pp{self.pipeline}"


LoadRank = Callable[[RankContext], TorchExecutor]


@dataclass
class _Done:
    outcome: StepOutcome | None
    error: Exception | None


class RankThreads(PipelinedExecutor):
    """An executor whose ranks are threads. See ``PipelinedExecutor``.

    Attributes:
        ranks: the executor of each rank.
        change: what becomes of each plan before the ranks get it.
        outcomes: of each rank, of the last step collected; None where it failed.
        errors: of each rank, of the last step collected.
    """

    def __init__(self, sizes: Sizes, load: LoadRank) -> None:
        num_ranks = sizes.tensor * sizes.pipeline
        self.state, memory_fd = SharedState(num_ranks), create_memory(0)
        self._output_rank = output_rank(sizes.tensor, sizes.pipeline)
        self._queues: list[queue.SimpleQueue[Any]] = []
        self._done: list[queue.SimpleQueue[_Done]] = []
        self._sampled: list[SampledToken] = []
        self._in_flight: deque[StepPlan] = deque()
        self._completed = CompletedOnAll(num_ranks)
        self.outcomes: list[StepOutcome | None] = []
        self.errors: list[Exception | None] = []
        self.ranks: list[TorchExecutor] = []
        self.change: Callable[[StepPlan], StepPlan] = lambda plan: plan
        self._threads: list[threading.Thread] = []
        for rank in range(num_ranks):
            self.state.of_rank(rank).set_planned()  # they are loaded one after another
        for rank in range(num_ranks):
            context = RankContext(rank, sizes.tensor, sizes.pipeline, self.state, memory_fd)
            self.ranks.append(load(context))
            self._queues.append(queue.SimpleQueue())
            self._done.append(queue.SimpleQueue())
            self._threads.append(threading.Thread(target=self._serve, args=(rank,), daemon=True))
        os.close(memory_fd)
        self.info = merge_infos([rank.info for rank in self.ranks], sizes.pipeline)
        for thread in self._threads:
            thread.start()

    def _serve(self, rank: int) -> None:
        torch.set_num_threads(1)
        while (message := self._queues[rank].get()) is not None:
            try:
                self._done[rank].put(_Done(self.ranks[rank].run(*message), None))
            except Exception as error:
                self._done[rank].put(_Done(None, error))

    def submit(self, plan: StepPlan) -> None:
        plan = self.change(plan)
        message = plan, [(each.request_id, each.token_id) for each in self._sampled]
        self._sampled = []
        self._in_flight.append(plan)
        for each in self._queues:
            each.put(message)

    def collect(self) -> StepOutcome:
        self._in_flight.popleft()
        done = [each.get(timeout=TIMEOUT_S) for each in self._done]
        self.outcomes = [each.outcome for each in done]
        self.errors = [each.error for each in done]
        for error in self.errors:
            if error is not None:
                raise error
        outcome = self.outcomes[self._output_rank]
        assert outcome is not None
        self._sampled += [each._replace(logprobs=None) for each in outcome.sampled]
        for each in self.outcomes:
            assert each is not None
            self._completed.add(each)
        return replace(outcome, completed_copies=self._completed.take()[0])

    def request_stop(self, step: int) -> None:
        self.state.stops.request(step)

    def close(self) -> None:
        for each in self._queues:
            each.put(None)
        for thread in self._threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()
        for rank in self.ranks:
            rank.close()
        self.state.close()


def load_tiny(
    model_dir: Path,
    *,
    num_blocks: int = 64,
    num_host_blocks: int = 0,
    scheduler: SchedulerConfig | None = None,
    **changes: Any,
) -> LoadRank:
    """Loads a rank of a float32 model. Its layers are wrapped in ``Interruptions``.

    Args:
        num_blocks, num_host_blocks: of 8 tokens, of the KV pools.
        changes: of the configuration.
    """
    scheduler = scheduler or SchedulerConfig(checkpointing="adaptive" if num_host_blocks else None)
    config = tiny_config(model_dir, num_blocks, num_host_blocks, scheduler=scheduler, **changes)

    def load(context: RankContext) -> TorchExecutor:
        of_rank = replace(
            config,
            tensor_parallel_size=context.tensor_parallel_size,
            pipeline_parallel_size=context.pipeline_parallel_size,
        )
        executor = load_rank(of_rank, context)
        executor._kv_pool[: executor.info.num_blocks].fill_(7.0)
        wrapped: Any = Interruptions(executor._model)
        executor._model = wrapped
        return executor

    return load


def tokens_of_one_rank(model_dir: Path) -> dict[str, list[int]]:
    """With all layers, and undisturbed: by request."""
    ranks = RankThreads(Sizes(), load_tiny(model_dir))
    try:
        return undisturbed(ranks, all_requests())
    finally:
        ranks.close()
