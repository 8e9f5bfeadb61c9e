from __future__ import annotations

import json
from pathlib import Path

import pytest

from backfill.core.errors import ConfigError
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
