"""``kill -9`` during a batch: no line is lost, none is answered twice.

A few kills of each kind; ``benchmarks/soak.py`` runs for hours.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.api.batch_inputs import as_jsonl, check_accounts, completion_line, submit, wait_ended
from tests.api.servers import RunningServer, launch_small, wait_until

NUM_LINES = 40
# The engine, the server, and the server while it resumes.
VICTIMS = ("engine", "server", "starting server")
# Two lines at a time with many steps each, so that the batch takes long.
OPTIONS = ("--max-num-seqs", "2")


@pytest.mark.slow  # tests/cli/test_run_batch.py and tests/jobs kill as well
def test_no_line_is_lost_or_answered_twice(small_model: Path, tmp_path: Path) -> None:
    rng = random.Random(20)
    custom_ids = [f"line-{number}" for number in range(NUM_LINES)]
    content = as_jsonl(
        completion_line(custom_id, [5, 6, 7 + number], max_tokens=80, ignore_eos=True)
        for number, custom_id in enumerate(custom_ids)
    )
    server = launch_small(small_model, *OPTIONS, data_dir=tmp_path)
    try:
        server.wait_ready()
        batch_id = submit(server.client(), content, "/v1/completions").id
        for victim, after in zip(
            VICTIMS, sorted(rng.sample(range(NUM_LINES // 3), len(VICTIMS))), strict=True
        ):
            if victim == "starting server":
                time.sleep(rng.uniform(0.0, 1.5))
            else:
                wait_progress(server, batch_id, after)
                time.sleep(rng.uniform(0.0, 0.05))
                assert num_ended(server, batch_id) < NUM_LINES, "every kill must hit the batch at work"
            if victim == "engine":
                server.wait_ready()
                os.kill(server.engine_pid(), signal.SIGKILL)
                continue
            server = killed_and_started_again(server, small_model)
        server.wait_ready()
        batch = wait_ended(server.client(), batch_id)
        assert batch.status == "completed"
        assert batch.request_counts is not None
        assert (batch.request_counts.total, batch.request_counts.failed) == (NUM_LINES, 0)
        check_accounts(server.client(), batch, custom_ids)
    finally:
        server.kill()


def wait_progress(server: RunningServer, batch_id: str, least: int) -> None:
    wait_until(lambda: num_ended(server, batch_id) >= least, f"{least} lines")


def num_ended(server: RunningServer, batch_id: str) -> int:
    """Ended lines of the batch; -1 while the server does not answer."""
    assert server.process.poll() is None, "".join(server.output)
    try:
        batch = server.http.get(f"/v1/batches/{batch_id}").json()
    except httpx.TransportError:
        return -1
    return int(batch["request_counts"]["completed"] + batch["request_counts"]["failed"])


def killed_and_started_again(server: RunningServer, model: Path) -> RunningServer:
    server.kill()
    return launch_small(model, *OPTIONS, data_dir=server.data_dir)
