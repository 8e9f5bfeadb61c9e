"""The jobs of the preparation process, without a process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backfill.preparation import process
from backfill.preparation.line_pool import LinePool
from backfill.preparation.messages import (
    START,
    Bug,
    CancelJob,
    CheckInput,
    CloseLines,
    EndLine,
    IndexLines,
    InputLimits,
    InputReport,
    Job,
    JobBegun,
    JobDone,
    LineSelection,
    LinesIndexed,
    LinesProgress,
    LinesTaken,
    OpenLines,
    PrepareBody,
    TakeLines,
)
from backfill.preparation.process import Preparation
from backfill.protocol.body_check import BodyCheck
from backfill.protocol.generation import Generation
from backfill.protocol.preparer import RequestContext, ServedModel
from tests.jobs.doubles import URL, input_line, input_of
from tests.preparation.facts import FACTS
from tests.preparation.test_line_file import generation_of


class Panic(BaseException):
    """As Rust's panics come: no Exception."""


BODY: Any = Job(1, PrepareBody("/v1/completions", b"{}", RequestContext()))


class Channel:
    """The server's end: commands it sends, reports it receives."""

    def __init__(self) -> None:
        self.commands: queue.Queue[Any] = queue.Queue()
        self.reports: queue.Queue[Any] = queue.Queue()
        self.refused: type | None = None

    def send(self, message: object) -> None:
        if (
            self.refused is not None
            and isinstance(message, JobDone)
            and isinstance(message.result, self.refused)
        ):
            raise TypeError("cannot be encoded")
        self.reports.put(message)

    def receive(self, between: Callable[[], None]) -> Any:
        while True:
            between()
            try:
                return self.commands.get(timeout=0.01)
            except queue.Empty:
                continue

    def next_report(self) -> Any:
        report = self.reports.get(timeout=60)
        return self.next_report() if isinstance(report, JobBegun) else report


class Preparer:
    facts = None
    line_check = BodyCheck()

    def __init__(self, folder: Path) -> None:
        self.model = ServedModel(names=("m",), root="m", folder=folder, created=0)
        self.engine_facts = FACTS
        self.may_end = threading.Event()
        self.may_end.set()
        self.panics = False

    def prepare(self, endpoint: str, body: bytes, context: RequestContext) -> object:
        if self.panics:
            raise Panic
        assert body != BODY.work.body or self.may_end.wait(60)
        return generation_of(context)


@pytest.fixture
def channel() -> Channel:
    return Channel()


@pytest.fixture
def preparer(channel: Channel, small_model: Path) -> Any:
    double: Any = Preparer(small_model)
    as_channel: Any = channel
    running = threading.Thread(target=Preparation(as_channel, double, "fcfs").run)
    running.start()
    yield double
    double.may_end.set()
    channel.commands.put(None)
    running.join()


def test_a_body_that_takes_too_long_ends_the_process(
    channel: Channel, preparer: Preparer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ended = threading.Event()
    monkeypatch.setattr(process.os, "_exit", lambda status: ended.set())
    channel.commands.put(BODY)
    assert isinstance(channel.next_report().result, Generation)
    assert not ended.is_set()
    preparer.may_end.clear()
    channel.commands.put(BODY)
    monkeypatch.setattr(process, "_MAX_WORK_S", 0.05)
    assert ended.wait(60)
    assert "prepare" in capfd.readouterr().err, "where it was"


def test_an_answer_that_cannot_be_sent_is_a_failed_job(channel: Channel, preparer: Preparer) -> None:
    channel.refused = Generation
    channel.commands.put(BODY)
    failed = channel.next_report()
    assert isinstance(failed, JobDone)
    assert isinstance(failed.result, Bug)


def test_a_panic_in_a_library_is_a_failed_job(channel: Channel, preparer: Preparer) -> None:
    preparer.panics = True
    channel.commands.put(BODY)
    assert isinstance(channel.next_report().result, Bug)


def test_bodies_that_nobody_waits_for_are_skipped(channel: Channel, preparer: Preparer) -> None:
    preparer.may_end.clear()
    work: Any = BODY.work
    for job_id in range(1, 6):  # two of them begin, in a thread each
        channel.commands.put(Job(job_id, work))
    for job_id in (3, 5):
        channel.commands.put(CancelJob(job_id))
    assert {channel.reports.get(timeout=60) for _ in range(2)} == {JobBegun(1), JobBegun(2)}
    channel.commands.put(Job(6, TakeLines("", 1)))
    assert channel.next_report().job_id == 6, "the jobs before it have been received"
    preparer.may_end.set()
    assert {channel.next_report().job_id for _ in range(3)} == {1, 2, 4}


@pytest.mark.parametrize("error", [MemoryError, Panic])
@pytest.mark.parametrize("job", [IndexLines(7, START, 10), TakeLines("", 10)])
def test_an_error_of_which_lines_may_be_lost_ends_the_process(
    channel: Channel,
    preparer: Preparer,
    monkeypatch: pytest.MonkeyPatch,
    job: IndexLines | TakeLines,
    error: type[BaseException],
) -> None:
    def fail(*_: object) -> None:
        raise error

    ended = threading.Event()
    monkeypatch.setattr(process.os, "_exit", lambda status: ended.set())
    monkeypatch.setattr(LinePool, "index", fail)
    monkeypatch.setattr(LinePool, "take", fail)
    channel.commands.put(Job(3, job))
    assert ended.wait(60)


def test_lines_are_indexed_and_taken_until_their_reader_is_closed(
    channel: Channel, preparer: Preparer, tmp_path: Path
) -> None:
    path = tmp_path / "in"
    path.write_bytes(input_of(5))
    channel.commands.put(OpenLines(7, LineSelection(path=str(path), max_line_bytes=1000)))
    channel.commands.put(Job(1, IndexLines(7, START, 3)))
    indexed = channel.next_report().result
    assert (indexed.num_lines, indexed.position.number, indexed.is_end) == (3, 3, False)
    channel.commands.put(Job(2, TakeLines("", 2)))
    taken = channel.next_report().result
    assert [(each.reader_id, each.line.number) for each in taken.lines] == [(7, 1), (7, 2)]
    channel.commands.put(LinesProgress(7, {1: 3, 99: 3}))
    channel.commands.put(EndLine(7, 1, 5))
    channel.commands.put(EndLine(7, 99, 5))
    channel.commands.put(CloseLines(7))
    channel.commands.put(Job(3, TakeLines("", 2)))
    assert channel.next_report() == JobDone(3, LinesTaken([]))
    channel.commands.put(Job(4, IndexLines(7, START, 3)))
    assert channel.next_report() == JobDone(4, LinesIndexed(0, START, is_end=True))


def test_a_cancelled_check_stops_reading(channel: Channel, preparer: Preparer, tmp_path: Path) -> None:
    path = tmp_path / "in"
    line = input_line(0).replace(b"r0", b"r%d")
    path.write_bytes(b"".join(line % number for number in range(100_000)))
    limits = InputLimits(endpoint=URL, model_names=("m",), max_lines=10**6, max_line_bytes=1000)
    channel.commands.put(Job(1, CheckInput(str(path), limits)))
    assert channel.reports.get(timeout=60) == JobBegun(1)
    channel.commands.put(CancelJob(1))
    checked = channel.next_report()
    assert isinstance(checked.result, InputReport)
    assert checked.result.total < 100_000
