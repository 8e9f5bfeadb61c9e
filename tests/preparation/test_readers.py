"""The server's side of input files, against a process that is only a pool of lines, and that may end."""

from __future__ import annotations

import asyncio
import errno
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backfill.blending.memory_forecast import MemoryForecast
from backfill.blending.requests import OrderName
from backfill.preparation import line_pool, readers
from backfill.preparation.line_file import LineFile
from backfill.preparation.lines import BadLine, BatchLine
from backfill.preparation.messages import (
    CloseLines,
    EndLine,
    IndexLines,
    LinesProgress,
    LinesTaken,
    OpenLines,
    TakeLines,
    ToPreparation,
    Work,
)
from backfill.preparation.readers import LineReaders, PreparedLines
from backfill.preparation.spool import Span, Spool
from backfill.preparation.supervisor import PreparationDied
from backfill.protocol.generation import Generation, GenerationEndpoint
from backfill.protocol.preparer import RequestContext
from tests.patience import TIMEOUT_S, until
from tests.preparation.pool_doubles import lines_of, make_pool, prepare, prompts, selection_of
from tests.shared import examples

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Ended(BaseException):
    """The process ended in the midst of a job."""


class Process:
    """Does jobs as the preparation process and its client do. A prompt that begins with 66666 ends it."""

    def __init__(self, order: OrderName = "dfs") -> None:
        self._order = order
        self.pool = make_pool(order)
        self.readers = LineReaders(cast(Any, self))
        self.num_deaths = 0
        self.num_prepared: Counter[str] = Counter()
        self.before_job: Callable[[Work], None] = lambda work: None

    async def ask(self, work: Work, kind: Any) -> Any:
        await asyncio.sleep(0)
        self.before_job(work)
        try:
            result = self._do(work)
        except Ended:
            self.die()  # the client gives the job to the next process
            self.die()
            raise PreparationDied("twice") from None
        return result  # at once: no process ends between a result and its use

    def _do(self, work: Work) -> object:
        match work:
            case IndexLines(reader_id, position, max_lines):
                return self.pool.index(reader_id, position, max_lines)
            case TakeLines(owner, max_lines):
                return self.pool.take(owner, max_lines)
        raise AssertionError(work)

    def send(self, message: ToPreparation) -> None:
        match message:
            case OpenLines() as opened:
                self.pool.open(opened, LineFile(opened.selection, self._prepare))
            case CloseLines(reader_id):
                self.pool.close(reader_id)
            case EndLine(reader_id, number, num_output_tokens):
                self.pool.end(reader_id, number, num_output_tokens)
            case LinesProgress(reader_id, num_output_tokens):
                self.pool.note_progress(reader_id, num_output_tokens)
            case _:
                raise AssertionError(message)

    def die(self) -> None:
        self.num_deaths += 1
        self.pool = make_pool(self._order)
        self.readers.restart()

    def _prepare(self, endpoint: GenerationEndpoint, body: bytes, context: RequestContext) -> Generation:
        prompt = json.loads(body)["prompt"]
        if prompt[0] == 66666:
            raise Ended
        self.num_prepared[str(prompt)] += 1
        return prepare(endpoint, body, context)

    @asynccontextmanager
    async def running(self, *, allowed: bool = True) -> AsyncIterator[LineReaders]:
        indexing = asyncio.create_task(self.readers.run())
        if allowed:
            self.readers.allow()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                yield self.readers
        finally:
            indexing.cancel()
            await asyncio.gather(indexing, return_exceptions=True)


async def rest(lines: PreparedLines, group: int = 3) -> list[tuple[PreparedLines, BatchLine]]:
    found: list[tuple[PreparedLines, BatchLine]] = []
    while more := await lines.read(group):
        found += more
    return found


def numbers(found: list[tuple[PreparedLines, BatchLine]]) -> list[int]:
    return sorted(line.number for _, line in found)


def write(path: Path, *content: list[int]) -> Path:
    path.write_bytes(prompts(*content))
    return path


async def test_each_line_is_prepared_once_and_read_once(tmp_path: Path) -> None:
    process = Process()
    path = write(tmp_path / "in", *[[n] for n in range(1000)])
    async with process.running() as readers:
        lines = readers.open(selection_of(path))
        first = list(await lines.read(3))
        assert process.num_prepared.total() < 1000, "lines are read before the file is indexed"
        assert numbers(first + await rest(lines, 32)) == list(range(1, 1001))
        assert lines.num_indexed == 1000
        assert await lines.read(1) == []
    assert len(process.num_prepared) == process.num_prepared.total() == 1000


async def test_nothing_is_prepared_before_the_engine_is_known(tmp_path: Path) -> None:
    process = Process()
    path = write(tmp_path / "in", [1], [2])
    async with process.running(allowed=False) as readers:
        reading = asyncio.create_task(rest(readers.open(selection_of(path))))
        await asyncio.wait([reading], timeout=0.02)
        assert not process.num_prepared
        readers.allow()
        assert numbers(await reading) == [1, 2]


async def test_a_read_returns_lines_of_all_files_of_the_owner_and_no_other(tmp_path: Path) -> None:
    process = Process()
    path = write(tmp_path / "in", *[[n] for n in range(30)])
    async with process.running() as readers:
        first, second = (readers.open(selection_of(path, owner="a")) for _ in range(2))
        other = readers.open(selection_of(path, owner="b"))
        found = await rest(first)
        assert {lines for lines, _ in found} == {first, second}
        assert len(found) == 60
        assert await second.read(3) == []
        assert {lines for lines, _ in await rest(other)} == {other}


async def test_a_line_that_ends_the_process_costs_no_other(tmp_path: Path) -> None:
    process = Process()
    content = [[n] for n in range(400)]
    content[2] = content[299] = [66666]
    path = write(tmp_path / "in", *content)
    async with process.running() as readers:
        lines, other = (
            readers.open(selection_of(path)),
            readers.open(selection_of(write(tmp_path / "o", [1]))),
        )
        found = await rest(lines)
        assert numbers([each for each in found if each[0] is lines]) == list(range(1, 401))
        assert numbers([each for each in found if each[0] is other]) == [1]
        unprepared = [line.number for _, line in found if line.generation is None]
        assert sorted(unprepared) == [3, 300]
        assert (lines.num_indexed, other.num_indexed) == (400, 1)
    assert process.num_deaths == 8, "four for each"
    assert max(process.num_prepared.values()) <= 1 + 2 * 5, "once, and again after each death or omission"


async def test_lines_are_indexed_in_groups_again_after_a_death_without_a_poison_line(tmp_path: Path) -> None:
    process = Process()
    sizes: list[int] = []

    def kill_once(work: Work) -> None:
        if isinstance(work, IndexLines):
            sizes.append(work.max_lines)
            if len(sizes) == 2:
                raise_died()

    def raise_died() -> None:
        process.die()
        process.die()
        raise PreparationDied("twice")

    process.before_job = kill_once
    async with process.running() as readers:
        lines = readers.open(selection_of(write(tmp_path / "in", *([n] for n in range(1000)))))
        assert numbers(await rest(lines, 100)) == list(range(1, 1001))
    assert sizes.count(1) <= 2 * 256
    assert sizes[-1] > 1


async def test_a_new_process_begins_with_what_its_predecessor_learned(tmp_path: Path) -> None:
    process = Process("blend")
    async with process.running() as readers:
        lines = readers.open(selection_of(write(tmp_path / "in", *([n] for n in range(40)))))
        (_, first), *_ = await lines.read(1)
        assert lines.running[first.number].expected_output_tokens == 4, "the most that it may have"
        lines.end(first.number, 1)
        for _ in range(31):
            (_, line), *_ = await lines.read(1)
            lines.end(line.number, 1)
        process.die()
        (_, line), *_ = await lines.read(1)
        assert lines.running[line.number].expected_output_tokens == 1
        taken = process.pool.take("", 1)
    assert taken.learned is not None and taken.learned.outputs.count == 31, "when lines were last taken"
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(taken), type=LinesTaken) == taken


async def test_a_bad_line_is_raised_once_all_others_of_the_owner_were_read(tmp_path: Path) -> None:
    process = Process()
    path = tmp_path / "in"
    path.write_bytes(prompts([1], [2]) + b"{\n" + prompts([3]))
    good = write(tmp_path / "good", [4], [5])
    async with process.running() as readers:
        lines, other = readers.open(selection_of(path)), readers.open(selection_of(good))
        found = [each for _ in range(4) for each in await lines.read(1)]
        assert numbers(found) == [1, 1, 2, 2]
        with pytest.raises(BadLine):
            await lines.read(1)
        assert await other.read(1) == []
        lines.close()
        gone = readers.open(selection_of(tmp_path / "none"))
        with pytest.raises(FileNotFoundError):
            await gone.read(1)
        assert await other.read(1) == []


async def test_a_file_that_could_not_be_read_for_a_moment_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "_RETRY_S", 0.01)
    process = Process()
    errors = [OSError("too many open files")]

    def before_job(work: Work) -> None:
        if isinstance(work, IndexLines) and errors:
            raise errors.pop()

    process.before_job = before_job
    path = tmp_path / "in"
    path.write_bytes(prompts([1], [2], [3]))
    async with process.running() as opened, asyncio.timeout(TIMEOUT_S):
        lines = opened.open(selection_of(path))
        await until(lambda: lines.is_indexed)
        assert len(await lines.read(10)) == 3


async def test_a_file_whose_prepared_lines_cannot_be_read_back_costs_no_other_of_the_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, read = Process(), Spool.read
    good, bad = (write(tmp_path / str(index), *[[index, n] for n in range(500)]) for index in range(2))

    def refuse(self: Spool, span: Span) -> bytes:
        if self._folder == str(tmp_path):
            raise OSError(errno.EIO, "bad sector")
        return read(self, span)

    monkeypatch.setattr(Spool, "read", refuse)
    async with process.running() as readers:
        reader = readers.open(selection_of(good))
        other = readers.open(selection_of(bad, spool_folder=str(tmp_path)))
        while not (reader.is_indexed and other.is_indexed):
            await asyncio.sleep(0)
        found = await rest(reader, 32)  # no error
        for lines in (reader, other):
            assert numbers([each for each in found if each[0] is lines]) == list(range(1, 501))
    assert not other.is_spooled
    assert reader.is_spooled
    assert process.num_deaths == 0


async def test_files_that_wait_for_room_are_tried_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_pool, "MAX_LINES", 500)
    process, num_jobs = Process(), 0

    def count(work: Work) -> None:
        nonlocal num_jobs
        num_jobs += isinstance(work, IndexLines)

    process.before_job = count
    path = write(tmp_path / "in", *[[n] for n in range(600)])
    async with process.running() as readers:
        opened = [readers.open(selection_of(path, owner=str(index))) for index in range(6)]
        while not all(lines.is_held_up for lines in opened):
            await asyncio.sleep(0)
        num_jobs = 0
        for _ in range(32):
            assert len(await opened[0].read(8)) == 8
        while not all(lines.is_held_up for lines in opened):
            await asyncio.sleep(0)
        assert num_jobs < 3 * 32, "each read lets its own file be tried, not all of them"
        for lines in opened:
            assert len(numbers(await rest(lines, 256))) == 600 - 256 * (lines is opened[0])


async def test_lines_of_a_file_that_is_closed_are_not_returned(tmp_path: Path) -> None:
    process = Process()
    path = write(tmp_path / "in", *[[n] for n in range(20)])
    async with process.running() as readers:
        first, second = (readers.open(selection_of(path)) for _ in range(2))
        await first.read(4)
        reading = asyncio.create_task(rest(second))
        await asyncio.sleep(0)
        first.close()
        found = await reading
        assert {lines for lines, _ in found} == {second}


async def test_a_read_ends_when_the_files_it_waits_for_are_closed(tmp_path: Path) -> None:
    process = Process()
    path = write(tmp_path / "in", [1])
    async with process.running(allowed=False) as readers:
        first, second = (readers.open(selection_of(path)) for _ in range(2))
        reading = asyncio.create_task(first.read(1))
        first.close()
        await asyncio.wait([reading], timeout=0.02)
        assert not reading.done(), "another file of the owner may have lines"
        second.close()
        assert await reading == []


@settings(max_examples=examples(40))
@given(
    seed=st.integers(0, 2**32),
    files=st.lists(st.integers(0, 60), min_size=1, max_size=4),
    deaths=st.lists(st.integers(1, 10), max_size=4),
)
def test_each_line_is_read_once_however_processes_end(
    seed: int, files: list[int], deaths: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    asyncio.run(read_all(tmp_path_factory.mktemp("readers"), random.Random(seed), files, deaths))


async def read_all(folder: Path, rng: random.Random, files: list[int], deaths: list[int]) -> None:
    """Read files in turn. ``deaths``: jobs until the process ends, each time."""
    process, num_jobs = Process(), 0

    def die_now_and_then(work: Work) -> None:
        nonlocal num_jobs
        num_jobs += 1
        if deaths and num_jobs >= deaths[0]:
            del deaths[0]
            num_jobs = 0
            process.die()

    process.before_job = die_now_and_then
    seen: Counter[tuple[int, int]] = Counter()
    async with process.running() as readers:
        opened = []
        for index, num_lines in enumerate(files):
            path = write(folder / str(index), *[[index, n] for n in range(num_lines)])
            opened.append(readers.open(selection_of(path, owner="ab"[index % 2])))
        for lines in opened:
            while True:
                found = await lines.read(rng.randint(1, 9))
                for source, line in found:
                    seen[source.reader_id, line.number] += 1
                    source.note_progress({line.number: 2, line.number + 1: 2})
                    if rng.random() < 0.5:
                        source.end(line.number, 3)
                if not found:
                    break
    assert seen == {(reader, n): 1 for reader, count in enumerate(files) for n in range(1, count + 1)}


async def test_a_new_process_knows_the_kv_of_lines_that_run(tmp_path: Path) -> None:
    process = Process("blend")
    path = tmp_path / "in"
    path.write_bytes(
        lines_of(*({"prompt": [n] * 50, "max_tokens": 100 + n, "ignore_eos": True} for n in range(20)))
    )

    def forecast() -> MemoryForecast:
        assert process.pool._forecast is not None
        return process.pool._forecast

    def to_go() -> list[float]:
        """Tokens that lines have yet to generate."""
        return forecast().free().ends[:-1].tolist()

    def num_so_far(*numbers: int) -> float:
        return sum(99 + number for number in numbers) - sum(to_go())

    async with process.running() as readers:
        lines = readers.open(selection_of(path))
        taken = [line.number for _, line in await lines.read(5)]
        lines.note_progress({taken[0]: 7, taken[1]: 8, taken[2]: 9})
        lines.end(taken[0], 100)
        before, room = to_go(), forecast().free().most_output_tokens(0)
        assert (len(before), num_so_far(*taken[1:])) == (4, 17)
        process.die()
        await until(lambda: lines.is_indexed)
        assert to_go() == before
        assert forecast().free().most_output_tokens(0) == room
        lines.note_progress({taken[1]: 20, 99: 1})
        assert num_so_far(*taken[1:]) == 29
        lines.end(taken[1], 100)
        lines.end(taken[2], None)
        assert (len(to_go()), num_so_far(*taken[3:])) == (2, 0)
        ((_, last),) = await lines.read(1)
        lines.note_progress({last.number: 3})
        process.die()
        await until(lambda: lines.is_indexed)
        assert (len(to_go()), num_so_far(*taken[3:], last.number)) == (3, 3)
        lines.close()
        assert to_go() == []
    assert process.num_prepared.total() > len(process.num_prepared) == 20


async def test_lengths_of_a_file_s_lines_are_read_once_by_each_process(tmp_path: Path) -> None:
    """A reader that is closed early, or a process that ends, loses none."""
    process = Process("blend")
    path = write(tmp_path / "in", *[[n] for n in range(4)])
    selection = selection_of(path, done=b"\6", observed={1: 9, 2: 9})

    def num_read() -> int:
        return process.num_prepared["[0]"] + process.num_prepared["[1]"]

    async with process.running(allowed=False) as readers:
        readers.open(selection).close()
        lines = readers.open(selection)
        readers.restart()  # the first process is ready
        assert readers.open(selection).observed == {}, "an open file has them"
        readers.allow()
        await until(lambda: lines.is_indexed)
        assert num_read() == 2
        again = readers.open(selection)
        await until(lambda: again.is_indexed)
        assert (num_read(), again.observed) == (2, {})
        assert readers.open(selection_of(path, done=b"\x0e", observed={1: 9, 3: 1})).observed == {3: 1}
        process.die()
        await until(lambda: lines.is_indexed)
        assert num_read() == 4
        lines.close()
        process.die()
        assert readers.open(selection).observed == {1: 9, 2: 9}


async def test_an_observed_line_that_ends_the_process_is_not_read_again(tmp_path: Path) -> None:
    process = Process("blend")
    path = write(tmp_path / "in", [66666], [1], [2])
    async with process.running() as readers:
        lines = readers.open(selection_of(path, done=b"\6", observed={1: 9, 2: 9}))
        assert numbers(await rest(lines)) == [3]
    assert (process.num_deaths, lines.unprepared) == (2, frozenset())
