"""The jobs of the preparation process, without a process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backfill.preparation import process
from backfill.preparation.messages import (
    Bug,
    CancelCheck,
    CheckInput,
    CloseLines,
    InputLimits,
    InputReport,
    Job,
    JobBegun,
    JobDone,
    LineSelection,
    LinesRead,
    OpenLines,
    Position,
    PrepareBody,
    ReadLines,
)
from backfill.preparation.process import Preparation
from backfill.protocol.body_check import BodyCheck
from backfill.protocol.generation import Generation
from backfill.protocol.preparer import RequestContext
from tests.jobs.doubles import URL, input_of
from tests.preparation.test_line_file import generation_of

BODY = Job(1, PrepareBody("/v1/completions", b"{}", RequestContext()))


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

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.may_end.set()

    def prepare(self, endpoint: str, body: bytes, context: RequestContext) -> object:
        assert self.may_end.wait(60)
        return generation_of(context)


@pytest.fixture
def channel() -> Channel:
    return Channel()


@pytest.fixture
def preparer(channel: Channel) -> Any:
    double: Any = Preparer()
    as_channel: Any = channel
    running = threading.Thread(target=Preparation(as_channel, double).run)
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


def test_lines_of_a_reader_that_was_closed_are_none(
    channel: Channel, preparer: Preparer, tmp_path: Path
) -> None:
    path = tmp_path / "in"
    path.write_bytes(input_of(3))
    selection = LineSelection(path=str(path), max_line_bytes=1000, names_only=True)
    channel.commands.put(OpenLines(7, selection, Position()))
    channel.commands.put(Job(1, ReadLines(7, 2)))
    read = channel.next_report()
    assert [line.number for line in read.result.lines] == [1, 2]
    channel.commands.put(CloseLines(7))
    channel.commands.put(Job(2, ReadLines(7, 2)))
    assert channel.next_report() == JobDone(2, LinesRead([], Position()))


def test_a_cancelled_check_stops_reading(channel: Channel, preparer: Preparer, tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(input_of(200_000))
    limits = InputLimits(endpoint=URL, model_names=("m",), max_lines=10**6, max_line_bytes=1000)
    channel.commands.put(Job(1, CheckInput(str(path), limits)))
    channel.commands.put(CancelCheck(1))
    checked = channel.next_report()
    assert isinstance(checked.result, InputReport)
    assert checked.result.total < 200_000
