from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from backfill.core.errors import ConfigError
from backfill.simulation.study import run_study
from backfill.simulation.workloads import SHAREGPT
from experiments.__main__ import app
from experiments.bros.overhead import GROUPS, Overhead, OverheadStudy, run_repeatedly
from experiments.bros.tradeoff import Setting
from tests.cli.running import assert_fits, run_cli_here

TINY = OverheadStudy(models="opt-13b", workloads="sharegpt", rates="4", policies="bros", duration=2.0)


def test_the_share_is_of_decisions_and_steps_together() -> None:
    overhead = Overhead.of(np.array([0.001, 0.003]), np.array([0.010, 0.026]), copy_s=0.009)
    assert overhead.share == pytest.approx(0.1)
    assert overhead.copy_share == pytest.approx(0.25)
    assert [overhead.decision_ms, overhead.step_ms] == pytest.approx([2.0, 18.0])


def test_a_step_has_the_median_of_its_decisions() -> None:
    simulation = TINY.simulation(Setting("opt-13b", "sharegpt", 4.0), "bros", SHAREGPT, 1)
    run = run_repeatedly(simulation, repeats=2)
    assert len(run.decision_s) == len(run.step_s) == len(run.num_running) > 10
    assert (run.decision_s > 0).all()
    assert 1.5 < run.step_s.sum() < 2.5, "steps are those of the device: they fill the trace"
    assert run.copy_s >= 0


def test_steps_are_grouped_by_the_requests_that_hold_blocks() -> None:
    (point,) = run_study(replace(TINY, repeats=1))
    groups = point.groups["bros"]
    assert set(groups) <= set(GROUPS)
    assert sum(each.num_steps for each in groups.values()) == point.policies["bros"].num_steps


def test_a_trace_without_a_step_is_refused() -> None:
    alone = replace(TINY, workloads="lmsys", rates="0.001", policies="online-only", duration=1.0)
    with pytest.raises(ConfigError, match="`duration`: no step begins within"):
        run_study(alone)


def test_overhead_prints_tables_and_ends_with_json(tmp_path: Path) -> None:
    plot = tmp_path / "overhead.png"
    done = run_cli_here(
        "bros", "overhead", "--models", "opt-13b", "--workloads", "lmsys", "--rates", "4",
        "--duration", "1", "--repeats", "1", "--json", "--plot", str(plot), commands=app,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout.splitlines()[-1])
    (point,) = content["points"]
    assert set(point["policies"]) == {"bros", "bros-checkpoint"}
    assert 0 < point["policies"]["bros"]["share"] < 1
    assert content["paper"]["opt-30b"]["share"] == [0.0756, 0.0842]
    assert "9.12% to 9.52%" in done.stdout
    assert_fits(done.stdout)
    assert plot.read_bytes().startswith(b"\x89PNG")
