from __future__ import annotations

import pytest

from backfill.llm.progress import FetchLines


def test_each_step_of_a_download_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    fetch = FetchLines("smollm2-135m-instruct")
    for step, done in (("downloading", 0), ("checking", 0), ("checking", 50), ("checking", 90)):
        fetch(step, done, 93_000_000)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == [
        "backfill: downloading smollm2-135m-instruct (93 MB)",
        "backfill: checking smollm2-135m-instruct (93 MB)",
    ]
