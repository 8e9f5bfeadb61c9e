"""A model in the terminal."""

from __future__ import annotations

import asyncio
import io
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backfill.cli.chat import AnswerOptions, Chat
from backfill.cli.chat import chat as converse
from backfill.core.errors import RequestError
from backfill.engine.options import ModelOptions
from tests.cli.running import TIMEOUT_S, run_cli_here

OPTIONS = ("--temperature", "0")


class FakeLLM:
    """Answers in two parts, and fails after the first one where it is asked to."""

    def __init__(self, model: str, revision: str | None) -> None:
        self.seen: list[list[str]] = []

    async def start(self) -> None: ...
    async def shutdown(self) -> None: ...

    async def chat(self, messages: list[dict[str, str]], sampling: object) -> AsyncIterator[Any]:
        self.seen.append([each["content"] for each in messages])
        fails = messages[-1]["content"]
        if fails == "fail at once":
            raise RequestError("too long", code="context_length_exceeded")
        yield SimpleNamespace(outputs=[SimpleNamespace(text="one ")])
        if fails == "fail later":
            raise RequestError("lost")
        if fails == "stop":
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # as a busy machine may deliver it
            await asyncio.sleep(60)
        yield SimpleNamespace(outputs=[SimpleNamespace(text="two")])


def test_a_conversation_has_the_questions_that_were_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backfill.cli.chat.AsyncLLM", FakeLLM)
    with Chat(ModelOptions(), AnswerOptions(system="be short")) as chat:
        chat.ask("first")
        for question in ("fail at once", "fail later"):
            with pytest.raises(RequestError):
                chat.ask(question)
        with pytest.raises(KeyboardInterrupt):  # so that `run` ends with status 130
            chat.ask("stop")
        chat.ask("last")
        chat.clear()
        chat.ask("new")
        seen = chat.llm.seen  # type: ignore[attr-defined]
    assert seen[-1] == ["be short", "new"]
    assert seen[-2] == ["be short", "first", "one two", "fail later", "one ", "stop", "one ", "last"]


def test_a_full_context_is_no_fault_of_the_question_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("backfill.cli.chat.AsyncLLM", FakeLLM)
    monkeypatch.setattr(sys, "stdin", io.StringIO("fail at once\nfail later\n"))
    converse(ModelOptions(), AnswerOptions())
    told = capsys.readouterr().err.splitlines()
    assert told == [
        "backfill: too long",
        "The conversation counts too; /clear forgets it.",
        "backfill: lost",
    ]


@pytest.mark.slow  # the command: below, and its model: tests/llm
def test_one_prompt_is_answered(small_model: Path) -> None:
    answer = run_cli_here("run", "Why?", "--model", str(small_model), "--max-tokens", "4", *OPTIONS)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip()


def test_a_prompt_may_come_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = FakeLLM("m", None)
    monkeypatch.setattr("backfill.cli.chat.AsyncLLM", lambda *_, **__: llm)
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is gravity?"))
    assert run_cli_here("run").stdout == "one two\n"
    assert llm.seen == [["What is gravity?"]]


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (("run", " "), "--prompt is empty."),
        (("run", "caf\udce9"), "--prompt must be UTF-8."),
        (("run", "x", "--temperature", "-1"), "--temperature must be between 0 and 2"),
        (("chat", "--max-tokens", "0"), "--max-tokens must be at least 1"),
        (("chat", "no-such-model"), "no model 'no-such-model'"),
    ],
)
def test_wrong_options_are_named(arguments: tuple[str, ...], wrong: str) -> None:
    done = run_cli_here(*arguments)
    assert (done.returncode, done.stderr.startswith(f"backfill: {wrong}")) == (1, True), done.stderr


@pytest.mark.slow
def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(small_model: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "backfill", "chat", str(small_model), *OPTIONS]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, start_new_session=True
    )
    os.close(theirs)

    def read_to(end: bytes) -> bytes:
        text = b""
        while end not in text:
            text += os.read(ours, 4096)
        return text

    try:
        read_to(b">>> ")
        os.write(ours, b"Count to one thousand.\n")
        shown = b""
        while len(shown) < 60:  # the question, as the terminal shows it, and some of the answer
            shown += os.read(ours, 4096)
        process.send_signal(signal.SIGINT)
        read_to(b">>> ")
        os.write(ours, b"/bye\n")
        assert process.wait(TIMEOUT_S) == 0
    finally:
        process.kill()
        os.close(ours)
