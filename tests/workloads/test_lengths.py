from __future__ import annotations

import numpy as np
import pytest

from backfill.workloads.lengths import LengthDistribution, LengthLaw


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_fixed() -> None:
    assert LengthDistribution(7).sample(3, rng()).tolist() == [7, 7, 7]


def test_uniform_covers_the_range_of_vllm() -> None:
    lengths = LengthDistribution(101, 0.1).sample(10_000, rng())
    assert (lengths.min(), lengths.max()) == (90, 112)
    assert lengths.mean() == pytest.approx(101, rel=0.01)


@pytest.mark.parametrize(("law", "spread"), [("normal", 0.2), ("lognormal", 1.5)])
def test_mean_and_deviation_are_those_of_the_lengths(law: LengthLaw, spread: float) -> None:
    lengths = LengthDistribution(500, spread, law).sample(200_000, rng())
    assert lengths.mean() == pytest.approx(500, rel=0.02)
    assert lengths.std() / lengths.mean() == pytest.approx(spread, rel=0.05)


def test_never_below_one_token() -> None:
    assert LengthDistribution(2, 3.0, "normal").sample(1000, rng()).min() == 1
    assert LengthDistribution(1, 0.9).sample(1000, rng()).min() == 1
