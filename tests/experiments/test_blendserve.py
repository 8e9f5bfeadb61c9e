from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from backfill.simulation.study import run_study
from experiments.__main__ import app
from experiments.blendserve import figures
from experiments.blendserve.figures import Grid
from experiments.blendserve.result import (
    GRID_DENSITIES,
    BlendPoint,
    speedups_of,
)
from tests.cli.running import assert_fits, run_cli_here, run_to_json
from tests.experiments.blend_doubles import invented

SMALL = Grid(densities="0.8,0.9", sharings="0.4", requests=2000)


@pytest.fixture(autouse=True, scope="module")
def _invented_runs() -> Iterator[None]:
    """Runs themselves are tested in test_blend_run."""
    with mock.patch.object(figures, "run_pool", invented):
        yield


@pytest.fixture(scope="module")
def points(_invented_runs: None) -> list[BlendPoint]:
    return run_study(SMALL)


def test_every_order_runs_on_every_pool(points: list[BlendPoint]) -> None:
    assert [point.target for point in points] == SMALL.targets()
    for point in points:
        assert tuple(point.orders) == tuple(point.usage) == SMALL.all_orders
        assert point.drawn.density == pytest.approx(point.target.density, rel=0.02)
        found = point.orders["blend"]
        assert point.speedup() == pytest.approx(found.tokens_per_s / point.orders["dfs"].tokens_per_s)
        assert point.speedup() == pytest.approx(1.25)
        assert point.speedup("random") is None
        assert found.of_optimum == pytest.approx(0.9)
        assert found.of_optimum_with_longest == pytest.approx(0.95)
        assert found.of_optimal_sharing == pytest.approx(0.75)
        assert found.recomputed_share == pytest.approx(0.01)
    assert speedups_of(points) == [point.speedup() for point in points]
    assert speedups_of(points, "fcfs") == []


def test_the_grid_command_prints_a_table_and_ends_with_json(tmp_path: Path) -> None:
    plot = tmp_path / "grid.png"
    printed, content = run_to_json(
        "blendserve", "grid", "--requests", "4000", "--densities", "0.8,0.9",
        "--sharings", "0.4", "--seeds", "2", "--json", "--plot", str(plot), commands=app,
    )  # fmt: skip
    assert [each["target"]["density"] for each in content["points"]] == [0.8, 0.9]
    assert set(content["points"][0]["orders"]) == {"dfs", "blend"}
    assert "mean 1.250, 1.250 to 1.250 (paper: 1.225, 1.14 to 1.34)" in printed
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_whole_grid_fits_80_columns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    densities = ",".join(map(str, GRID_DENSITIES))
    done = run_cli_here(
        "blendserve", "grid", "--source", "azure", "--requests", "4000", "--densities", densities,
        "--sharings", "0.4,0.45", commands=app
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "BlendServe, figure 10: azure" in done.stdout
    assert_fits(done.stdout)
    assert done.stdout.count(" 1.250 │") == 2 * len(GRID_DENSITIES)
    without = run_cli_here(
        "blendserve", "grid", "--requests", "4000", "--densities", "0.8", "--sharings", "0.4",
        "--orders", "blend", "--plot", "none.png", commands=app
    )  # fmt: skip
    assert without.returncode == 0, without.stderr
    assert Path("none.png").read_bytes().startswith(b"\x89PNG")


def test_the_other_commands_print_their_pools(tmp_path: Path) -> None:
    common = ("--requests", "4000")
    done = run_cli_here("blendserve", "table2", *common, commands=app)
    assert done.returncode == 0, done.stderr
    for text in ("trace 4: density", "Sources", "blend, all pools", "0.866", "1.250"):
        assert text in done.stdout
    assert_fits(done.stdout)
    plot = tmp_path / "usage.png"
    printed, content = run_to_json(
        "blendserve", "usage", *common, "--trace", "1", "--plot", str(plot), "--json", commands=app
    )
    assert_fits(printed)
    assert re.search(r"0% to 10% +│ +4\.1 │ +95\.9 │ +4\.1 │ +95\.9 ", printed)
    usage = content["usage"]
    assert set(usage) == {"dfs", "blend"}
    assert usage["dfs"]["num_steps"] == 500
    assert usage["dfs"]["compute_s"] == pytest.approx(np.linspace(0.0, 0.1, 50).tolist())
    assert plot.read_bytes().startswith(b"\x89PNG")
