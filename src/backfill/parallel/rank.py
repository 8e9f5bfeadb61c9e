"""What one rank is: its place among the others, and what it does with the plans of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from backfill.core.config import EngineConfig
from backfill.core.plan import StepOutcome, StepPlan
from backfill.core.request import RequestId
from backfill.execution.executor import ExecutorInfo
from backfill.parallel.shared_state import RankProgress, SharedState
from backfill.parallel.sockets import Address


@dataclass(frozen=True, slots=True)
class RemoteStage:
    """Where the ranks of a stage are that was started apart from the others, perhaps on another node.

    Attributes:
        node_ranks: all ranks of its node, which share the node's memory.
        driver: where the driver listens for its ranks.
        following: where those of the next stage listen, by tensor rank; none on the last stage.
        store: see ``RankContext``.
        key: secret that both ends of a connection have to know.
    """

    stage: int
    node_ranks: tuple[int, ...]
    driver: Address
    following: tuple[Address, ...]
    store: Address | None
    key: bytes


@dataclass(frozen=True, slots=True)
class RankContext:
    """Where a rank is among the others of its engine, and what it shares with them.

    Attributes:
        rank: ``stage * tensor_parallel_size + tensor_rank``.
        state: shared by all local ranks, as are ``memory_fd`` and what they are started with.
        memory_fd: an empty file in memory without a name. It ends with the ranks.
        store: where rank 0 serves the store of torch.distributed through which the ranks meet on CUDA.
        store_fd: rank 0's listening socket there; else None.
        remote: None if one process has started all ranks: they share a machine, and all are local.
        previous_fd: listening socket for its peer in the stage before, if that was started elsewhere.
        clock_ahead_s: the driver's monotonic clock less that of this node.
    """

    rank: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    state: SharedState
    memory_fd: int
    store: Address | None = None
    store_fd: int | None = None
    remote: RemoteStage | None = None
    previous_fd: int | None = None
    clock_ahead_s: float = 0.0

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
        """Those that were started together."""
        if self.remote is None:
            return range(self.num_ranks)
        return ranks_of_stage(self.stage, self.tensor_parallel_size)

    @property
    def local_rank(self) -> int:
        """Its place among ``local_ranks``."""
        return self.rank - self.local_ranks.start

    @property
    def node_ranks(self) -> Sequence[int]:
        """Those that share the machine's memory."""
        return self.local_ranks if self.remote is None else self.remote.node_ranks

    @property
    def progress(self) -> RankProgress:
        return self.state.of_rank(self.rank)


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
"""Loads one rank's part of the model in its process. A function at module level, since it is found by name.

The configuration's ``threads`` are those of this rank. Raises: BackfillError with a message for the user.
"""
