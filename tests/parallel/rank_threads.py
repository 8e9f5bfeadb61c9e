"""All ranks of a model as threads of one process, behind one executor."""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from backfill.core.block import KVLayout
from backfill.core.plan import SampledToken, StepOutcome, StepPlan
from backfill.execution.collectives import RankLinks
from backfill.execution.copies import create_copier
from backfill.execution.executor import ExecutorInfo, PipelinedExecutor
from backfill.execution.micro_batches import MicroBatchStreams
from backfill.execution.offloading import create_streamer
from backfill.execution.stage import Stage
from backfill.execution.torch_executor import TorchExecutor
from backfill.kernels import create_kernels
from backfill.models.build import build_model
from backfill.models.config import ModelConfig
from backfill.models.placement import ModelPlacement
from backfill.models.shard import ModelShard
from backfill.models.weights import Checkpoint
from backfill.parallel.executor import CompletedOnAll, merge_infos
from backfill.parallel.load import connect_by_memory
from backfill.parallel.rank import RankContext, output_rank
from backfill.parallel.shared_memory import create_memory
from backfill.parallel.shared_state import SharedState
from backfill.parallel.stage_links import RowShape
from tests.engine.interruptions import Interruptions

CPU = torch.device("cpu")
MAX_ROWS = 512
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
    """An executor whose ranks are threads. See ``PipelinedExecutor`` and ``StoppableExecutor``.

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
        stages = [rank._stage.layers for rank in self.ranks[:: sizes.tensor]]
        self.info = replace(
            merge_infos([rank.info for rank in self.ranks], sizes.pipeline),
            stage_layers=tuple(map(len, stages)) if sizes.pipeline > 1 else (),
        )
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

    def run(self, plan: StepPlan) -> StepOutcome:
        self.submit(plan)
        return self.collect()

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
    sizes: Sizes,
    *,
    num_blocks: int = 64,
    block_size: int = 8,
    num_host_blocks: int = 0,
    stages: Sequence[range] | None = None,
    interval: int | None = None,
    num_micro_batches: int = 1,
    connect: Callable[[RankContext, RowShape], RankLinks] = connect_by_memory,
) -> LoadRank:
    """Loads a rank of a float32 model. Its layers are wrapped in ``Interruptions``.

    Args:
        interval: of offloaded layers; None: all are resident.
    """
    config = ModelConfig.from_folder(str(model_dir))
    placement = ModelPlacement.of(config, sizes.tensor, sizes.pipeline)
    layers_of = tuple(stages) if stages is not None else placement.stages

    def load(context: RankContext) -> TorchExecutor:
        links = connect(context, RowShape(MAX_ROWS, config.hidden_size, torch.float32))
        shard = ModelShard(links.group, layers_of[context.stage], config.num_layers)
        checkpoint = Checkpoint.open(str(model_dir), dtype=torch.float32, load_format="auto", seed=0)
        streams = MicroBatchStreams(CPU, num_micro_batches)
        model = build_model(
            config,
            checkpoint,
            create_kernels(CPU),
            max_positions=128,
            device=CPU,
            shard=shard,
            has_layers=interval is None,
        )
        streamer = None
        if interval is not None:
            streamer = create_streamer(
                model, checkpoint, name="tiny", interval=interval, device=CPU, streams=streams
            )
        layout = KVLayout(
            num_layers=len(shard.layers),
            num_kv_heads=shard.sizes(config).kv_heads.length,
            head_dim=config.head_dim,
            block_size=block_size,
            dtype_bytes=4,
        )
        info = ExecutorInfo(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=128,
            vocab_size=config.vocab_size,
            end_token_ids=(2,),
            device="cpu",
            dtype="float32",
            num_layers=config.num_layers,
            can_stop=True,
            num_host_blocks=num_host_blocks,
            block_bytes=layout.block_bytes,
        )
        kv_pool = torch.full(layout.shape(num_blocks), 7.0)
        copier = create_copier(kv_pool, num_host_blocks) if num_host_blocks else None
        wrapped: Any = Interruptions(model)
        stage = Stage(shard, links, context.state.stops)
        return TorchExecutor(wrapped, kv_pool, info, streams, copier, streamer, stage=stage)

    return load
