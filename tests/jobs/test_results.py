"""Results of lines: what they hold, the files that record them, and lines that were lost."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backfill.core.sampling import SamplingParams
from backfill.generation.generator import TextGenerator
from backfill.generation.timeline import Observer
from backfill.jobs.lines import LineResult, ServiceRunner, completed, of_a_choice, unanswered
from backfill.jobs.records import TokenUsage
from backfill.jobs.results import MAX_OBSERVED, ForeignResults, ResultLog, ResultsLost
from backfill.jobs.suspects import MAX_LONE_LOSSES, MAX_ONLY_LINE_LOSSES, Losses, LossFile, Suspects
from backfill.preparation.lines import BatchLine
from backfill.protocol.encoding import EncodedList
from backfill.protocol.service import CompletionService, TokenCount
from tests.api.in_process import ScriptedEngine
from tests.api.test_fields import make_tokenizer
from tests.patience import TIMEOUT_S, until
from tests.protocol.builders import make_generation
from tests.shared import examples


def result(number: int, *, fails: bool = False) -> LineResult:
    line = BatchLine(number=number, custom_id=f"r{number}", request_id="req")
    if fails:
        return unanswered(line, "engine_error")
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 2}}
    return completed(line, {"text": "a\nb", "usage": usage})


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "output", tmp_path / "errors"


@pytest.fixture
def log(paths: tuple[Path, Path]) -> ResultLog:
    opened = ResultLog("b1", *paths)
    opened.open()
    return opened


def reopened(paths: tuple[Path, Path], name: str = "b1") -> ResultLog:
    log = ResultLog(name, *paths)
    log.open()
    return log


def test_what_is_appended_is_read_back(log: ResultLog, paths: tuple[Path, Path]) -> None:
    log.append([result(1), result(9, fails=True)])
    log.append([result(70_000)])
    again = reopened(paths)
    for known in (log, again):
        assert [n for n in (1, 2, 8, 9, 10, 69_999, 70_000, 70_001) if known.is_done(n)] == [1, 9, 70_000]
        assert (known.num_completed, known.num_failed) == (2, 1)
        assert known.usage == TokenUsage(6, 4, 2)


@settings(max_examples=examples(60), deadline=None)
@given(
    groups=st.lists(st.lists(st.booleans(), min_size=1, max_size=4), max_size=6),
    torn=st.tuples(st.integers(0, 400), st.integers(0, 400)),
    is_shared=st.booleans(),
)
def test_a_crash_within_a_write_loses_only_unfinished_lines(
    tmp_path_factory: pytest.TempPathFactory,
    groups: list[list[bool]],
    torn: tuple[int, int],
    is_shared: bool,
) -> None:
    folder = tmp_path_factory.mktemp("log")
    paths = (folder / "output", folder / ("output" if is_shared else "errors"))
    log = ResultLog("b1", *paths)
    log.open()
    numbers = iter(range(1, 100))
    for group in groups:
        log.append([result(next(numbers), fails=fails) for fails in group])
    for path, cut in zip(paths, torn, strict=True):
        os.truncate(path, max(0, path.stat().st_size - cut))
    again = ResultLog("b1", *paths)
    again.open()
    kept = b"".join(path.read_bytes() for path in dict.fromkeys(paths))
    assert kept == b"" or kept.endswith(b"\n")
    assert again.num_completed + again.num_failed == kept.count(b"\n")
    total = sum(map(len, groups))
    left = [number for number in range(1, total + 1) if not again.is_done(number)]
    assert len(left) == total - kept.count(b"\n")
    if left:
        again.append([result(number) for number in left])
    assert reopened(paths).num_completed + reopened(paths).num_failed == total


def test_a_group_a_full_disk_refuses_leaves_nothing(
    log: ResultLog, paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    log.append([result(1)])
    before = paths[0].read_bytes()
    real_write, chooser = os.write, random.Random(1)

    def write_some(file: int, data: Any) -> int:
        if chooser.random() < 0.5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(file, bytes(data[: max(1, len(data) // 2)]))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_some)
        with pytest.raises(OSError, match="No space left"):
            log.append([result(2), result(3, fails=True)])
    assert paths[0].read_bytes() == before
    assert paths[1].read_bytes() == b""
    assert not log.is_done(2)
    log.append([result(2), result(3, fails=True)])
    assert reopened(paths).num_completed == 2


def test_files_that_could_not_be_opened_are_opened_whole_later(
    log: ResultLog, paths: tuple[Path, Path]
) -> None:
    log.append([result(1), result(2, fails=True)])
    paths[1].rename(paths[1].with_name("aside"))
    paths[1].mkdir()
    again = ResultLog("b1", *paths)
    with pytest.raises(IsADirectoryError):
        again.open()
    paths[1].rmdir()
    paths[1].with_name("aside").rename(paths[1])
    again.open()
    assert (again.num_completed, again.num_failed) == (1, 1)


def test_results_of_another_input_are_refused(log: ResultLog, paths: tuple[Path, Path]) -> None:
    log.append([result(1)])
    with pytest.raises(ForeignResults, match="another input"):
        reopened(paths, "b2")
    paths[1].write_bytes(b'{"some": "json"}\n')
    with pytest.raises(ForeignResults, match=r"line [0-9]+, is no result"):
        reopened(paths)


def test_a_line_written_twice_is_refused(log: ResultLog, paths: tuple[Path, Path]) -> None:
    log.append([result(1)])
    paths[1].write_bytes(paths[0].read_bytes())
    with pytest.raises(ForeignResults, match=r"line 1, is the second result of line 1"):
        reopened(paths)


def test_zeros_that_a_power_loss_left_are_cut_off(log: ResultLog, paths: tuple[Path, Path]) -> None:
    log.append([result(1)])
    kept = paths[0].read_bytes()
    log.append([result(2), result(3)])
    hole = paths[0].read_bytes()[len(kept) :]
    paths[0].write_bytes(kept + bytes(100) + hole[100:])
    again = reopened(paths)
    assert paths[0].read_bytes() == kept
    assert (again.is_done(1), again.is_done(2), again.is_done(3)) == (True, False, False)


def test_a_partial_write_is_cut_off_before_the_next(
    log: ResultLog, paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    log.append([result(1)])
    real_write = os.write

    def write_some(file: int, data: Any) -> int:
        real_write(file, bytes(data[:9]))
        raise OSError(errno.EIO, "Input/output error")

    def refuse(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_some)
        patch.setattr(os, "ftruncate", refuse)
        with pytest.raises(OSError, match="Input/output"):
            log.append([result(2)])
    log.append([result(2)])
    assert reopened(paths).num_completed == 2


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_missing_file_is_detected_before_the_next_write(
    log: ResultLog, paths: tuple[Path, Path], is_replaced: bool
) -> None:
    log.append([result(1)])
    paths[0].unlink()
    if is_replaced:
        paths[0].write_bytes(b"")
    with pytest.raises(ResultsLost, match=paths[0].name):
        log.append([result(2)])


def test_a_result_line_holds_a_body_whose_lists_are_encoded() -> None:
    content = EncodedList()
    for token in ("a", "b"):
        content.extend([{"token": token}])
    body = {
        "choices": [{"index": 0, "logprobs": {"content": content}}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}},
    }
    result = completed(BatchLine(number=1, custom_id="c"), body)
    assert result.usage == TokenUsage(3, 1, 2)
    encoded = result.encode("id")
    assert encoded.endswith(b"}\n")
    assert json.loads(encoded)["response"]["body"] == {
        **body,
        "choices": [{"index": 0, "logprobs": {"content": [{"token": "a"}, {"token": "b"}]}}],
    }


def test_a_line_that_could_not_be_prepared_has_an_internal_error() -> None:
    result = asyncio.run(ServiceRunner(lambda: None).run(BatchLine(number=1, custom_id="c")))
    assert result.error is not None and result.error["code"] == "internal_error"


def test_the_tokens_of_a_running_line_are_counted_over_its_choices() -> None:
    async def run() -> None:
        engine, tokenizer, count = ScriptedEngine(), make_tokenizer(), TokenCount()
        client: Any = engine
        service = CompletionService(tokenizer, TextGenerator(client, tokenizer, Observer()))
        generation = make_generation(num_choices=2)
        generation.request.samplings[:] = [SamplingParams(max_tokens=5)] * 2
        line = BatchLine(number=1, custom_id="c", generation=generation)
        engine.may_end.set()
        engine.num_allowed = 3
        running = asyncio.create_task(ServiceRunner(lambda: service).run(line, count))
        await until(lambda: count.num_tokens == 6)
        assert of_a_choice(line, count.num_tokens) == 3
        engine.num_allowed = 1 << 30
        result = await asyncio.wait_for(running, TIMEOUT_S)
        assert result.usage.output_tokens == count.num_tokens == 10

    asyncio.run(run())


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
    path = tmp_path / "batch"
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


def test_lengths_of_some_lines_are_kept_from_all_over_the_file(paths: tuple[Path, Path]) -> None:
    log = reopened(paths)
    log.append([result(number, fails=number % 10 == 0) for number in range(1, 3001)])
    for known in (log, reopened(paths)):
        assert MAX_OBSERVED / 3 < len(known.observed) <= MAX_OBSERVED
        assert set(known.observed.values()) == {1}
        for lines in (range(1, 3001, 2), range(2, 3001, 2), range(1, 1000), range(2000, 3000)):
            assert len(known.observed.keys() & set(lines)) > len(known.observed) / 5
        assert not any(number % 10 == 0 for number in known.observed), "they have no answer"
