"""Hosts of stages as processes of this machine: what Ray's actors are on other nodes."""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
from collections.abc import Sequence
from functools import partial
from typing import IO

from backfill.core.config import EngineConfig
from backfill.core.errors import ExecutorDead
from backfill.ipc.python_process import PythonProcess
from backfill.parallel.executor import ParallelExecutor
from backfill.parallel.rank import RankLoader, RemoteStage, ranks_of_stage
from backfill.parallel.ranks import Ranks
from backfill.parallel.remote_ranks import RemoteRanks, StageListeners, run_stage
from backfill.parallel.sockets import KEY_BYTES, address_of, listen

HERE = "127.0.0.1"


class HostProcesses:
    """See ``StageLauncher``."""

    def __init__(self, processes: Sequence[PythonProcess], reasons: Sequence[IO[bytes]]) -> None:
        self.processes = processes
        self._reasons = reasons

    def check(self) -> None:
        for stage, process in enumerate(self.processes):
            if not process.is_alive():
                raise ExecutorDead(self.how_it_ended(stage))

    def how_it_ended(self, stage: int) -> str:
        self.processes[stage].join(60.0)
        self._reasons[stage].seek(0)
        reason = self._reasons[stage].read().decode() or self.processes[stage].exitcode
        return f"The {self.name_of(stage)} ended: {reason}"

    def name_of(self, stage: int) -> str:
        return f"host of stage {stage}"

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(60.0)
        for reason in self._reasons:
            reason.close()


def run_host(
    listening_fds: Sequence[int], reason_fd: int, config: EngineConfig, load: str, stage: RemoteStage
) -> None:
    """Entry point of a host. Its sockets were opened before, since others have to know their ports."""
    listeners = StageListeners(tuple(socket.socket(fileno=fd) for fd in listening_fds))
    os.write(reason_fd, run_stage(listeners, config, load, stage).encode())


def start_hosts(launched: list[HostProcesses], config: EngineConfig, load: str) -> Ranks:
    size, num_stages = config.tensor_parallel_size, config.pipeline_parallel_size
    listener, key = listen(HERE), secrets.token_bytes(KEY_BYTES)
    listeners = [StageListeners.open(HERE, stage, size, serves_store=False) for stage in range(num_stages)]
    processes, reasons = [], []
    for stage, mine in enumerate(listeners):
        following = map(address_of, listeners[stage + 1].links) if stage + 1 < num_stages else ()
        ranks = tuple(ranks_of_stage(stage, size))
        remote = RemoteStage(stage, ranks, address_of(listener), tuple(following), None, key)
        fds = [each.fileno() for each in mine.links]
        reason = tempfile.TemporaryFile()  # noqa: SIM115
        process = PythonProcess(
            f"stage{stage}",
            run_host,
            (fds, reason.fileno(), config, load, remote),
            pass_fds=(*fds, reason.fileno()),
        )
        process.start()
        processes.append(process)
        reasons.append(reason)
    for mine in listeners:
        mine.close()
    launched.append(HostProcesses(processes, reasons))
    with listener:
        return RemoteRanks(config, listener, key, launched[-1])


def executor_on_hosts(
    config: EngineConfig, load: RankLoader, failed_step_s: float = 10.0
) -> tuple[ParallelExecutor, HostProcesses]:
    launched: list[HostProcesses] = []
    executor = ParallelExecutor(config, 1, load, failed_step_s, partial(start_hosts, launched))
    return executor, launched[0]
