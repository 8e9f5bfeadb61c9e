"""Connects a rank with the others.

Between CPUs of one machine with shared memory; where stages may be on different nodes, with shared memory
within a stage and TCP between two. Between CUDA devices with torch.distributed.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from backfill.execution.collectives import RankLinks, SafepointGroup, SoleSafepointGroup, StageLink
from backfill.parallel.rank import RankContext, StagePlace
from backfill.parallel.shared_memory import map_memory
from backfill.parallel.shared_memory_group import SharedMemoryGroup
from backfill.parallel.sockets import accept, connect_to
from backfill.parallel.stage_links import RowShape, SharedMemoryLink, SocketLink
from backfill.parallel.torch_group import TorchGroup, TorchLink, create_process_group

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_STORE_TIMEOUT = timedelta(minutes=10)  # until all ranks have come: some load more than others
_PAGE_BYTES = 4096


def connect(context: RankContext, shape: RowShape, device: torch.device) -> RankLinks:
    """The group of the rank's stage, and the links to its neighbours. All ranks call this once.

    Args:
        shape: of the hidden states between two stages.
    """
    if device.type != "cpu":
        return connect_by_torch(context, shape, device)
    if context.place is not None:
        return connect_by_sockets(context, context.place, shape)
    return connect_by_memory(context, shape)


def connect_by_memory(context: RankContext, shape: RowShape) -> RankLinks:
    """Through ``context.memory_fd``, which has a part for each group, then one for each link."""
    size, stage, tensor_rank = context.tensor_parallel_size, context.stage, context.tensor_rank
    last_stage = context.pipeline_parallel_size - 1
    group_bytes = _whole_pages(SharedMemoryGroup.num_bytes(size)) if size > 1 else 0
    link_bytes = _whole_pages(SharedMemoryLink.num_bytes(shape))
    first_link = group_bytes * context.pipeline_parallel_size
    os.ftruncate(context.memory_fd, max(_PAGE_BYTES, first_link + link_bytes * last_stage * size))
    memory = map_memory(context.memory_fd)

    def link(from_stage: int) -> StageLink:
        start = first_link + link_bytes * (from_stage * size + tensor_rank)
        return SharedMemoryLink(memory[start : start + link_bytes], shape, sends=from_stage == stage)

    group: SafepointGroup = SoleSafepointGroup()
    if size > 1:
        start = group_bytes * stage
        group = SharedMemoryGroup(memory[start : start + group_bytes], tensor_rank, size)
    return RankLinks(
        group,
        previous=link(stage - 1) if stage > 0 else None,
        following=link(stage) if stage < last_stage else None,
    )


def connect_by_sockets(context: RankContext, place: StagePlace, shape: RowShape) -> RankLinks:
    """Through ``context.memory_fd``, which is the stage's, and connections between two stages.

    Blocks until the stage before has connected, and the next one has accepted.
    """
    size = context.tensor_parallel_size
    group: SafepointGroup = SoleSafepointGroup()
    if size > 1:
        os.ftruncate(context.memory_fd, _whole_pages(SharedMemoryGroup.num_bytes(size)))
        group = SharedMemoryGroup(map_memory(context.memory_fd), context.tensor_rank, size)
    # The first stage has none before it, so each in its turn is accepted.
    timeout_s = _STORE_TIMEOUT.total_seconds()
    previous = following = None
    if place.previous_fds:
        with socket.socket(fileno=place.previous_fds[context.tensor_rank]) as listener:
            accepted = accept(listener, place.key, timeout_s)
        previous = SocketLink(accepted, shape, place.clock_ahead_s, sends=False)
    if place.following:
        connection = connect_to(place.following[context.tensor_rank], place.key, timeout_s)
        following = SocketLink(connection, shape, place.clock_ahead_s, sends=True)
    return RankLinks(group, previous, following)


def connect_by_torch(context: RankContext, shape: RowShape, device: torch.device) -> RankLinks:
    """Through groups of torch.distributed. Blocks until the rank's neighbours have called this too."""
    address = None if context.place is None else context.place.store
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1" if address is None else address.host,
        context.store_port,
        context.num_ranks,
        is_master=context.rank == 0,
        timeout=_STORE_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=context.store_fd,
    )
    size, stage, tensor_rank = context.tensor_parallel_size, context.stage, context.tensor_rank

    def link(from_stage: int, store: Store) -> StageLink:
        name, end = f"link {from_stage} {tensor_rank}", int(from_stage != stage)
        headers = create_process_group(store, f"{name} headers", end, 2, torch.device("cpu"))
        rows = headers
        if device.type == "cuda":
            rows = create_process_group(store, f"{name} rows", end, 2, device)
        return TorchLink(headers, rows, shape, device)

    group: SafepointGroup = SoleSafepointGroup()
    if size > 1:
        group = TorchGroup(create_process_group(store, f"stage {stage}", tensor_rank, size, device))
    # Lower stages first: each waits for the one before it, and the first for none.
    return RankLinks(
        group,
        previous=link(stage - 1, store) if stage > 0 else None,
        following=link(stage, store) if stage < context.pipeline_parallel_size - 1 else None,
    )


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
