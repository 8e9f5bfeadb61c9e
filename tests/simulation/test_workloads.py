from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from backfill.core.errors import ConfigError
from backfill.simulation.workloads import (
    CODE,
    DOCUMENT,
    SHAREGPT,
    SUMMARIES,
    DrawnLengths,
    TraceLengths,
)
from experiments.bros.tradeoff import BROS_OFFLINE, LMSYS


@pytest.mark.parametrize(
    ("source", "prompt", "output"),
    [
        (SHAREGPT, (222.76, 256.36), (234.51, 268.50)),
        (LMSYS, (90.50, 148.52), (237.04, 228.21)),
        (BROS_OFFLINE, (768, 148), (80, 28)),
        (SUMMARIES, (2588, 958), (291, 291)),
    ],
)
def test_drawn_lengths_have_the_published_means_and_deviations(
    source: DrawnLengths, prompt: tuple[float, float], output: tuple[float, float]
) -> None:
    lengths = source.sample(200_000, 100_000, np.random.default_rng(0))
    for values, (mean, deviation) in zip(np.array(lengths).T, (prompt, output), strict=True):
        assert values.mean() == pytest.approx(mean, rel=0.02)
        assert values.std() == pytest.approx(deviation, rel=0.1)


def test_code_has_the_published_medians() -> None:
    lengths = np.array(CODE.sample(20_000, 100_000, np.random.default_rng(0)))
    assert np.median(lengths, axis=0) == pytest.approx([1500, 13], rel=0.05)


def test_offline_lengths_are_uniform_in_the_papers_ranges() -> None:
    lengths = np.array(BROS_OFFLINE.sample(20_000, 2048, np.random.default_rng(0)))
    assert lengths.min(axis=0).tolist() == [512, 32]
    assert lengths.max(axis=0).tolist() == [1024, 128]


@pytest.mark.parametrize("source", [SHAREGPT, LMSYS, CODE, DOCUMENT, SUMMARIES])
def test_every_request_fits_the_context(source: DrawnLengths) -> None:
    lengths = source.sample(5000, 2048, np.random.default_rng(1))
    assert max(sum(each) for each in lengths) <= 2048
    assert min(min(each) for each in lengths) >= 1


def test_a_file_is_sampled_and_repeats(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nXXX,5,6\nXXX,7,8\nXXX,3000,10\n")
    source = TraceLengths.read(path)
    sample = source.sample(5, 2048, np.random.default_rng(0))
    assert set(sample) == {(5, 6), (7, 8)}
    assert len(sample) == 5
    assert sample == source.sample(5, 2048, np.random.default_rng(0))
    with pytest.raises(ConfigError, match=r"lengths\.csv: no request fits a context of 10 tokens"):
        source.sample(1, 10, np.random.default_rng(0))
