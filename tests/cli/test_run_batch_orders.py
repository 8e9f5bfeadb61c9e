"""``backfill run-batch``: the order of lines and the cache change no answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.api.batch_inputs import as_jsonl, completion_line, parse_jsonl
from tests.api.servers import MODEL
from tests.cli.running import run_cli_here

_RULES = "Answer in one word. The answer must be the name of a colour, a city or an animal. "
_OPTIONS = ("--dtype", "float32", "--kv-gib", "0.00045", "--max-num-seqs", "4", "--threads", "1")


def answers(model: Path, folder: Path, name: str, *options: str) -> dict[str, str]:
    """The text of each line. The pool is smaller than what the lines need, so that content is evicted."""
    output = folder / f"{name}.jsonl"
    files = ("-i", str(folder / "in.jsonl"), "-o", str(output))
    names = ("--model", str(model), "--served-model-name", MODEL)
    run = run_cli_here("run-batch", *files, *names, *_OPTIONS, *options)
    assert run.returncode == 0, run.stderr
    lines = parse_jsonl(output.read_bytes())
    return {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in lines}


@pytest.mark.slow  # three runs; test_invariance.py is quick
def test_answers_are_the_same_in_another_order_and_without_the_cache(
    small_model: Path, tmp_path: Path
) -> None:
    lines = [
        completion_line(
            f"line-{number}",
            prompt=_RULES * (1 + number % 3) + f"Question {number // 3}: what is it?",
            max_tokens=4 if number % 2 else 12,
            ignore_eos=number % 4 == 0,
        )
        for number in range(24)
    ]
    (tmp_path / "in.jsonl").write_bytes(as_jsonl(lines))
    expected = answers(small_model, tmp_path, "no-cache", "--no-enable-prefix-caching", "--order", "fcfs")
    assert len(expected) == 24
    for order in ("random", "blend"):
        assert answers(small_model, tmp_path, order, "--order", order) == expected, order
