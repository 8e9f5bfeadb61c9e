"""The ends of ``LocalRun``, on an engine that runs nothing."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest

from backfill.core.config import EngineConfig, SchedulerConfig
from backfill.core.errors import ConfigError, EngineDead
from backfill.jobs.feed import InputChanged
from backfill.jobs.lines import LineResult
from backfill.jobs.local_files import RunFiles, digest_of
from backfill.jobs.local_run import LocalRun
from backfill.jobs.results import ResultLog
from backfill.preparation.lines import BadLine
from backfill.preparation.messages import LineSelection, PreparationSetup
from backfill.preparation.supervisor import PreparationDied
from backfill.protocol.generation import Generation
from backfill.protocol.preparer import ServedModel
from backfill.protocol.service import TokenCount
from tests.api.batch_inputs import parse_jsonl
from tests.jobs.doubles import InThreadLines, InThreadReader, input_of
from tests.patience import TIMEOUT_S, until
from tests.preparation.facts import FACTS
from tests.protocol.builders import make_generation

pytestmark = pytest.mark.anyio

NUM_LINES, NUM_SEQS, NUM_BEGUN = 20, 4, 3


class Lines:
    """Runs lines, of which the first ``NUM_BEGUN`` get a token, until they may end."""

    def __init__(self) -> None:
        self.running: list[asyncio.Future[dict[str, Any]]] = []
        self.num_aborted = 0
        self.may_end = False

    async def run_whole(self, generation: Generation, *, count: TokenCount) -> dict[str, Any]:
        if self.may_end:
            return {}
        if len(self.running) < NUM_BEGUN:
            count.num_tokens = 1
        end: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.running.append(end)
        try:
            return await end
        except asyncio.CancelledError:
            self.num_aborted += 1
            raise


class Preparation:
    """Prepares lines in a thread.

    Attributes:
        error: of every read, where there is one.
    """

    def __init__(self) -> None:
        self.files = self
        self.error: Exception | None = None

    def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def wait_ready(self) -> None: ...

    def open_lines(self, selection: LineSelection) -> InThreadLines:
        lines = InThreadReader(lambda *_: make_generation()).open_lines(selection)
        if self.error is not None:
            lines._read = mock.Mock(side_effect=self.error)
        return lines


class Processes:
    """Processes that are none. With ``lines`` None the engine loads for ever.

    Attributes:
        ends: of the engine, whether at once.
    """

    def __init__(self, lines: Lines | None) -> None:
        self.preparation = Preparation()
        self.ends: list[bool] = []
        self._lines = lines

    def start(self, *, on_ready: Callable[[Any], Awaitable[None]], on_lost: object) -> asyncio.Task[None]:
        async def supervise() -> None:
            if self._lines is not None:
                await on_ready(FACTS)
            await asyncio.Event().wait()

        self._supervising = asyncio.create_task(supervise())
        return self._supervising

    async def stop_engine(self, *, at_once: bool) -> None:
        self.ends.append(at_once)
        self._supervising.cancel()

    async def loaded(self) -> Any:
        return SimpleNamespace(engine_facts=FACTS)

    def configure(self, *_: object) -> None: ...

    def create_service(self, *_: object) -> Lines | None:
        return self._lines


class Run:
    """A run of the ``NUM_LINES`` lines in a folder."""

    def __init__(self, folder: Path, model: Path, lines: Lines | None, grace_s: float = TIMEOUT_S) -> None:
        self.lines, self._output = lines, folder / "out.jsonl"
        (folder / "in.jsonl").write_bytes(input_of(NUM_LINES))
        self.run = LocalRun(
            RunFiles(input=folder / "in.jsonl", output=self._output, errors=self._output),
            setup=PreparationSetup(
                model=ServedModel(names=("m",), root="m", folder=model, created=0), order="fcfs"
            ),
            engine_config=EngineConfig(scheduler=SchedulerConfig(max_num_seqs=NUM_SEQS)),
        )
        self.run.grace_s = grace_s
        self.processes = Processes(lines)
        self.run._processes = cast(Any, self.processes)
        self._running = asyncio.create_task(self.run.run())

    async def stopped(self, lines: Lines) -> None:
        """Stop it once as many lines are in the engine as may be; return when the rest of it is awaited."""
        await until(lambda: len(lines.running) == 2 * NUM_SEQS)
        assert self.run.num_begun == NUM_BEGUN
        self.run.stop()
        await until(lambda: lines.num_aborted >= 2 * NUM_SEQS - NUM_BEGUN)

    async def is_whole(self) -> bool:
        return await asyncio.wait_for(self._running, TIMEOUT_S)

    @property
    def parsed(self) -> list[dict[str, Any]]:
        return parse_jsonl(self._output.read_bytes())

    @property
    def results(self) -> set[str]:
        lines = self.parsed
        assert len({line["id"] for line in lines}) == len(lines)
        return {line["custom_id"] for line in lines}


async def goes_on(folder: Path, model: Path, num_resumed: int) -> None:
    """The next run runs what is left."""
    lines = Lines()
    lines.may_end = True
    run = Run(folder, model, lines)
    assert await run.is_whole()
    assert (run.run.num_resumed, len(run.results)) == (num_resumed, NUM_LINES)
    assert run.processes.ends == [False], "it is asked to end"


async def test_lines_that_have_begun_end_and_the_others_wait_for_the_next_run(
    tmp_path: Path, small_model: Path
) -> None:
    lines = Lines()
    run = Run(tmp_path, small_model, lines)
    await run.stopped(lines)
    for end in lines.running[:NUM_BEGUN]:
        end.set_result({})
    assert not await run.is_whole()
    assert len(lines.running) == 2 * NUM_SEQS, "none begins after the stop"
    assert (run.run.num_at_stop, run.run.num_dropped) == (NUM_BEGUN, 0)
    assert run.results == {f"r{number}" for number in range(NUM_BEGUN)}
    assert run.processes.ends == [True]
    await goes_on(tmp_path, small_model, NUM_BEGUN)


async def test_a_result_that_is_being_written_at_the_stop_is_not_dropped(
    tmp_path: Path, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, append = threading.Event(), ResultLog.append

    def append_slowly(log: ResultLog, results: Sequence[LineResult]) -> None:
        append(log, results)
        assert may_go_on.wait(TIMEOUT_S)

    monkeypatch.setattr(ResultLog, "append", append_slowly)
    lines = Lines()
    run = Run(tmp_path, small_model, lines)
    await until(lambda: len(lines.running) == 2 * NUM_SEQS)
    lines.running[0].set_result({})
    await until(lambda: run.run.counts.completed == 1)
    await run.stopped(lines)
    may_go_on.set()
    for end in lines.running[1:NUM_BEGUN]:
        end.set_result({})
    assert not await run.is_whole()
    assert (run.run.num_at_stop, run.run.num_dropped) == (NUM_BEGUN, 0)
    assert len(run.results) == NUM_BEGUN


async def test_lines_that_do_not_end_within_the_grace_are_dropped(tmp_path: Path, small_model: Path) -> None:
    lines = Lines()
    run = Run(tmp_path, small_model, lines, grace_s=0.1)
    await run.stopped(lines)
    assert not await run.is_whole()
    assert lines.num_aborted == 2 * NUM_SEQS
    assert (run.run.num_at_stop, run.run.num_dropped, run.run.counts.completed) == (NUM_BEGUN, NUM_BEGUN, 0)
    assert run.processes.ends == [True]
    await goes_on(tmp_path, small_model, 0)


async def test_lines_of_an_engine_that_dies_within_the_grace_are_dropped(
    tmp_path: Path, small_model: Path
) -> None:
    lines = Lines()
    run = Run(tmp_path, small_model, lines)
    await run.stopped(lines)
    lines.running[0].set_result({})
    await until(lambda: run.run.counts.completed == 1)
    for end in lines.running[1:NUM_BEGUN]:
        end.set_exception(EngineDead("killed", num_lost=2, num_others=1))
    assert not await run.is_whole()
    assert (run.run.num_at_stop, run.run.num_dropped) == (NUM_BEGUN, 2)
    assert run.results == {"r0"}
    await goes_on(tmp_path, small_model, 1)


async def test_a_run_that_is_stopped_while_the_engine_loads_has_begun_nothing(
    tmp_path: Path, small_model: Path
) -> None:
    run = Run(tmp_path, small_model, None)
    await until(lambda: run.run.phase == "loading the model")
    run.run.stop()
    assert not await run.is_whole()
    assert (run.run.speed, run.run.num_at_stop or 0, run.run.num_dropped) == (None, 0, 0)
    assert run.processes.ends == [True]
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (OSError(errno.EIO, os.strerror(errno.EIO)), ConfigError, "-i {path}: Input/output error."),
        (FileNotFoundError(errno.ENOENT, "gone"), ConfigError, "-i {path}: No such file or directory."),
        (PreparationDied("the process ended"), PreparationDied, "the process ended"),
        (InputChanged("It has fewer lines."), ConfigError, "{path}: It has fewer lines."),
        (
            BadLine("invalid_json_line", "It is no JSON.", 3),
            ConfigError,
            "{path} was changed while it ran: line 3: It is no JSON.",
        ),
    ],
)
async def test_lines_that_cannot_be_read_end_the_run_with_the_reason(
    tmp_path: Path, small_model: Path, error: Exception, kind: type[Exception], message: str
) -> None:
    run = Run(tmp_path, small_model, Lines())
    run.processes.preparation.error = error
    with pytest.raises(kind) as raised:
        await run.is_whole()
    assert str(raised.value) == message.format(path=tmp_path / "in.jsonl")
    assert run.processes.ends == [False]


async def test_a_run_needs_no_folder_but_that_of_its_output(
    tmp_path: Path, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    monkeypatch.setitem(sys.modules, "alembic", None)  # it takes most of a second to import
    others = tmp_path / "files" / "of-somebody-else"
    others.parent.mkdir()
    others.touch()
    os.utime(others, (0, 0))
    await goes_on(tmp_path, small_model, 0)
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl", "files"}
    assert others.exists()


async def test_losses_of_an_earlier_run_count_until_all_lines_have_results(
    tmp_path: Path, small_model: Path
) -> None:
    lines, number = Lines(), 5
    run = Run(tmp_path, small_model, lines)
    losses = tmp_path / "out.jsonl.suspects"
    losses.write_text(json.dumps({"name": digest_of(tmp_path / "in.jsonl"), "lines": {number: [2, 2, 0]}}))
    run.processes.preparation.error = PreparationDied("the process ended")
    with pytest.raises(PreparationDied):
        await run.is_whole()
    assert losses.exists()
    run = Run(tmp_path, small_model, lines)
    await until(lambda: len(lines.running) == 1)
    lines.may_end = True
    lines.running[0].set_exception(EngineDead("killed", num_lost=1, num_others=0))
    assert await run.is_whole()
    assert run.run.counts.failed == 1
    (failed,) = (line for line in run.parsed if line["error"] is not None)
    assert (failed["custom_id"], failed["error"]["code"]) == (f"r{number - 1}", "engine_error")
    assert not losses.exists()
