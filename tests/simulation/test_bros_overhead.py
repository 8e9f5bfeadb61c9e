from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from backfill.core.errors import ConfigError
from backfill.simulation.bros import BrosExperiment, Setting, point_simulation
from backfill.simulation.bros_overhead import GROUPS, Overhead, run_bros_overhead, run_repeatedly
from backfill.simulation.request_lengths import SHAREGPT
from tests.cli.running import assert_fits, run_cli_here

TINY = BrosExperiment(
    models=("opt-13b",), workloads=("sharegpt",), rates_per_s=(4.0,), policies=("bros",), duration_s=2.0
)


def test_the_share_is_of_decisions_and_steps_together() -> None:
    overhead = Overhead.of(np.array([0.001, 0.003]), np.array([0.010, 0.026]), copy_s=0.009)
    assert overhead.share == pytest.approx(0.1)
    assert overhead.copy_share == pytest.approx(0.25)
    assert [overhead.decision_ms, overhead.step_ms] == pytest.approx([2.0, 18.0])


def test_a_step_has_the_median_of_its_decisions() -> None:
    simulation = point_simulation(TINY, Setting("opt-13b", "sharegpt", 4.0), "bros", SHAREGPT, 1)
    run = run_repeatedly(simulation, repeats=2)
    assert len(run.decision_s) == len(run.step_s) == len(run.num_running) > 10
    assert (run.decision_s > 0).all()
    assert 1.5 < run.step_s.sum() < 2.5, "steps are those of the device: they fill the trace"
    assert run.copy_s >= 0


def test_steps_are_grouped_by_the_requests_that_hold_blocks() -> None:
    (point,) = run_bros_overhead(TINY, 1).points
    groups = point.groups["bros"]
    assert set(groups) <= set(GROUPS)
    assert sum(each.num_steps for each in groups.values()) == point.policies["bros"].num_steps


def test_a_trace_without_a_step_is_refused() -> None:
    alone = BrosExperiment(
        models=("opt-13b",), workloads=("lmsys",), rates_per_s=(1e-3,), policies=("online-only",),
        duration_s=1.0,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="`duration`: no step begins within"):
        run_bros_overhead(alone, 1)
    with pytest.raises(ConfigError, match="`repeats` must be at least 1, got 0"):
        run_bros_overhead(TINY, 0)


def test_simulate_bros_overhead_prints_tables_and_ends_with_json(tmp_path: Path) -> None:
    plot = tmp_path / "overhead.png"
    done = run_cli_here(
        "simulate", "bros-overhead", "--models", "opt-13b", "--workloads", "lmsys", "--rates", "4",
        "--duration", "1", "--repeats", "1", "--json", "--plot", str(plot),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout.splitlines()[-1])
    (point,) = content["points"]
    assert set(point["policies"]) == {"bros", "bros-bidirectional"}
    assert 0 < point["policies"]["bros"]["share"] < 1
    assert content["paper"]["opt-30b"]["share"] == [0.0756, 0.0842]
    assert "9.12% to 9.52%" in done.stdout
    assert_fits(done.stdout)
    assert plot.read_bytes().startswith(b"\x89PNG")
