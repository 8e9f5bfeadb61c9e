from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from backfill.core.errors import ConfigError
from experiments.__main__ import app
from experiments.blendserve import figures
from experiments.blendserve.mix import MixSpec
from experiments.blendserve.points import add_point, read_points, settings_of
from experiments.blendserve.pool import PoolResult
from experiments.blendserve.result import Target
from tests.cli.running import run_cli_here, run_to_json
from tests.experiments.blend_doubles import invented

GRID = ("blendserve", "grid", "--requests", "2000", "--sharings", "0.4", "--plot", "grid.png")
SETTINGS = settings_of(MixSpec("burstgpt", 0.8, 0.4, 2000, 1), ("dfs", "blend"), "blendserve", "density", 1)
RAN: list[tuple[float, str]] = []


@pytest.fixture(autouse=True)
def _invented_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A pool of density 1.1 ends the command, as a signal would."""

    def run(spec: MixSpec, order: str, interference: str, steps: str) -> PoolResult:
        if spec.density == 1.1:
            raise KeyboardInterrupt
        RAN.append((spec.density, order))
        return invented(spec, order, interference, steps)

    monkeypatch.chdir(tmp_path)
    with mock.patch.object(figures, "run_pool", run):
        yield
    RAN.clear()


def test_an_interrupted_grid_goes_on() -> None:
    stopped = run_cli_here(*GRID, "--densities", "0.8,0.9,1.1", "--output", "points.jsonl", commands=app)
    assert stopped.returncode == 130
    assert "0 of 3 points are in points.jsonl" in stopped.stdout
    assert len(Path("points.jsonl").read_text().splitlines()) == 2
    assert RAN == [(0.8, "dfs"), (0.8, "blend"), (0.9, "dfs"), (0.9, "blend")]
    RAN.clear()
    with Path("points.jsonl").open("a") as file:
        file.write('{"settings": {"hardw')  # was being written
    whole_grid = (*GRID, "--densities", "0.8,0.9,1.0", "--json")
    printed, resumed = run_to_json(*whole_grid, "--output", "points.jsonl", commands=app)
    assert "2 of 3 points are in points.jsonl" in printed
    assert RAN == [(1.0, "dfs"), (1.0, "blend")]
    assert run_to_json(*whole_grid, commands=app)[1] == resumed
    lines = [json.loads(line) for line in Path("points.jsonl").read_text().splitlines()]
    assert [line["target"]["density"] for line in lines] == [0.8, 0.9, 1.0]
    assert lines[0]["settings"]["num_requests"] == 2000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--requests", "3000"), "other settings: --requests was 2000, and is 3000"),
        (("--seeds", "2"), "--seeds was 1, and is 2"),
        pytest.param(("--orders", "blend"), "--orders was dfs,blend, and is blend", marks=pytest.mark.slow),
        pytest.param(("--source", "azure"), "--source was burstgpt, and is azure", marks=pytest.mark.slow),
        pytest.param(
            ("--interference", "ideal"), "--interference was blendserve, and is ideal", marks=pytest.mark.slow
        ),
        pytest.param(("--steps", "fixed"), "--steps was density, and is fixed", marks=pytest.mark.slow),
        (("--source-lengths", "lengths.csv"), "--source-lengths was not given, and is "),
        (("--source-lengths", "none.csv"), "--source-lengths none.csv cannot be read"),
    ],
)
def test_points_of_other_settings_are_refused(arguments: tuple[str, ...], message: str) -> None:
    Path("lengths.csv").write_text("num_prefill_tokens,num_decode_tokens\n100,20\n")
    grid = (*GRID, "--densities", "0.8", "--output", "points.jsonl")
    assert run_cli_here(*grid, commands=app).returncode == 0
    before = Path("points.jsonl").read_bytes()
    refused = run_cli_here(*grid, *arguments, commands=app)
    assert refused.returncode == 1
    assert message in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert Path("points.jsonl").read_bytes() == before


@pytest.mark.parametrize("content", ["notes", "notes\n", '{"target": 1}\n', '{"settings": []}\n', "[]\n"])
def test_other_files_are_left_as_they_are(content: str) -> None:
    path = Path("notes.txt")
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"`output` notes.txt: line 1 is no point of a grid"):
        read_points(path, SETTINGS)
    assert path.read_text() == content


def test_a_point_that_is_written_in_part_is_an_error_and_the_next_run_drops_it() -> None:
    path = Path("points.jsonl")
    assert run_cli_here(*GRID, "--densities", "0.8", "--output", str(path), commands=app).returncode == 0
    (point,) = read_points(path, SETTINGS).values()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, limits[1]))
    try:
        with pytest.raises(ConfigError, match=r"`output` points.jsonl cannot be written: File too large"):
            add_point(path, SETTINGS, replace(point, target=Target(0.9, 0.4)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(read_points(path, SETTINGS)) == [point.target]


def test_a_file_that_cannot_be_written_is_refused_before_the_runs(tmp_path: Path) -> None:
    for name in (str(tmp_path), "/no/such/folder/points.jsonl"):
        done = run_cli_here(*GRID, "--densities", "0.8", "--output", name, commands=app)
        assert done.returncode == 1
        assert f"--output {name} cannot be written" in done.stderr
    assert not RAN
