from __future__ import annotations

import numpy as np
import pytest

from backfill.core.errors import ConfigError
from backfill.workloads.lengths import LengthDistribution, LengthLaw
from backfill.workloads.prompts import id_range, prefix_sharing_prompts, random_prompts


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


@pytest.mark.parametrize(
    "distribution",
    [LengthDistribution(0), LengthDistribution(5, 1.0), LengthDistribution(5, -1, "normal")],
)
def test_out_of_range(distribution: LengthDistribution) -> None:
    with pytest.raises(ConfigError, match="`random_input_len`"):
        distribution.validate("random_input_len")


def test_random_prompts_share_the_prefix_only() -> None:
    prompts = random_prompts(np.array([5, 9]), (1000, 40_000), rng(), prefix_tokens=3)
    assert [len(prompt) for prompt in prompts] == [8, 12]
    assert prompts[0][:3] == prompts[1][:3] and prompts[0][3:] != prompts[1][3:8]
    assert all(1000 <= token < 40_000 for prompt in prompts for token in prompt)


@pytest.mark.parametrize(
    ("vocabulary", "expected"),
    [(128_000, (1000, 40_000)), (32_000, (1000, 32_000)), (100, (50, 100))],
)
def test_ids_stay_in_the_vocabulary(vocabulary: int, expected: tuple[int, int]) -> None:
    assert id_range(vocabulary) == expected


def test_equal_leading_hash_ids_give_equal_leading_tokens() -> None:
    lengths = np.array([10, 8, 10, 10])
    one, two, three, four = prefix_sharing_prompts(
        lengths, [(1, 2, 3), (1, 2), (1, 9, 3), ()], 4, (1000, 40_000), seed=0
    )
    assert [len(prompt) for prompt in (one, two, three, four)] == lengths.tolist()
    assert one[:8] == two and three[:4] == one[:4] and three[4:8] != one[4:8] and four[:4] != one[:4]
