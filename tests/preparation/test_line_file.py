"""Input files read in groups of lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backfill.core.errors import RequestError
from backfill.core.request import ServiceClass
from backfill.preparation import line_file
from backfill.preparation.line_file import LineFile
from backfill.preparation.lines import BadLine, BatchLine
from backfill.preparation.messages import LineSelection, Position
from backfill.protocol.generation import Generation, GenerationEndpoint
from backfill.protocol.preparer import RequestContext
from tests.jobs.doubles import URL, input_line, input_of
from tests.protocol.builders import make_generation


def generation_of(context: RequestContext) -> Generation:
    return make_generation(
        response_id=f"cmpl-{context.request_id}",
        service_class=ServiceClass.OFFLINE,
        complete_by_s=context.complete_by_s,
        owner=context.owner,
    )


def prepare(endpoint: GenerationEndpoint, body: bytes, context: RequestContext) -> Generation:
    assert endpoint == URL
    assert context.is_batch_line
    prompt = json.loads(body)["prompt"]
    if prompt == "refused":
        raise RequestError("No.", param="prompt")
    if prompt == "bug":
        raise ZeroDivisionError
    return generation_of(context)


def opened(path: Path, content: bytes, position: Position | None = None, **selection: Any) -> LineFile:
    path.write_bytes(content)
    chosen = LineSelection(path=str(path), max_line_bytes=1000, **selection)
    return LineFile(chosen, position or Position(), prepare)


def rest(file: LineFile, group: int = 3) -> list[BatchLine]:
    lines: list[BatchLine] = []
    while more := file.read(group):
        lines += more
    return lines


def test_lines_come_in_groups_ready_to_run(tmp_path: Path) -> None:
    file = opened(tmp_path / "in", input_of(5) + b"\n" + input_line(9), complete_by_s=7.5, owner="alice")
    groups = [file.read(4), file.read(4), file.read(4)]
    assert [[line.number for line in group] for group in groups] == [[1, 2, 3, 4], [5, 7], []]
    for line in groups[0]:
        assert line.generation is not None
        assert line.generation.request.complete_by_s == 7.5
        assert line.generation.request.owner == "alice"
        assert line.generation.response_id == f"cmpl-{line.request_id}"
        assert line.num_bytes == len(input_line(0))


@given(done=st.sets(st.integers(1, 30)), group=st.integers(1, 7), cut=st.integers(0, 30))
def test_each_line_that_is_not_done_is_read_once_from_any_position(
    done: set[int], group: int, cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("lines") / "in"
    bits = bytearray(4)
    for number in done:
        bits[number // 8] |= 1 << number % 8
    file = opened(path, input_of(30), done=bytes(bits))
    first: list[BatchLine] = []
    while len(first) < cut and (more := file.read(group)):
        first += more
    again = LineFile(
        LineSelection(path=str(path), max_line_bytes=1000, done=bytes(bits)), file.position, prepare
    )
    numbers = [line.number for line in first + rest(again, group)]
    assert numbers == [number for number in range(1, 31) if number not in done]


def test_a_refused_body_and_one_that_cannot_be_prepared_are_lines_too(tmp_path: Path) -> None:
    content = input_line(0, body={"prompt": "refused"}) + input_line(1, body={"prompt": "bug"})
    refused, failed = rest(opened(tmp_path / "in", content))
    assert refused.refusal is not None
    assert (refused.refusal.status, refused.refusal.body["error"]["param"]) == (400, "prompt")
    assert failed.generation is None
    assert failed.refusal is None


def test_a_line_that_is_not_a_request_is_raised_in_its_turn_each_time(tmp_path: Path) -> None:
    file = opened(tmp_path / "in", input_of(2) + b"{\n" + input_line(3))
    assert [line.number for line in file.read(10)] == [1, 2]
    for _ in range(2):
        with pytest.raises(BadLine) as raised:
            file.read(10)
        assert raised.value.error.line == 3


def test_with_names_only_bodies_are_not_prepared(tmp_path: Path) -> None:
    content = input_line(0, body={"prompt": "bug"}) + input_line(1, body={"prompt": "refused"})
    lines = rest(opened(tmp_path / "in", content, names_only=True))
    assert [(line.custom_id, line.num_bytes, line.refusal) for line in lines] == [
        ("r0", 0, None),
        ("r1", 0, None),
    ]


def test_a_group_ends_at_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_file, "_GROUP_BYTES", 2 * len(input_line(0)))
    file = opened(tmp_path / "in", input_of(5))
    assert [len(file.read(10)), len(file.read(10))] == [3, 2]


def test_a_file_that_is_gone_is_an_os_error(tmp_path: Path) -> None:
    file = opened(tmp_path / "in", input_of(5))
    file.read(2)
    (tmp_path / "in").unlink()
    with pytest.raises(FileNotFoundError):
        file.read(2)
