"""``backfill run-batch``, with a small model."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from backfill.cli.run_batch import _run
from backfill.core.clock import VirtualClock
from backfill.core.config import EngineConfig, SchedulerConfig
from backfill.core.errors import ConfigError
from backfill.engine.engine import Engine
from backfill.execution.create import create_torch_executor
from backfill.jobs import feeder
from backfill.jobs.local_files import check_tail, locked
from backfill.jobs.records import RequestCounts
from backfill.jobs.results import ForeignResults
from backfill.preparation.serving import ServingProcesses
from tests.api.batch_inputs import as_jsonl, chat_line, completion_line, parse_jsonl
from tests.api.servers import MODEL, SMALL_MODEL, TIMEOUT_S, wait_until
from tests.builders import make_request
from tests.cli.running import run_cli_here, signal_handlers_kept

# Of the run that a signal ends: more than it has computed by then, also if this process is stalled.
NUM_LINES = 100


class Folder:
    """An input file, where its results go, and the command between them."""

    def __init__(self, path: Path, model: Path) -> None:
        self.input, self.output, self.errors = path / "in.jsonl", path / "out.jsonl", path / "errors.jsonl"
        self._model = ("--model", str(model), *SMALL_MODEL)

    def arguments(self, *options: str) -> Sequence[str]:
        if "--served-model-name" not in options:
            options += ("--served-model-name", MODEL)
        return ("run-batch", "-i", str(self.input), "-o", str(self.output), *self._model, *options)

    def command(self, *options: str) -> Sequence[str]:
        return [sys.executable, "-m", "backfill", *self.arguments(*options)]

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*options), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )

    def run_here(self, *options: str) -> subprocess.CompletedProcess[str]:
        """In this process, seconds sooner; the engine and the preparation have theirs as always."""
        return run_cli_here(*self.arguments(*options))

    def start(self, *options: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def start_without_stderr(self, *options: str) -> subprocess.Popen[str]:
        """With standard error closed."""
        return subprocess.Popen(
            ["bash", "-c", 'exec "$@" 2>&-', "bash", *self.command(*options)],
            stdout=subprocess.DEVNULL,
            text=True,
        )

    def num_results(self) -> int:
        return self.output.read_bytes().count(b"\n") if self.output.exists() else 0


@pytest.fixture
def folder(small_model: Path, tmp_path: Path) -> Folder:
    return Folder(tmp_path, small_model)


def summary(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return parsed


def test_every_line_is_answered_and_a_second_run_has_nothing_to_do(folder: Folder) -> None:
    folder.input.write_bytes(
        as_jsonl([chat_line("chat", "What is gravity?"), completion_line("text"), chat_line("more")]) + b"\n"
    )
    result = folder.run_here("--json")
    assert result.returncode == 0, result.stderr
    output = {line["custom_id"]: line for line in parse_jsonl(folder.output.read_bytes())}
    assert output.keys() == {"chat", "text", "more"}
    assert output["chat"]["response"]["body"]["object"] == "chat.completion"
    assert output["text"]["response"]["body"]["object"] == "text_completion"
    assert "3 of 3 lines: 3 completed, 0 failed" in result.stderr
    facts = summary(result)
    assert (facts["total"], facts["completed"], facts["failed"], facts["resumed"]) == (3, 3, 0, 0)
    assert facts["output_tokens"] == sum(
        line["response"]["body"]["usage"]["completion_tokens"] for line in output.values()
    )
    before = folder.output.read_bytes()
    folder.input.write_bytes(folder.input.read_bytes() + b"\n  \n")
    again = folder.run_here("--json")
    assert again.returncode == 0
    assert folder.output.read_bytes() == before
    assert summary(again)["resumed"] == 3
    assert "3 completed, 0 failed (3 of them in an earlier run);" in again.stderr


@pytest.mark.slow
def test_failed_lines_of_a_shard_go_into_their_own_file_and_it_goes_on_where_it_was(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Meanwhile the pool learns how far lines are."""
    monkeypatch.setattr(feeder, "PROGRESS_PERIOD_S", 0.002)  # this run takes less than a second
    good = [
        completion_line(f"r{number}", f"{number % 4} " * 9, max_tokens=56 + number % 5, ignore_eos=True)
        for number in range(20)
    ]
    folder.input.write_bytes(as_jsonl([*good, chat_line("long", "x " * 500)]))
    shard = ("--json", "--error-file", str(folder.errors), "--shards", "2", "--shard", "0")
    short = ("--max-model-len", "256", "--log-level", "debug", "--order", "blend")
    done = folder.run_here(*shard, *short)
    assert done.returncode == 3
    assert "1 failed with context_length_exceeded: line 21\n" in done.stderr
    assert f"all errors are in {folder.errors}; a line whose error is deleted there" in done.stderr
    found = {line["custom_id"] for line in parse_jsonl(folder.output.read_bytes())}
    assert found < {line["custom_id"] for line in good}
    num_lines = len(found) + 1
    assert summary(done)["total"] == num_lines > 4
    (failed,) = parse_jsonl(folder.errors.read_bytes())
    assert failed["response"]["body"]["error"]["code"] == "context_length_exceeded"
    reports = re.findall(r"preparation of files: (\d+) of (\d+) running lines", capfd.readouterr().err)
    assert any(0 < int(num_known) == int(num_running) for num_known, num_running in reports)

    kept = folder.output.read_bytes().splitlines(keepends=True)[:3]
    folder.output.write_bytes(b"".join(kept))
    folder.errors.write_bytes(b"")
    again = folder.run_here(*shard)
    assert f"{num_lines} of {num_lines} lines, part 0 of 2: {num_lines} completed, 0 failed" in again.stderr
    assert "failed (3 of them in an earlier run);" in again.stderr
    assert (summary(again)["total"], summary(again)["resumed"]) == (num_lines, 3)
    assert folder.output.read_bytes().startswith(b"".join(kept))

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an engine is started")

    monkeypatch.setattr(ServingProcesses, "start", refuse)
    finished = folder.run_here(*shard)
    assert finished.returncode == 0, finished.stderr
    assert summary(finished)["total"] == summary(finished)["resumed"] == num_lines
    refused = folder.run_here("--shards", "3", "--shard", "0")
    assert refused.returncode == 1
    assert "another -o, or delete it" in refused.stderr


def test_a_bad_input_is_listed_and_nothing_runs(folder: Folder) -> None:
    bad = as_jsonl([chat_line("a"), chat_line("b", messages="hi"), chat_line("c", stream=True)])
    folder.input.write_bytes(as_jsonl([chat_line("a")]) + b"oops\n" + bad + b"[1]\n")
    result = folder.run_here()
    assert result.returncode == 1
    assert [f"line {number}: " in result.stderr for number in range(1, 7)] == [False, *[True] * 5]
    assert "line 6: This line must be a JSON object, got an array." in result.stderr
    assert "Traceback" not in result.stderr
    assert not folder.output.exists()


def test_a_strict_run_refuses_fields_without_an_effect(folder: Folder) -> None:
    folder.input.write_bytes(as_jsonl([chat_line("a"), chat_line("b", max_tokns=3)]))
    result = folder.run_here("--strict")
    assert result.returncode == 1
    assert "line 2: Unknown parameter: max_tokns (did you mean max_tokens?)." in result.stderr
    assert not folder.output.exists()


@pytest.mark.parametrize("content", ["no results", '{"an": "object"}\n', '{"id": "batch_req_other_1"}\n'])
def test_an_output_that_is_no_result_of_this_input_is_left_alone(folder: Folder, content: str) -> None:
    folder.input.write_bytes(as_jsonl([chat_line("a")]))
    folder.output.write_text(content)
    result = folder.run_here()
    assert result.returncode == 1
    assert "out.jsonl" in result.stderr
    assert "another -o, or delete it" in result.stderr
    assert "Traceback" not in result.stderr
    assert folder.output.read_text() == content


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("-o", "{folder}/in.jsonl"), "is the input file"),
        (("-o", "/no/such/folder/out.jsonl"), "-o /no/such/folder/out.jsonl: No such file or directory."),
        (("-o", "{folder}"), "-o {folder}: Is a directory."),
        (("--error-file", "/no/such/folder/e.jsonl"), "--error-file /no/such/folder/e.jsonl: No such file"),
        (("-i", "/no/such/file"), "-i /no/such/file: No such file or directory."),
        (("--kv-gib", "-1"), "--kv-gib"),
        (("--order", "best"), "--order must be fcfs, dfs, random, batchllm or blend, got 'best'"),
        (("--shards", "0"), "--shards must be at least 1"),
        (("--shards", "2"), "--shard is needed with --shards: from 0 to 1."),
        (("--shard", "1"), "--shards is needed with --shard: the number of parts."),
        (("--shards", "2", "--shard", "2"), "--shard must be from 0 to 1, one less than --shards, got 2."),
        (("--model", "no-such-model"), "no-such-model"),
        (("--served-model-name", "gpt-4o"), "--served-model-name"),
        (("-i", "-"), "-i - is no file"),
        (("-o", "-"), "-o - is no file"),
    ],
)
def test_a_run_that_cannot_be_says_why_in_a_line(folder: Folder, options: tuple[str, ...], part: str) -> None:
    content = as_jsonl([chat_line("a")])
    folder.input.write_bytes(content)
    result = folder.run_here(*(option.format(folder=folder.input.parent) for option in options))
    assert result.returncode == 1
    assert part.format(folder=folder.input.parent) in result.stderr
    assert "Traceback" not in result.stderr
    assert folder.input.read_bytes() == content


@pytest.mark.slow  # in one process, with other reasons: tests/cli/test_serve.py
def test_a_run_whose_engine_cannot_start_says_why_in_a_line(
    folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    folder.input.write_bytes(as_jsonl([chat_line("a"), chat_line("b", max_tokns=3)]))
    result = folder.run_here("--device-memory", "0.001")
    assert result.returncode == 1
    assert "line 2: unknown fields: max_tokns" in caplog.text
    assert "--device-memory 0.001 GiB is too small" in result.stderr
    assert "Traceback" not in result.stderr
    assert not folder.output.exists()


@pytest.mark.slow
def test_a_run_that_was_stopped_or_killed_goes_on_where_it_was(folder: Folder) -> None:
    """Its engine is killed too. The second run has no standard error, the third one offloaded layers."""
    folder.input.write_bytes(
        as_jsonl(  # lines that run side by side do not end together
            completion_line(str(number), max_tokens=50 + 37 * number % 40, ignore_eos=True)
            for number in range(NUM_LINES)
        )
    )
    few = ("--max-num-seqs", "2", "--log-level", "INFO")
    process = folder.start(*few)
    wait_until(lambda: folder.num_results() > 2, "results")
    refused = folder.run_here()
    assert refused.returncode == 1
    assert "another run-batch" in refused.stderr
    os.kill(engine_pid(process.pid), signal.SIGKILL)
    before = folder.num_results()
    wait_until(lambda: folder.num_results() > before + 8, "results of the next engine")
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 143, stderr
    assert re.search(r"stopping: [1-4] lines that have begun have 8 s to end; another signal", stderr)
    assert "Interrupted: all lines that had begun have ended. The same command goes on from here." in stderr
    num_done = folder.num_results()
    assert 0 < num_done < NUM_LINES
    process = folder.start_without_stderr(*few)
    wait_until(lambda: folder.num_results() > num_done + 2, "results")
    process.kill()
    process.wait()
    num_done = folder.num_results()
    with folder.output.open("ab") as output:
        output.write(folder.output.read_bytes()[:60])  # as if killed within a line
    result = folder.run("--json", "--offload-interval", "1")
    assert (result.returncode, result.stderr.count("Traceback")) == (0, 0), result.stderr
    facts = summary(result)
    assert facts["resumed"] == num_done < NUM_LINES
    assert "Offload interval 1 was used." in result.stderr
    assert facts["offload_interval"] == facts["least_offload_interval"] == 1
    lines = parse_jsonl(folder.output.read_bytes())
    assert sorted(int(line["custom_id"]) for line in lines) == list(range(NUM_LINES))


class SignalledRun:
    """A run that a signal stops, or two end; without any, all its lines are answered."""

    speed, is_stopping, phase, order = None, False, "loading", "fcfs"
    planned, num_in_flight, num_begun = None, 0, 0

    def __init__(self, numbers: Sequence[signal.Signals]) -> None:
        self.counts = RequestCounts(1)
        self.calls: list[str] = []
        self._numbers = numbers

    def stop(self) -> None:
        self.calls.append("stop")

    def abandon(self) -> None:
        self.calls.append("abandon")

    async def run(self) -> bool:
        for count, number in enumerate(self._numbers, start=1):
            os.kill(os.getpid(), number)
            while len(self.calls) < count:
                await asyncio.sleep(0.001)
        return not self._numbers


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_run_at_once(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    for numbers, calls in (([number], ["stop"]), ([number, signal.SIGINT], ["stop", "abandon"])):
        run: Any = SignalledRun(numbers)
        with signal_handlers_kept():
            assert asyncio.run(_run(run, Console(file=io.StringIO()))) is number
        assert run.calls[: len(calls)] == calls  # a process that has ended calls nothing more
    assert statuses == [1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_after_all_lines_are_answered_changes_nothing(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    run: Any = SignalledRun([])
    with signal_handlers_kept():
        assert asyncio.run(_run(run, Console(file=io.StringIO()))) is None
        os.kill(os.getpid(), number)
    assert statuses == []


def engine_pid(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return next(
        int(child) for child in children if "backfill-engine" in Path(f"/proc/{child}/cmdline").read_text()
    )


@pytest.mark.parametrize(
    ("tail", "is_torn"),
    [(tail, True) for tail in (b"", b'{"id":"batch', b'{"id":"batch_req_x_7","cust', b"\0\0\0")]
    + [(tail, False) for tail in (b"text", b'{"id":"batch_req_y_7"', b"x" * (3 << 20))],
)
@pytest.mark.parametrize("whole", [b"", b"whole line\n", b"x" * (1 << 20) + b"\n", b"\n" + b"y" * 99 + b"\n"])
def test_only_a_torn_result_may_be_cut_off(tmp_path: Path, whole: bytes, tail: bytes, is_torn: bool) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(whole + tail)
    with contextlib.nullcontext() if is_torn else pytest.raises(ForeignResults):
        check_tail(path, b'{"id":"batch_req_x_')
    assert path.read_bytes() == whole + tail


def test_a_locked_file_is_refused_until_it_is_released(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with locked(path), pytest.raises(ConfigError, match="another run-batch"), locked(path):
        pass
    with locked(path):
        pass


@pytest.mark.parametrize("content", [None, b"", b"a result\n"])
def test_a_refused_run_leaves_no_empty_file(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "out.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="refused"), locked(path):
        raise ConfigError("refused")
    assert (path.read_bytes() if path.exists() else None) == content


# Prompts that share prefixes of several lengths.
_PROMPTS = {
    f"line-{number}": [*range(100, 120 + 17 * (1 + number % 3)), 1000 + number // 3] for number in range(24)
}


def num_output_tokens(custom_id: str) -> int:
    return 4 if custom_id.endswith(("1", "3", "5", "7", "9")) else 12


def answers_without_a_cache(model: Path) -> dict[str, list[int]]:
    config = EngineConfig(model_dir=str(model), dtype="float32", kv_gib=0.05, device="cpu", threads=1)
    scheduling = SchedulerConfig(prefix_caching=False)
    engine = Engine(scheduling, create_torch_executor(config), VirtualClock())
    requests = {
        name: make_request(max_tokens=num_output_tokens(name), prompt_token_ids=prompt, ignore_eos=True)
        for name, prompt in _PROMPTS.items()
    }
    for request in requests.values():
        engine.add(request)
    while engine.has_unfinished:
        engine.step()
    return {name: request.output_token_ids for name, request in requests.items()}


@pytest.mark.slow  # test_pressure.py is quick
def test_answers_are_the_same_in_another_order_and_with_a_cache(folder: Folder, small_model: Path) -> None:
    lines = [
        completion_line(
            name, prompt, max_tokens=num_output_tokens(name), ignore_eos=True, return_token_ids=True
        )
        for name, prompt in _PROMPTS.items()
    ]
    folder.input.write_bytes(as_jsonl(lines))
    # The pool is smaller than what the lines need, so that content is evicted.
    run = folder.run_here("--kv-gib", "0.00045", "--max-num-seqs", "4", "--order", "blend")
    assert run.returncode == 0, run.stderr
    found = parse_jsonl(folder.output.read_bytes())
    assert {
        line["custom_id"]: line["response"]["body"]["choices"][0]["token_ids"] for line in found
    } == answers_without_a_cache(small_model)
