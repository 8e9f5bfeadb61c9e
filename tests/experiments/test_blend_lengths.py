from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from backfill.blending.estimates import Lengths, OutputHistory, output_moments
from backfill.blending.tree import PrefixTree
from backfill.core.errors import ConfigError
from backfill.simulation.study import run_study
from experiments.__main__ import app
from experiments.blendserve import lengths as study
from experiments.blendserve.groups import MAX_OUTPUT, GroupSpec, draw_groups
from experiments.blendserve.lengths import (
    CHECKPOINTS,
    ESTIMATES,
    EstimateName,
    LengthsResult,
    LengthsStudy,
    point_estimate,
    pool_mean,
    run_lengths,
)
from experiments.blendserve.mix import A100_LLAMA_3_8B
from tests.cli.running import assert_fits, run_to_json

SPEC = GroupSpec("sharegpt", 1.0, 500, 1)


def test_a_pool_has_the_density_and_groups_that_differ_in_their_outputs() -> None:
    pool = draw_groups(SPEC._replace(num_requests=4000), A100_LLAMA_3_8B)
    assert pool.compute_s.sum() / pool.memory_s.sum() == pytest.approx(1.0, rel=0.1)
    assert sum(map(len, pool.parts)) == len(pool.requests) == len(pool.outputs) == 4000
    for part in pool.parts:
        first, last = (part.output_tokens[part.prefixes == group].mean() for group in (0, 19))
        assert last > 6 * first
    by_prefix: dict[bytes, int] = {}
    for request, output in zip(pool.requests, pool.outputs, strict=True):
        by_prefix.setdefault(bytes(request.prompt_token_ids)[: 4 * 128], output)
        assert request.known_output_tokens is None
        assert 1 <= output <= request.max_output_tokens == MAX_OUTPUT
    assert len(by_prefix) == 40


def test_costs_are_those_of_the_requests() -> None:
    pool = draw_groups(SPEC, A100_LLAMA_3_8B)
    for number in (0, 499):
        prompt, output = len(pool.requests[number].prompt_token_ids), pool.outputs[number]
        assert pool.memory_s[number] == pytest.approx(A100_LLAMA_3_8B.memory_s(prompt, output))
        alone_s = A100_LLAMA_3_8B.compute_s(prompt, output)
        assert 0.0 < pool.compute_s[number] <= alone_s
    groups = sum(len(set(part.prefixes.tolist())) for part in pool.parts)
    num_tokens = sum(len(each.prompt_token_ids) for each in pool.requests) + sum(pool.outputs)
    num_unique = num_tokens - 128 * (500 - groups)
    assert pool.compute_s.sum() >= A100_LLAMA_3_8B.token_s * num_unique


def test_impossible_pools_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No mix of these lengths has a density of 100"):
        draw_groups(SPEC._replace(density=100.0), A100_LLAMA_3_8B)
    path = tmp_path / "lengths.csv"
    path.write_text("ContextTokens,GeneratedTokens\n100,200\n")
    pool = draw_groups(SPEC._replace(path=path), A100_LLAMA_3_8B)
    assert {len(each.prompt_token_ids) for each in pool.requests} == {228}


def test_estimates_differ_in_what_they_know() -> None:
    """In the first group two requests ended after 10 and 30 tokens, in the second one has 50 so far."""
    prompts = sorted(np.array(ids, np.uint32).tobytes() for ids in ([1, 5], [1, 6], [1, 7], [2, 5], [2, 6]))
    tree = PrefixTree.build(prompts)
    nothing = np.zeros(5, np.int64)
    lengths = Lengths(
        finished=np.array([10, 30, 0, 0, 0]),
        so_far=np.array([0, 0, 0, 50, 0]),
        known=nothing,
        limit=np.full(5, 1000),
        weight=np.ones(5),
    )
    arguments = tree, lengths, OutputHistory(4, 400.0, 80_000.0)
    assert output_moments(*arguments).mean[2] == point_estimate(*arguments).mean[2] == 20
    assert output_moments(*arguments).square[2] == 500
    assert point_estimate(*arguments).square[2] == 400
    assert output_moments(*arguments).mean[4] != point_estimate(*arguments).mean[4] == 20
    assert pool_mean(*arguments).mean.tolist() == [100] * 5
    known = tree, lengths._replace(known=np.array([0, 0, 7, 0, 0])), arguments[2]
    assert point_estimate(*known).mean[2] == 7
    assert pool_mean(*known).square[2] == 49


@pytest.mark.slow  # estimates of known lengths: tests/blending/test_estimates.py
def test_known_lengths_are_predicted_exactly() -> None:
    """The pool is small: it tests the bookkeeping, and says nothing of estimates."""
    spec = SPEC._replace(density=2.5, num_requests=200)
    with mock.patch.object(study, "draw_groups", side_effect=_short_outputs):
        study._drawn.cache_clear()
        exact = run_lengths(spec, "exact", "blendserve")
        guessed = run_lengths(spec, "pool-mean", "blendserve")
    study._drawn.cache_clear()
    assert exact.errors == pytest.approx([0.0] * len(CHECKPOINTS), abs=0.02)
    assert len(guessed.errors) == len(CHECKPOINTS) and max(map(abs, guessed.errors)) > 0.1
    assert 0.0 < exact.of_optimum <= 1.0
    assert exact.tokens_per_s * exact.seconds == pytest.approx(guessed.tokens_per_s * guessed.seconds)


def _short_outputs(spec: GroupSpec, resources: object) -> object:
    with mock.patch("experiments.blendserve.groups.MAX_OUTPUT", 1000):
        return draw_groups(spec, resources)  # type: ignore[arg-type]


def invented(spec: GroupSpec, estimate: EstimateName, interference: str) -> LengthsResult:
    """Of a run that did not take place."""
    seconds = 100.0 + 10.0 * ESTIMATES.index(estimate)
    errors = tuple(0.1 * (-1) ** spec.seed for _ in CHECKPOINTS)
    return LengthsResult(seconds, 80.0 / seconds, 1e6 / seconds, 1.0, errors, 5000, 3, 0.01)


@pytest.fixture
def _invented_runs() -> Iterator[None]:
    with mock.patch.object(study, "run_lengths", invented):
        yield


@pytest.mark.usefixtures("_invented_runs")
def test_figures_are_means_and_errors_do_not_cancel_out() -> None:
    ((name, estimates),) = run_study(LengthsStudy(lengths="lmsys"), range(1, 3))
    assert name == "lmsys" and tuple(estimates) == ESTIMATES
    figures = estimates["exact"]
    assert figures.of_optimum == pytest.approx(0.8)
    assert figures.errors == pytest.approx([0.1] * len(CHECKPOINTS))


@pytest.mark.usefixtures("_invented_runs")
def test_the_command_prints_a_table_and_ends_with_json() -> None:
    printed, content = run_to_json("blendserve", "lengths", "--requests", "100", "--json", commands=app)
    assert set(content["pools"]) == {"sharegpt", "lmsys"}
    assert content["pools"]["lmsys"]["moments"]["of_optimum"] == pytest.approx(80 / 110)
    for text in ("pool-mean", "1.100"):
        assert text in printed
    assert_fits(printed)
