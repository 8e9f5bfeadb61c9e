from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from backfill.core.errors import ConfigError
from backfill.simulation.study import run_study
from experiments.__main__ import app
from experiments.blendserve import engines, groups
from experiments.blendserve.engines import SPLITS, EnginesResult, EnginesStudy, run_engines
from experiments.blendserve.groups import GroupSpec
from tests.cli.running import assert_fits, run_to_json

pytestmark = pytest.mark.slow

SPEC = GroupSpec("sharegpt", 2.0, 100, 2)
LINES_AHEAD = 20


@pytest.fixture(scope="module", autouse=True)
def _short_answers() -> Iterator[None]:
    """A run has a step at least for each token of the longest one."""
    engines._drawn.cache_clear()
    with mock.patch.object(groups, "MAX_OUTPUT", 1000):
        yield
    engines._drawn.cache_clear()


@pytest.fixture(scope="module")
def results(_short_answers: None) -> dict[str, EnginesResult]:
    return {split: run_engines(SPEC, split, 2, "blendserve", LINES_AHEAD) for split in SPLITS}


def test_all_lines_run_and_engines_share_the_work(results: dict[str, EnginesResult]) -> None:
    alone = run_engines(SPEC, "pairs", 1, "blendserve", LINES_AHEAD)
    for result in results.values():
        assert alone.seconds / 2 < result.seconds < alone.seconds
        assert result.mean_s <= result.seconds
        assert result.least_density < SPEC.density < result.most_density


def test_parts_of_a_sorted_file_differ_most(results: dict[str, EnginesResult]) -> None:
    spread = {split: result.most_density / result.least_density for split, result in results.items()}
    assert spread["file"] > 3 * max(spread["ends"], spread["pairs"])


def test_the_command_prints_a_table_and_ends_with_json() -> None:
    printed, content = run_to_json(
        "blendserve", "engines", "--requests", "60", "--density", "2", "--splits", "ends,pairs", "--json",
        commands=app,
    )  # fmt: skip
    batch = content["batches"]["sharegpt"]
    assert set(batch) == {"ends", "pairs"}
    assert batch["ends"]["seconds_by_seed"] == [batch["ends"]["seconds"]]
    assert "speed / ends" in printed
    assert_fits(printed)


def test_lines_that_others_have_answered_do_not_run(results: dict[str, EnginesResult]) -> None:
    for split in ("pairs", "lengths"):
        rest = run_engines(SPEC, split, 2, "blendserve", LINES_AHEAD, ended_share=0.8)
        assert rest.mean_s < 0.8 * results[split].mean_s


def test_more_engines_than_lines_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least `engines`"):
        run_study(EnginesStudy(requests=2, engines=3))
    with pytest.raises(ConfigError, match="`ended`"):
        run_study(EnginesStudy(ended=1.0))
