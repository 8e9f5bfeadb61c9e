"""Hosts of stages as processes of this machine: what Ray's actors are on other nodes."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from functools import partial

from backfill.core.config import EngineConfig
from backfill.core.errors import ExecutorDead
from backfill.ipc.python_process import PythonProcess
from backfill.parallel.executor import ParallelExecutor
from backfill.parallel.processes import Ranks
from backfill.parallel.rank import RankLoader, ranks_of_stage
from backfill.parallel.remote_stages import RemoteStages
from backfill.parallel.sockets import KEY_BYTES, address_of, listen
from backfill.parallel.stage_host import StageOrder, StageSockets, run_stage

HERE = "127.0.0.1"


class HostProcesses:
    """See ``StageLauncher``."""

    def __init__(self, processes: Sequence[PythonProcess]) -> None:
        self.processes = processes

    def check(self) -> None:
        for stage, process in enumerate(self.processes):
            if not process.is_alive():
                raise ExecutorDead(self.how_it_ended(stage))

    def how_it_ended(self, stage: int) -> str:
        self.processes[stage].join(60.0)
        return f"The {self.name_of(stage)} ended with {self.processes[stage].exitcode}."

    def name_of(self, stage: int) -> str:
        return f"host of stage {stage}"

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(60.0)


def run_host(stage: int, listening_fds: Sequence[int], order: StageOrder) -> None:
    """Entry point of a host. Its sockets were opened before, since others have to know their ports."""
    sockets = StageSockets([socket.socket(fileno=fd) for fd in listening_fds])
    raise SystemExit(run_stage(stage, sockets, order))


def start_hosts(launched: list[HostProcesses], config: EngineConfig, threads: int, load: RankLoader) -> Ranks:
    size, num_stages = config.tensor_parallel_size, config.pipeline_parallel_size
    listener, key = listen(HERE), secrets.token_bytes(KEY_BYTES)
    listening = [[listen(HERE) for _ in range(size if stage else 0)] for stage in range(num_stages)]
    processes = []
    for stage, sockets in enumerate(listening):
        following = tuple(map(address_of, listening[stage + 1])) if stage + 1 < num_stages else ()
        order = StageOrder(
            config,
            threads,
            load,
            address_of(listener),
            None,
            following,
            tuple(ranks_of_stage(stage, size)),
            key,
        )
        fds = [each.fileno() for each in sockets]
        process = PythonProcess(f"stage{stage}", run_host, (stage, fds, order), pass_fds=fds)
        process.start()
        processes.append(process)
        for each in sockets:
            each.close()
    launched.append(HostProcesses(processes))
    return RemoteStages(config, listener, key, launched[-1])


def executor_on_hosts(
    config: EngineConfig, load: RankLoader, failed_step_s: float = 10.0
) -> tuple[ParallelExecutor, HostProcesses]:
    launched: list[HostProcesses] = []
    executor = ParallelExecutor(config, 1, load, failed_step_s, partial(start_hosts, launched))
    return executor, launched[0]
