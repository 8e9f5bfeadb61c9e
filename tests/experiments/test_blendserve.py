from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from backfill.simulation.plot import new_figure
from experiments.__main__ import app
from experiments.blendserve import figures
from experiments.blendserve.figures import Grid, Table2, UsageStudy
from experiments.blendserve.result import (
    GRID_DENSITIES,
    GRID_SHARINGS,
    ORDERS,
    TRACES,
    BlendPoint,
    speedups_of,
)
from experiments.study import run_study
from tests.cli.running import assert_fits, run_cli_here
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


def test_a_grid_of_one_point_is_readable() -> None:
    figure = new_figure()
    one = replace(SMALL, densities="1.125")
    one.draw(figure, run_study(one, num_seeds=2))
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1.125"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0.4"]
    figure.draw_without_rendering()  # lays it out
    title = axes.title.get_window_extent()
    assert title.x0 >= 0
    assert title.x1 <= figure.bbox.width
    assert title.y1 <= figure.bbox.height
    assert "2,000 requests a point, mean of 2 seeds" in axes.get_title()
    (text,) = axes.texts
    assert (text.get_text(), text.get_color()) == ("1.25", "black"), "on a light square"
    assert axes.images[0].get_clim() == pytest.approx((1.0, 1.25))


def test_orders_have_the_same_axes(points: list[BlendPoint]) -> None:
    point = points[0]
    longer = replace(point.usage["dfs"], num_steps=900, compute_s=3.0 * point.usage["dfs"].compute_s)
    figure = new_figure()
    UsageStudy().draw(figure, [replace(point, usage={**point.usage, "dfs": longer})])
    first, second = figure.axes
    assert first.get_xlim() == second.get_xlim()
    assert first.get_ylim() == second.get_ylim()
    assert first.get_xlim()[1] >= 900
    assert first.get_ylim()[1] >= 300.0


def test_the_papers_pools_are_those_of_its_tables() -> None:
    assert len(GRID_DENSITIES) * len(GRID_SHARINGS) == 65
    assert (GRID_DENSITIES[0], GRID_DENSITIES[-1]) == (0.8, 1.4)
    assert [tuple(target) for target in TRACES.values()] == [
        (1.4, 0.35),
        (0.9, 0.35),
        (1.4, 0.05),
        (0.9, 0.05),
    ]
    assert set(Table2().all_orders) == set(ORDERS)


def test_the_grid_command_prints_a_table_and_ends_with_json(tmp_path: Path) -> None:
    plot = tmp_path / "grid.png"
    done = run_cli_here(
        "blendserve", "grid", "--requests", "4000", "--densities", "0.8,0.9",
        "--sharings", "0.4", "--seeds", "2", "--json", "--plot", str(plot), commands=app,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout.splitlines()[-1])
    assert [each["target"]["density"] for each in content["points"]] == [0.8, 0.9]
    assert set(content["points"][0]["orders"]) == {"dfs", "blend"}
    assert "mean 1.250, 1.250 to 1.250 (paper: 1.225, 1.14 to 1.34)" in done.stdout
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
    assert "No plot: it compares blend with dfs." in without.stdout
    assert not Path("none.png").exists()


def test_the_other_commands_print_their_pools(tmp_path: Path) -> None:
    common = ("--requests", "4000")
    done = run_cli_here("blendserve", "table2", *common, commands=app)
    assert done.returncode == 0, done.stderr
    for text in ("trace 4: density", "Sources", "blend, all pools", "0.866", "1.250"):
        assert text in done.stdout
    assert_fits(done.stdout)
    plot = tmp_path / "usage.png"
    done = run_cli_here(
        "blendserve", "usage", *common, "--trace", "1", "--plot", str(plot), "--json", commands=app
    )
    assert done.returncode == 0, done.stderr
    *lines, content = done.stdout.splitlines()
    assert_fits("\n".join(lines))
    assert re.search(r"0% to 10% +│ +4\.1 │ +95\.9 │ +4\.1 │ +95\.9 ", done.stdout)
    usage = json.loads(content)["usage"]
    assert set(usage) == {"dfs", "blend"}
    assert usage["dfs"]["num_steps"] == 500
    assert usage["dfs"]["compute_s"] == pytest.approx(np.linspace(0.0, 0.1, 50).tolist())
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["table2", "--source", "mmlu"],
            "--source: there is no 'mmlu'; there are burstgpt, azure",
        ),
        (["table2", "--orders", "lifo"], "--orders: there is no 'lifo'; there are fcfs, dfs"),
        (["table2", "--interference", "none"], "--interference: there is no 'none'; there are"),
        (["table2", "--requests", "0"], "--requests must be above 0, got 0"),
        (["table2", "--requests", "20"], "20 requests of burstgpt make no mix"),
        (["table2", "--source-lengths", "/no/file.csv"], "/no/file.csv cannot be read"),
        (["table2", "--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["grid", "--densities", "x"], "--densities must be numbers separated by commas, got 'x'"),
        (["grid", "--sharings", "1.5"], "--sharings must be"),
        (["grid", "--densities", "-1"], "--densities must be above 0, got -1"),
        (["grid", "--plot", "/no/such/folder/x.png"], "there is no folder /no/such/folder"),
        (["usage", "--trace", "5"], "--trace must be 1 to 4, got 5"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str) -> None:
    done = run_cli_here("blendserve", *arguments, commands=app)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
