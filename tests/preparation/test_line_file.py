"""Input files read in groups of lines, whose turn it is, and records on disk."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backfill.core.errors import RequestError
from backfill.core.request import ServiceClass
from backfill.preparation import line_file
from backfill.preparation.line_file import LineFile, is_marked, mark, read_names, union
from backfill.preparation.lines import BadLine, BatchLine
from backfill.preparation.messages import START, LineSelection, Position
from backfill.preparation.spool import Span, Spool
from backfill.preparation.turns import OwnerTurns
from backfill.protocol.generation import Generation, GenerationEndpoint
from backfill.protocol.preparer import RequestContext
from tests.jobs.doubles import URL, input_line, input_of
from tests.protocol.builders import make_generation


def generation_of(context: RequestContext) -> Generation:
    return make_generation(
        response_id=f"cmpl-{context.request_id}",
        service_class=ServiceClass.OFFLINE,
        complete_by_s=context.complete_by_s,
        owner_weight=context.owner_weight,
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


def opened(path: Path, content: bytes, **selection: Any) -> LineFile:
    path.write_bytes(content)
    return LineFile(LineSelection(path=str(path), max_line_bytes=1000, **selection), prepare)


def rest(file: LineFile, group: int = 3, position: Position = START) -> list[BatchLine]:
    lines: list[BatchLine] = []
    while (found := file.read(position, group)).lines:
        lines += found.lines
        position = found.position
    return lines


def bits_of(numbers: set[int]) -> bytes:
    bits = bytearray()
    for number in numbers:
        mark(bits, number)
    return bytes(bits)


def test_lines_come_in_groups_ready_to_run(tmp_path: Path) -> None:
    file = opened(
        tmp_path / "in",
        input_of(5) + b"\n" + input_line(9),
        complete_by_s=7.5,
        owner="alice",
        owner_weight=3.0,
    )
    groups, position = [], START
    for _ in range(3):
        found = file.read(position, 4)
        position = found.position
        groups.append(found.lines)
    assert [[line.number for line in group] for group in groups] == [[1, 2, 3, 4], [5, 7], []]
    for line in groups[0]:
        assert line.generation is not None
        assert line.generation.request.complete_by_s == 7.5
        assert line.generation.request.owner_weight == 3.0
        assert line.generation.request.owner == "alice"
        assert line.generation.response_id == f"cmpl-{line.request_id}"
        assert line.num_bytes == len(input_line(0))


@given(
    done=st.sets(st.integers(1, 30)),
    done_later=st.sets(st.integers(1, 30)),
    group=st.integers(1, 7),
    cut=st.integers(0, 30),
)
def test_each_line_that_is_not_done_is_read_once_from_any_position(
    done: set[int], done_later: set[int], group: int, cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("lines") / "in"
    file = opened(path, input_of(30), done=bits_of(done))
    first, position = list[BatchLine](), START
    while len(first) < cut and (found := file.read(position, group)).lines:
        first += found.lines
        position = found.position
    file.mark_done(done_later)
    numbers = [line.number for line in rest(file, group, position)]
    read = {line.number for line in first}
    assert sorted(read) == [line.number for line in first]
    expected = [each for each in range(1, 31) if each not in done | done_later | read]
    assert numbers == expected


@given(some=st.sets(st.integers(0, 40)), others=st.sets(st.integers(0, 40)))
def test_bits_of_lines(some: set[int], others: set[int]) -> None:
    united = union(bits_of(some), bits_of(others))
    assert {number for number in range(50) if is_marked(united, number)} == some | others


def test_a_refused_body_and_one_that_cannot_be_prepared_are_lines_too(tmp_path: Path) -> None:
    content = input_line(0, body={"prompt": "refused"}) + input_line(1, body={"prompt": "bug"})
    refused, failed = rest(opened(tmp_path / "in", content))
    assert refused.refusal is not None
    assert (refused.refusal.status, refused.refusal.body["error"]["param"]) == (400, "prompt")
    assert failed.generation is None
    assert failed.refusal is None


def test_a_line_that_is_to_be_left_unprepared_is_a_line_too(tmp_path: Path) -> None:
    first, left_out = rest(opened(tmp_path / "in", input_of(2), unprepared=frozenset({2})))
    assert first.generation is not None
    assert (left_out.custom_id, left_out.generation, left_out.refusal) == ("r1", None, None)


def test_a_line_that_is_not_a_request_is_raised_in_its_turn_each_time(tmp_path: Path) -> None:
    file = opened(tmp_path / "in", input_of(2) + b"{\n" + input_line(3))
    found = file.read(START, 10)
    assert [line.number for line in found.lines] == [1, 2]
    for _ in range(2):
        with pytest.raises(BadLine) as raised:
            file.read(found.position, 10)
        assert raised.value.error.line == 3


def test_names_are_read_without_bodies(tmp_path: Path) -> None:
    content = input_line(0, body={"prompt": "bug"}) + input_line(1, body={"prompt": "refused"})
    lines = read_names(opened(tmp_path / "in", content).selection, START, 5).lines
    assert [(line.custom_id, line.num_bytes, line.refusal) for line in lines] == [
        ("r0", 0, None),
        ("r1", 0, None),
    ]


def test_a_group_ends_at_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = opened(tmp_path / "in", input_of(5))
    monkeypatch.setattr(line_file, "_GROUP_BYTES", 2 * len(input_line(0)))
    assert len(file.read(START, 10).lines) == 3
    assert len(read_names(file.selection, START, 10).lines) == 3


def test_a_file_that_is_gone_is_an_os_error(tmp_path: Path) -> None:
    file = opened(tmp_path / "in", input_of(5))
    position = file.read(START, 2).position
    (tmp_path / "in").unlink()
    with pytest.raises(FileNotFoundError):
        file.read(position, 2)


@given(groups=st.lists(st.lists(st.binary(max_size=50), max_size=5), max_size=5))
def test_each_record_is_read_as_it_was_written(groups: list[list[bytes]]) -> None:
    spool = Spool()
    written = [
        (span, record) for group in groups for span, record in zip(spool.append(group), group, strict=True)
    ]
    for span, record in reversed(written):
        assert spool.read(span) == record
    spool.close()
    spool.close()


def test_its_file_has_no_name(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path))
    spool.append([b"record"])
    assert not list(tmp_path.iterdir())
    spool.close()


def test_a_write_that_fails_adds_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spool = Spool(str(tmp_path))
    (first,) = spool.append([b"first"])
    write = os.pwrite

    def refuse(file: int, data: bytes, at: int) -> int:
        if at > 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[:3], at)

    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(OSError, match="No space"):
        spool.append([b"second", b"third"])
    monkeypatch.undo()
    assert spool._file is not None
    assert os.fstat(spool._file.fileno()).st_size == 5, "what was written of it is given back to the disk"
    (fourth,) = spool.append([b"fourth"])
    assert (spool.read(first), spool.read(fourth)) == (b"first", b"fourth")
    with pytest.raises(OSError, match="cut"):
        spool.read(Span(0, 1000))
    spool.close()


def test_a_folder_that_is_gone_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Spool(str(tmp_path / "none")).append([b"record"])


def test_a_disk_that_is_nearly_full_is_left_to_others(tmp_path: Path) -> None:
    disk = os.statvfs(tmp_path)
    spool = Spool(str(tmp_path), min_free_bytes=disk.f_blocks * disk.f_frsize + 1)
    with pytest.raises(OSError, match="free space"):
        spool.append([b"record"])
    spool.close()


async def work(turns: OwnerTurns, owner: str, done: list[str]) -> None:
    async with turns.turn(owner):
        done.append(owner)


def test_who_stops_waiting_is_forgotten_and_the_next_owner_has_the_turn() -> None:
    async def run() -> None:
        turns, done = OwnerTurns(1), list[str]()
        async with turns.turn("first"):
            owners = ("flood", "flood", "gone", "other")
            waiting = [asyncio.create_task(work(turns, owner, done)) for owner in owners]
            await asyncio.sleep(0)
            for each in waiting[1:3]:
                each.cancel()
            await asyncio.wait(waiting[1:3])
            assert {owner: len(queue) for owner, queue in turns._waiting.items()} == {"flood": 1, "other": 1}
        await asyncio.gather(*waiting, return_exceptions=True)
        assert done == ["flood", "other"]

    asyncio.run(run())


def test_a_turn_that_comes_as_its_task_is_cancelled_goes_to_the_next() -> None:
    async def run() -> None:
        turns, done = OwnerTurns(1), list[str]()
        async with turns.turn("first"):
            gone, other = (asyncio.create_task(work(turns, owner, done)) for owner in ("gone", "other"))
            await asyncio.sleep(0)
            gone.cancel()  # it has not run when the turn ends
        await asyncio.gather(gone, other, return_exceptions=True)
        assert done == ["other"]
        assert not turns._waiting

    asyncio.run(run())
