"""What one rank is to the process that runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from backfill.core.config import EngineConfig
from backfill.core.plan import StepOutcome, StepPlan
from backfill.core.request import RequestId
from backfill.execution.executor import ExecutorInfo
from backfill.parallel.progress import Progress
from backfill.parallel.shared_memory import Barrier, StopWords
from backfill.parallel.sockets import Address


@dataclass(frozen=True, slots=True)
class StagePlace:
    """Where the ranks of a stage are that was started apart from the others, perhaps on another node.

    Attributes:
        node_ranks: all ranks of its node, which share the node's memory.
        store: where rank 0 serves the store of torch.distributed; None on CPU.
        following: where the next stage listens, by tensor rank; none on the last.
        key: secret that both ends of a connection have to know.
        store_fd: rank 0's listening socket at ``store``; None on other stages.
        previous_fds: listening sockets for the stage before, by tensor rank; none on the first stage.
        clock_ahead_s: the driver's monotonic clock less that of this node.
    """

    stage: int
    node_ranks: tuple[int, ...]
    store: Address | None
    following: tuple[Address, ...]
    key: bytes
    store_fd: int | None = None
    previous_fds: tuple[int, ...] = ()
    clock_ahead_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RankContext:
    """Where a rank is among the others of its engine, and what it shares with them.

    Attributes:
        rank: ``stage * tensor_parallel_size + tensor_rank``.
        stop: says whether a step is to be stopped.
        store_port: TCP port where rank 0 serves the store through which the ranks meet, on 127.0.0.1
            without ``place``.
        store_fd: rank 0's listening socket on that port, for ``torch.distributed.TCPStore``; else None.
        memory_fd: an empty file in memory without a name, the same for all local ranks. It ends with them.
        barrier: where ranks that load at the same time wait for each other, once; None if they do not.
        place: None if one process has started all ranks: they share a machine, and all are local.
        progress: where each rank shows how far it is; None if nobody looks.
    """

    rank: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    stop: StopWords
    store_port: int
    store_fd: int | None
    memory_fd: int
    barrier: Barrier | None = None
    place: StagePlace | None = None
    progress: Progress | None = None

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor_parallel_size

    @property
    def stage(self) -> int:
        return self.rank // self.tensor_parallel_size

    @property
    def local_ranks(self) -> range:
        """Those that were started together: they share a ring, ``stop`` and ``memory_fd``."""
        if self.place is None:
            return range(self.num_ranks)
        return ranks_of_stage(self.stage, self.tensor_parallel_size)

    @property
    def local_rank(self) -> int:
        """Its place among ``local_ranks``."""
        return self.rank - self.local_ranks.start

    @property
    def node_ranks(self) -> Sequence[int]:
        """Those that share the machine's memory."""
        return self.local_ranks if self.place is None else self.place.node_ranks


def ranks_of_stage(stage: int, tensor_parallel_size: int) -> range:
    return range(stage * tensor_parallel_size, (stage + 1) * tensor_parallel_size)


def output_rank(tensor_parallel_size: int, pipeline_parallel_size: int) -> int:
    """The rank that samples: the first one of the last stage."""
    return tensor_parallel_size * (pipeline_parallel_size - 1)


class RankExecutor(Protocol):
    """Executes the plans of all ranks on one rank.

    Attributes:
        info: of this rank. Its blocks are those that its memory holds, and ``block_bytes`` is its part of a
            block; the rest is the same on all ranks.
    """

    info: ExecutorInfo

    def run(self, plan: StepPlan, sampled: Sequence[tuple[RequestId, int]]) -> StepOutcome:
        """Run this rank's part of a plan.

        All ranks get all plans in the same order. The contract of ``Executor.run`` holds for each of them.

        Args:
            sampled: requests and their tokens of the steps that the driver has collected since the previous
                plan. They are appended before anything else is done; those of unknown requests are ignored.
                No rank appends a token that it has sampled itself.
        Returns: what this rank knows. The output rank (``output_rank``) knows the tokens and which slices
            were stopped; others may leave that empty. Each rank reports its own completed copies.
        Raises: any error, for a step that failed on this rank. The driver then waits until all other ranks
            have returned or raised too. If they do, the ranks must be able to run another plan together:
            what the failed step left in a collective is dropped.
        """


RankLoader = Callable[[EngineConfig, RankContext], RankExecutor]
"""Loads one rank's part of the model in its process. A function at module level, since it is pickled by name.

The configuration's ``threads`` are those of this rank. Raises: BackfillError with a message for the user.
"""
