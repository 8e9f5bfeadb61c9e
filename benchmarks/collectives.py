"""Sums over ranks on one machine: shared memory against gloo.

    python benchmarks/collectives.py

Each rank is a process with one thread. A sum is timed on rank 0 as the median of many in a row, so ranks wait
for each other as they do in a step.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from typing import Literal, get_args

import torch

from backfill.execution.collectives import SafepointGroup
from backfill.parallel.load import connect_by_memory, connect_by_torch
from backfill.parallel.rank import RankContext
from backfill.parallel.shared_memory import create_memory
from backfill.parallel.shared_state import SharedState
from backfill.parallel.sockets import Address
from backfill.parallel.stage_links import RowShape

Kind = Literal["shared-memory", "gloo"]
_ROWS = (1, 8, 64, 256, 1024, 2048)
_HIDDEN = (576, 4096)
_SHARE_S = 0.4  # of each measurement, about
_CPU = torch.device("cpu")


def measure(
    kind: Kind, num_ranks: int, rows: tuple[int, ...], hidden_sizes: tuple[int, ...]
) -> list[dict[str, float]]:
    """``seconds`` of one sum for each ``num_rows`` and ``hidden_size``, float32.

    Raises: RuntimeError if a rank ends with an error.
    """
    memory_fd, state = create_memory(0), SharedState(num_ranks)
    with socket.create_server(("127.0.0.1", 0)) as store:
        fds, environment = [memory_fd, state.fd, store.fileno()], {**os.environ, "OMP_NUM_THREADS": "1"}
        setup = {
            "kind": kind,
            "num_ranks": num_ranks,
            "rows": rows,
            "hidden_sizes": hidden_sizes,
            "fds": fds,
            "port": store.getsockname()[1],
        }
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--as-rank", json.dumps({**setup, "rank": rank})],
                pass_fds=fds,
                stdout=subprocess.PIPE,
                env=environment,
                text=True,
            )
            for rank in range(num_ranks)
        ]
    os.close(memory_fd)
    try:
        outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"ranks ended with {[rank.returncode for rank in ranks]}")
    found: list[dict[str, float]] = json.loads(outputs[0])
    return found


def run_rank(setup: dict[str, object]) -> None:
    """Measure as one of the ranks. Rank 0 prints what it has found."""
    torch.set_num_threads(1)
    rank, size = int(str(setup["rank"])), int(str(setup["num_ranks"]))
    memory_fd, state_fd, store_fd = setup["fds"]  # type: ignore[misc]
    context = RankContext(
        rank,
        size,
        1,
        SharedState(size, state_fd),
        memory_fd,
        Address("127.0.0.1", int(str(setup["port"]))),
        store_fd if rank == 0 else None,
    )
    shape = RowShape(1, 1, torch.float32)
    links = (
        connect_by_memory(context, shape)
        if setup["kind"] == "shared-memory"
        else connect_by_torch(context, shape, _CPU)
    )
    links.group.begin_step()
    found = [
        {
            "num_rows": num_rows,
            "hidden_size": hidden,
            "seconds": seconds_of_sum(links.group, num_rows, hidden),
        }
        for hidden in setup["hidden_sizes"]  # type: ignore[attr-defined]
        for num_rows in setup["rows"]  # type: ignore[attr-defined]
    ]
    links.group.all_reduce(torch.zeros(1))
    if rank == 0:
        print(json.dumps(found))


def seconds_of_sum(group: SafepointGroup, num_rows: int, hidden_size: int) -> float:
    x = torch.zeros(num_rows, hidden_size)
    times: list[float] = []
    repeats = 20  # the same on all ranks
    for _ in range(2):
        times.clear()
        for _ in range(repeats):
            began = time.perf_counter()
            x = group.all_reduce(x)
            times.append(time.perf_counter() - began)
        seconds = group.all_reduce(torch.tensor([statistics.median(times) / group.size])).item()
        repeats = max(5, min(2000, int(_SHARE_S / seconds)))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank is not None:
        run_rank(json.loads(options.as_rank))
        return
    for num_ranks in options.ranks:
        by_kind = {kind: measure(kind, num_ranks, _ROWS, _HIDDEN) for kind in get_args(Kind)}
        for ours, theirs in zip(by_kind["shared-memory"], by_kind["gloo"], strict=True):
            shape = f"[{ours['num_rows']}, {ours['hidden_size']}]"
            ours_us, theirs_us = ours["seconds"] * 1e6, theirs["seconds"] * 1e6
            print(f"{num_ranks} ranks, {shape}: shared memory {ours_us:.0f} us, gloo {theirs_us:.0f} us")
        print(json.dumps({"benchmark": "collectives", "num_ranks": num_ranks, **by_kind}))


if __name__ == "__main__":
    main()
