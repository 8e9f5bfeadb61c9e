"""Arrivals, lengths, traces."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from backfill.core.errors import ConfigError
from backfill.workloads.arrivals import Instants, burstiness_of_cv, gamma_arrivals
from backfill.workloads.lengths import LengthDistribution, LengthLaw
from backfill.workloads.traces import read_trace

CASES = {
    "azure 2023": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n",
        [0.0, 4.314579],
    ),
    "azure 2024, unordered": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:01.5+00:00,396,109\n2024-05-10 00:00:00+00:00,374,44\n",
        [0.0, 1.5],
    ),
    "vidur": ("arrived_at,num_prefill_tokens,num_decode_tokens\n2.0,374,44\n2.5,396.0,109\n", [0.0, 0.5]),
    "burstgpt 1": (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,374,44,418,Conversation log\n6,GPT-4,9,0,9,API log\n45,GPT-4,396,109,505,API log\n",
        [0.0, 40.0],
    ),
    "burstgpt 3": (
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,1,2.5,ChatGPT,374,44,418,x\n45,2,1.5,GPT-4,396,109,505,x\n",
        [0.0, 40.0],
    ),
    "sharegpt lengths": ("TIMESTAMP,ContextTokens,GeneratedTokens\nXXX,374,44\nXXX,396,109\n", None),
    "arxiv lengths": (
        "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n374,44,418,8.5\n396,109,505,3.6\n",
        None,
    ),
    "other order, spaces, CRLF, mark": (
        "\ufeffnum_decode_tokens, arrived_at, num_prefill_tokens\r\n44, 0, 374\r\n109, 0.5, 396\r\n",
        [0.0, 0.5],
    ),
}


def write(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("case", CASES)
def test_csv(case: str, tmp_path: Path) -> None:
    text, arrivals = CASES[case]
    trace = read_trace(write(tmp_path, text))
    assert trace.input_lens.tolist() == [374, 396]
    assert trace.output_lens.tolist() == [44, 109]
    if arrivals is None:
        assert trace.arrivals_at_s is None
    else:
        # Dates of today in float64 are exact to 0.24 microseconds.
        assert trace.arrivals_at_s == pytest.approx(arrivals, abs=5e-7)


def test_mooncake(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1000, "input_length": 700, "output_length": 5},
        {"timestamp": 1500, "input_length": 20, "output_length": 9},
    ]
    trace = read_trace(write(tmp_path, "\n".join(map(json.dumps, rows)) + "\n\n", "t.jsonl"))
    assert trace.arrivals_at_s == pytest.approx([0.0, 0.5])
    picked = trace.select([1])
    assert picked.input_lens.tolist() == [20]
    assert picked.arrivals_at_s == pytest.approx([0.0])


HEADER = "arrived_at,num_prefill_tokens,num_decode_tokens\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a,b\n1,2\n", r"line 1: columns are missing\. Expected one of: TIMESTAMP,.*Found: a,b"),
        ("", "line 1: columns are missing.*no header"),
        (HEADER + "0,5,5\n2,5,5\n1,5,5\n", "line 4: time 1 s is before that of line 3, 2 s.*ascending"),
        (HEADER + "-1,5,5\n", "line 2: arrived_at must be a number of at least 0, got '-1'"),
        (HEADER + "0,5,5\nnan,5,5\n", "line 3: arrived_at must be a number"),
        (HEADER + "0,many,5\n", "line 2: num_prefill_tokens must be a whole number.*'many'"),
        (HEADER + "0,5,-5\n", "line 2: num_decode_tokens must be a whole number.*'-5'"),
        (HEADER + "0,5.5,5\n", "line 2: num_prefill_tokens must be a whole number"),
        (HEADER + "0,5\n", "line 2: num_decode_tokens must be a whole number.*nothing"),
        (HEADER, "no request with at least 1 token"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,5,5\n", "line 2: TIMESTAMP must be a date"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:00.x,5,5\n", "must be a date"),
    ],
)
def test_bad_csv_names_file_line_and_what_is_expected(text: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"trace.csv.*{expected}"):
        read_trace(write(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "line 1: not JSON"),
        ('{"timestamp": 1, "input_length": 5}', "line 1: expected .* without output_length"),
        (
            '{"timestamp": -1, "input_length": 5, "output_length": 1}',
            "timestamp must be a number of at least 0",
        ),
    ],
)
def test_bad_jsonl(text: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"t.jsonl, {expected}" if "line" in expected else expected):
        read_trace(write(tmp_path, text, "t.jsonl"))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.csv cannot be read: No such file"):
        read_trace(tmp_path / "none.csv")


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def gap_cv(instants: Instants) -> float:
    gaps = np.diff(instants)
    return float(gaps.std() / gaps.mean())


@pytest.mark.parametrize("cv", [0.25, 0.5, 1.0, 2.0, 4.0])
def test_gamma_has_the_rate_and_the_cv_asked_for(cv: float) -> None:
    instants = gamma_arrivals(100_000, 5.0, burstiness_of_cv(cv), rng())
    assert np.all(np.diff(instants) >= 0)
    assert instants[-1] == pytest.approx(100_000 / 5.0)
    assert gap_cv(instants) == pytest.approx(cv, rel=0.05)


def test_poisson_counts_have_the_variance_of_their_mean() -> None:
    instants = gamma_arrivals(50_000, 20.0, 1.0, rng(1))
    counts = np.histogram(instants, bins=np.arange(0, 2500, 1.0))[0]
    assert counts.mean() == pytest.approx(20, rel=0.02)
    assert counts.var() == pytest.approx(20, rel=0.1)


def test_gamma_follows_vllm() -> None:
    """Cumulated gaps of shape b and mean 1/rate, stretched to end at N/rate."""
    gaps = rng(3).gamma(0.5, 1 / 0.5, 50) / 2.0
    expected = np.cumsum(gaps) * (50 / 2.0 / gaps.sum())
    assert gamma_arrivals(50, 2.0, 0.5, rng(3)) == pytest.approx(expected)


def test_seed_decides() -> None:
    first, again, other = (gamma_arrivals(20, 1.0, 1.0, rng(seed)) for seed in (7, 7, 8))
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_constant_gaps() -> None:
    assert gamma_arrivals(4, 2.0, math.inf, rng()) == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert math.isinf(burstiness_of_cv(0))
    assert burstiness_of_cv(2) == 0.25


@pytest.mark.parametrize("cv", [-1, math.nan])
def test_a_variation_out_of_range_is_refused(cv: float) -> None:
    with pytest.raises(ConfigError, match="`cv` must be"):
        burstiness_of_cv(cv)


def source() -> np.random.Generator:
    return np.random.default_rng(0)


def test_fixed() -> None:
    assert LengthDistribution(7).sample(3, source()).tolist() == [7, 7, 7]


def test_uniform_covers_the_range_of_vllm() -> None:
    lengths = LengthDistribution(101, 0.1).sample(10_000, source())
    assert (lengths.min(), lengths.max()) == (90, 112)
    assert lengths.mean() == pytest.approx(101, rel=0.01)


@pytest.mark.parametrize(("law", "spread"), [("normal", 0.2), ("lognormal", 1.5)])
def test_mean_and_deviation_are_those_of_the_lengths(law: LengthLaw, spread: float) -> None:
    lengths = LengthDistribution(500, spread, law).sample(200_000, source())
    assert lengths.mean() == pytest.approx(500, rel=0.02)
    assert lengths.std() / lengths.mean() == pytest.approx(spread, rel=0.05)


def test_never_below_one_token() -> None:
    assert LengthDistribution(2, 3.0, "normal").sample(1000, source()).min() == 1
    assert LengthDistribution(1, 0.9).sample(1000, source()).min() == 1
