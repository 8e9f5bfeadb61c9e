"""Settings that no study can have are refused in one line, before anything runs."""

from __future__ import annotations

import pytest

from experiments.__main__ import app
from tests.cli.running import run_cli_here


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("blendserve table2 --orders lifo", "--orders: there is no 'lifo'; there are fcfs, dfs"),
        ("blendserve table2 --requests 20", "20 requests of burstgpt make no mix"),
        ("blendserve table2 --source-lengths /no/file.csv", "--source-lengths /no/file.csv cannot be read"),
        ("blendserve grid --source-lengths /dev/null", "--source-lengths /dev/null, line 1: "),
        ("blendserve grid --sharings 1.5", "--sharings must be"),
        ("blendserve grid --densities=-1", "--densities must be between 0.001 and 1000000, got -1"),
        ("blendserve usage --trace 5", "--trace must be 1 to 4, got 5"),
        ("blendserve coserving --traffics bursts", "there is no 'bursts'"),
        ("blendserve coserving --variants best", "there is no 'best'"),
        ("blendserve coserving --load 1", "--load must be at least 0.001 and below 1"),
        ("blendserve coserving --duration 0", "--duration must be between 0.001 and 1000000, got 0"),
        ("blendserve coserving --phase 1e308", "--phase must be between 1 and 86400, got 1e+308"),
        ("blendserve lengths --estimates best", "estimates: there is no 'best'"),
        ("blendserve lengths --lengths azure", "lengths: there is no 'azure'"),
        ("blendserve lengths --density 0", "density must be above 0"),
        ("blendserve lengths --lengths lmsys --source-lengths a.csv", "does not name"),
        ("bros tradeoff --models opt-66b", "--models: there is no 'opt-66b'; there are opt-13b, opt-30b"),
        ("bros tradeoff --rates=-1", "--rates must be between 0.001 and 1000000, got -1"),
        ("bros tradeoff --rates 1e-300", "--rates must be between 0.001 and 1000000, got 1e-300"),
        ("bros tradeoff --rates 1e5 --duration 1e6", "--duration must be at most 100 at 100000 requests/s"),
        ("bros tradeoff --duration 0.5", "--duration must be between 1 and 1000000, got 0.5"),
        ("bros tradeoff --online-lengths missing.csv", "--online-lengths missing.csv cannot be read"),
        ("bros overhead --repeats 0", "--repeats must be between 1 and 1000, got 0"),
        ("selectn memory --models gpt", "--models: there is no 'gpt'"),
        ("selectn memory --batches 0", "--batches must be between 1 and 4096, got 0"),
        ("selectn memory --slacks=-0.1", "--slacks must be at least 0"),
        ("selectn memory --steps 10", "--steps must be between 100 and 100000, got 10"),
    ],
)
def test_bad_settings_are_refused_in_one_line(command: str, message: str) -> None:
    done = run_cli_here(*command.split(), commands=app)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
