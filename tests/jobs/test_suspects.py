"""Lines that were lost, and which is to blame."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from backfill.jobs.suspects import MAX_LONE_LOSSES, MAX_ONLY_LINE_LOSSES, Losses, LossFile, Suspects, sweep


def lose(suspects: Suspects, number: int, times: int, *, is_lone: bool, is_only_line: bool) -> Losses:
    for _ in range(times):
        losses = suspects.note_lost(number, is_lone=is_lone, is_only_line=is_only_line)
    return losses


def test_only_losses_of_a_lone_line_count_against_it() -> None:
    suspects = Suspects()
    assert not lose(suspects, 1, 100, is_lone=False, is_only_line=False).is_to_blame
    assert not lose(suspects, 1, MAX_LONE_LOSSES - 1, is_lone=True, is_only_line=True).is_to_blame
    assert lose(suspects, 1, 1, is_lone=True, is_only_line=True).is_to_blame
    assert not lose(suspects, 2, MAX_ONLY_LINE_LOSSES - 1, is_lone=False, is_only_line=True).is_to_blame
    assert lose(suspects, 2, 1, is_lone=False, is_only_line=True).is_to_blame


def test_what_is_saved_is_read_by_the_same_batch_only(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "batch"
    suspects = Suspects(LossFile(path), "batch_1")
    lose(suspects, 7, 2, is_lone=False, is_only_line=True)
    lose(suspects, 9, 1, is_lone=True, is_only_line=True)
    suspects.forget(9)
    suspects.save(suspects.encode())
    again, other = Suspects(LossFile(path), "batch_1"), Suspects(LossFile(path), "batch_2")
    for read in (again, other):
        read.load()
    assert (again.of(7), len(again)) == (Losses(2, 0, 2), 1)
    assert len(other) == 0
    again.delete()
    again.delete()
    again.load()
    assert not path.exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"name": "b", "lines": {"1": [1]}}', b"\xff"])
def test_a_file_that_cannot_be_decoded_is_ignored(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "b"
    path.write_bytes(content)
    suspects = Suspects(LossFile(path), "b")
    with caplog.at_level(logging.WARNING):
        suspects.load()
    assert len(suspects) == 0
    assert "are ignored" in caplog.text


def test_files_of_batches_that_ended_are_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "suspects"
    sweep(folder, {"a"})
    folder.mkdir()
    for name in ("a", "b", "a.part"):
        (folder / name).touch()
    sweep(folder, {"a"})
    assert [path.name for path in folder.iterdir()] == ["a"]
