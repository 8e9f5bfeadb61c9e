"""A server whose model is on several processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from backfill.core.clock import VirtualClock
from backfill.core.config import EngineConfig, SchedulerConfig
from backfill.engine.engine import Engine
from backfill.execution.create import create_torch_executor
from tests.api.servers import MODEL, ending, launch, wait_until
from tests.builders import make_request
from tests.parallel.processes import children, wait_ended

PROMPT = list(range(100, 160))
OPTIONS = ("--dtype", "float32", "--kv-gib", "0.05", "--threads", "2", "--policy", "priority")
RANKS = ("--tensor-parallel-size", "2", "--pipeline-parallel-size", "1")


def tokens_of_one_process(model: Path) -> list[int]:
    config = EngineConfig(model_dir=str(model), dtype="float32", kv_gib=0.05, device="cpu", threads=1)
    engine = Engine(SchedulerConfig(), create_torch_executor(config), VirtualClock())
    request = make_request(max_tokens=16, prompt_token_ids=PROMPT, ignore_eos=True)
    engine.add(request)
    while engine.has_unfinished:
        engine.step()
    return request.output_token_ids


@pytest.mark.slow  # long; deaths of ranks, without HTTP: tests/parallel/test_engine.py
def test_a_server_on_two_processes_answers_as_one_and_survives_the_death_of_a_rank(
    small_model: Path, tmp_path: Path
) -> None:
    expected = tokens_of_one_process(small_model)
    options = (*OPTIONS, *RANKS, "--served-model-name", MODEL)
    with ending(launch(str(small_model), *options, data_dir=tmp_path)) as server:
        server.wait_ready()
        assert server.tokens(PROMPT, max_tokens=16) == expected

        ranks = children(server.engine_pid())
        os.kill(ranks[1], signal.SIGKILL)
        wait_ended(ranks)  # an idle engine notices it too
        server.logged("The process of rank 1 of 2 was killed by signal 9")
        wait_until(lambda: server.http.get("/health").status_code == 503, "the engine to be missed")
        server.wait_ready()
        assert server.tokens(PROMPT, max_tokens=16) == expected
        left = [server.engine_pid(), *children(server.engine_pid())]
    wait_ended(left)
