"""Loads one rank's part of a model, in the rank's process, and connects it with the other ranks.

Between CPUs of one machine with shared memory; where stages may be on different nodes, with shared memory
within a stage and TCP between two. Between CUDA devices with torch.distributed.
"""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from backfill.bus.throttle import open_bus_of_rank
from backfill.core.config import EngineConfig
from backfill.execution.collectives import RankLinks, SafepointGroup, SoleSafepointGroup, StageLink
from backfill.execution.create import load_executor, target_of
from backfill.execution.executor import WARM_UP_TOKENS
from backfill.execution.layer_timing import TimedExecutor
from backfill.execution.stage import Stage
from backfill.execution.torch_executor import TorchExecutor
from backfill.models.shard import ModelShard
from backfill.parallel.rank import RankContext, RemoteStage
from backfill.parallel.shared_memory import map_memory
from backfill.parallel.shared_memory_group import SharedMemoryGroup
from backfill.parallel.sockets import accept, connect_to, receive_exactly
from backfill.parallel.stage_links import RowShape, SharedMemoryLink, SocketLink
from backfill.parallel.torch_group import TorchGroup, TorchLink, create_process_group

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_TIMEOUT = timedelta(minutes=10)  # until all ranks have come: some load more than others
_PAGE_BYTES = 4096


def load_rank(config: EngineConfig, context: RankContext) -> TorchExecutor:
    """See ``RankLoader``. Raises: ConfigError, ModelError, InsufficientMemory."""
    target = target_of(config, context.tensor_parallel_size, context.pipeline_parallel_size)
    if target.device.type == "cuda":
        target = replace(target, device=torch.device("cuda", context.local_rank))
        torch.cuda.set_device(target.device)
    else:
        assert config.threads is not None
        torch.set_num_threads(config.threads)
    plan = target.plan_rank(context.rank, context.node_ranks)
    # What one rank allocates is part of every rank's plan, and must not be taken for memory in use. So none
    # goes on before all have planned: those of this stage, and by ``connect`` those of all.
    context.state.wait_planned(context.local_ranks, context.rank)
    num_rows, model = max(config.scheduler.max_num_batched_tokens, WARM_UP_TOKENS), target.placement.config
    links = connect(context, RowShape(num_rows, model.hidden_size, target.dtype), target.device)
    shard = ModelShard(links.group, target.placement.stages[context.stage], model.num_layers)
    stage = Stage(shard, links, context.state.stops, context.progress.begin_layer)
    return load_executor(target, plan, stage, open_bus_of_rank(config))


def load_timed_rank(config: EngineConfig, context: RankContext) -> TimedExecutor:
    """See ``RankLoader``: a rank that times its layers. Raises: as ``load_rank``."""
    return TimedExecutor(load_rank(config, context))


def connect(context: RankContext, shape: RowShape, device: torch.device) -> RankLinks:
    """The group of the rank's stage, and the links to its neighbours. All ranks call this once.

    Where stages were started apart from each other it returns when all ranks have called it.

    Args:
        shape: of the hidden states between two stages.
    """
    if device.type != "cpu":
        return connect_by_torch(context, shape, device)
    if context.remote is not None:
        return connect_by_sockets(context, context.remote, shape)
    return connect_by_memory(context, shape)


def connect_by_memory(context: RankContext, shape: RowShape) -> RankLinks:
    """Through ``context.memory_fd``, which has a part for each group, then one for each link."""
    size, stage, tensor_rank = context.tensor_parallel_size, context.stage, context.tensor_rank
    last_stage, progress = context.pipeline_parallel_size - 1, context.progress
    group_bytes = _whole_pages(SharedMemoryGroup.num_bytes(size)) if size > 1 else 0
    link_bytes = _whole_pages(SharedMemoryLink.num_bytes(shape))
    first_link = group_bytes * context.pipeline_parallel_size
    os.ftruncate(context.memory_fd, max(_PAGE_BYTES, first_link + link_bytes * last_stage * size))
    memory = map_memory(context.memory_fd)

    def link(from_stage: int) -> StageLink:
        start = first_link + link_bytes * (from_stage * size + tensor_rank)
        part = memory[start : start + link_bytes]
        return SharedMemoryLink(part, shape, progress, sends=from_stage == stage)

    return RankLinks(
        _memory_group(context, memory[group_bytes * stage :]),
        previous=link(stage - 1) if stage > 0 else None,
        following=link(stage) if stage < last_stage else None,
    )


def connect_by_sockets(context: RankContext, stage: RemoteStage, shape: RowShape) -> RankLinks:
    """Through ``context.memory_fd``, which is the stage's, and connections between two stages."""
    size = context.tensor_parallel_size
    os.ftruncate(context.memory_fd, _whole_pages(SharedMemoryGroup.num_bytes(size)))
    group = _memory_group(context, map_memory(context.memory_fd))
    # The first stage has none before it, so each in its turn is accepted. Then a byte comes back.
    timeout_s, progress, ahead_s = _TIMEOUT.total_seconds(), context.progress, context.clock_ahead_s
    accepted = connected = None
    if context.previous_fd is not None:
        with socket.socket(fileno=context.previous_fd) as listener:
            accepted = accept(listener, stage.key, timeout_s)
    if stage.following:
        connected = connect_to(stage.following[context.tensor_rank], stage.key, timeout_s)
        receive_exactly(connected, 1)
    if accepted is not None:
        accepted.sendall(b"!")
    return RankLinks(
        group,
        None if accepted is None else SocketLink(accepted, shape, progress, ahead_s),
        None if connected is None else SocketLink(connected, shape, progress, ahead_s),
    )


def connect_by_torch(context: RankContext, shape: RowShape, device: torch.device) -> RankLinks:
    """Through groups of torch.distributed."""
    assert context.store is not None
    store = dist.TCPStore(  # type: ignore[attr-defined]
        context.store.host,
        context.store.port,
        context.num_ranks,
        is_master=context.rank == 0,
        timeout=_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=context.store_fd,
    )
    if store.add("ranks", 1) == context.num_ranks:
        store.set("all ranks", "have come")
    store.wait(["all ranks"])
    size, stage, tensor_rank = context.tensor_parallel_size, context.stage, context.tensor_rank

    def link(from_stage: int, store: Store) -> StageLink:
        name, end = f"link {from_stage} {tensor_rank}", int(from_stage != stage)
        headers = create_process_group(store, f"{name} headers", end, 2, torch.device("cpu"))
        rows = headers
        if device.type == "cuda":
            rows = create_process_group(store, f"{name} rows", end, 2, device)
        return TorchLink(headers, rows, shape, device, context.progress)

    group: SafepointGroup = SoleSafepointGroup()
    if size > 1:
        ranks = create_process_group(store, f"stage {stage}", tensor_rank, size, device)
        group = TorchGroup(ranks, context.progress)
    # Lower stages first: each waits for the one before it, and the first for none.
    return RankLinks(
        group,
        previous=link(stage - 1, store) if stage > 0 else None,
        following=link(stage, store) if stage < context.pipeline_parallel_size - 1 else None,
    )


def _memory_group(context: RankContext, memory: memoryview) -> SafepointGroup:
    size = context.tensor_parallel_size
    if size == 1:
        return SoleSafepointGroup()
    return SharedMemoryGroup(memory, context.tensor_rank, size, context.progress)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
