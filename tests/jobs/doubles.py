"""A runner without an engine, and batches as the tests need them."""

from __future__ import annotations

import asyncio
import atexit
import functools
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import Engine

from backfill.blending.resources import ResourceModel
from backfill.jobs import database, storage
from backfill.jobs.config import JobsConfig
from backfill.jobs.database import open_database
from backfill.jobs.feed import LineSource
from backfill.jobs.lines import LineResult, completed
from backfill.jobs.manager import JobManager
from backfill.jobs.records import BatchRecord, BatchStatus, FileRecord
from backfill.preparation.division import Division
from backfill.preparation.line_file import LineFile, Prepare, read_names
from backfill.preparation.lines import BatchLine
from backfill.preparation.messages import START, InputLimits, InputReport, LineSelection
from backfill.preparation.validation import InputCheck
from backfill.protocol.body_check import BodyCheck
from backfill.protocol.service import CompletionService, TokenCount
from tests.patience import TIMEOUT_S, until

OWNER = "owner"
RESOURCES = ResourceModel(token_s=5.1e-5, prompt_pair_s=1.7e-9, cached_token_s=6.4e-8)
URL = "/v1/completions"
Start = Callable[..., Awaitable[JobManager]]  # the fixture ``start``
# Of every manager. The fixture ``each_database`` changes it.
DEFAULT_LIMITS: dict[str, Any] = {"batch_min_free_gib": 0}  # no test depends on the free space of the disk


@functools.cache
def empty_database() -> Engine:
    """For copies of it, and what it knows of statements: to compile them would take most of the time."""
    folder = Path(tempfile.mkdtemp(prefix="backfill-empty-"))
    atexit.register(shutil.rmtree, folder)
    engine = open_database(f"sqlite:///{folder / 'jobs.db'}", folder)
    engine.dispose()
    return engine


def make_storage_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for the disk, and SQLite databases know the statements of those before them."""
    configure = database._configure_sqlite

    def configure_quickly(connection: Any, record: object) -> None:
        configure(connection, record)
        connection.execute("PRAGMA synchronous=OFF")

    def open_quickly(url: str | None, data_dir: Path) -> Engine:
        engine = open_database(url, data_dir)
        if engine.dialect.name == "sqlite":
            known = empty_database()
            engine.dialect, engine._compiled_cache = known.dialect, known._compiled_cache
        return engine

    monkeypatch.setattr(database, "_configure_sqlite", configure_quickly)
    monkeypatch.setattr(storage, "open_database", open_quickly)
    monkeypatch.setattr("os.fsync", lambda _: None)


class InstantRunner:
    """Answers every line; from ``hold`` to ``release`` none."""

    def __init__(self) -> None:
        self.runs: Counter[str] = Counter()
        self.held: set[str] = set()
        self._gate = asyncio.Event()
        self._gate.set()

    def hold(self) -> None:
        self._gate.clear()

    def release(self) -> None:
        self._gate.set()

    async def run(self, line: BatchLine, count: TokenCount | None = None, **_: object) -> LineResult:
        self.held.add(line.custom_id)
        await asyncio.sleep(0)
        await self._gate.wait()
        self.held.discard(line.custom_id)
        self.runs[line.custom_id] += 1
        return completed(line, {"usage": {"prompt_tokens": 2, "completion_tokens": 1}})


class InThreadReader:
    """Reads input files in a thread. Bodies stay unread without ``prepare``."""

    def __init__(self, prepare: Prepare | None = None) -> None:
        self.selections: list[LineSelection] = []
        self.opened: list[InThreadLines] = []
        self._prepare = prepare

    async def check_input(self, path: str, limits: InputLimits) -> InputReport:
        return await asyncio.to_thread(self._check, Path(path), limits)

    def open_lines(self, selection: LineSelection) -> InThreadLines:
        self.selections.append(selection)
        self.opened.append(InThreadLines(selection, self._prepare))
        return self.opened[-1]

    def _check(self, path: Path, limits: InputLimits) -> InputReport:
        division = Division("blend", RESOURCES) if limits.divides else None
        with closing(InputCheck(path, limits, BodyCheck(), division)) as check:
            while not check.advance():
                pass
            return check.report


class InThreadLines:
    """In the order of the file."""

    def __init__(self, selection: LineSelection, prepare: Prepare | None) -> None:
        self.ended: dict[int, int | None] = {}  # by number: output tokens
        self.progress: dict[int, int] = {}
        selection = msgspec.structs.replace(selection, observed={})  # no pool estimates anything
        self._read = partial(read_names, selection) if prepare is None else LineFile(selection, prepare).read
        self._position = START

    async def read(self, max_lines: int) -> list[tuple[LineSource, BatchLine]]:
        found = await asyncio.to_thread(self._read, self._position, max_lines)
        self._position = found.position
        return [(self, line) for line in found.lines]

    def end(self, number: int, num_output_tokens: int | None) -> None:
        assert number not in self.ended, "each line ends once"
        self.ended[number] = num_output_tokens

    def note_progress(self, num_output_tokens: Mapping[int, int]) -> None:
        self.progress.update(num_output_tokens)

    def close(self) -> None:
        pass


def input_line(index: int, **changes: Any) -> bytes:
    line = {"custom_id": f"r{index}", "method": "POST", "url": URL, "body": {"prompt": "x"}, **changes}
    return json.dumps(line).encode() + b"\n"


def input_of(num_lines: int) -> bytes:
    return b"".join(input_line(index) for index in range(num_lines))


def make_manager(
    folder: Path,
    runner: Any,
    *,
    reader: InThreadReader | None = None,
    num_in_flight: int = 4,
    limits: Mapping[str, Any] | None = None,
    **options: Any,
) -> JobManager:
    values = {**DEFAULT_LIMITS, **(limits or {})}
    config = JobsConfig(data_dir=folder, max_in_flight=num_in_flight, **values)
    return JobManager(
        config, reader or InThreadReader(), model_names=["m", "alias"], runner=runner, **options
    )


async def started(folder: Path, runner: Any = None, **options: Any) -> JobManager:
    """A manager that has its data folder. ``options`` as for ``make_manager``."""
    manager = make_manager(folder, runner or InstantRunner(), **options)
    await manager.start()
    return manager


def ready(manager: JobManager) -> None:
    """An engine is ready. The doubles' runners need no service."""
    service: Any = object.__new__(CompletionService)
    manager.engine_ready(service, max_num_seqs=1)


async def store_input(manager: JobManager, content: bytes, purpose: str = "batch", owner: str = OWNER) -> str:
    upload = await manager.files.begin_upload(owner)
    try:
        await upload.write(content)
        return (await upload.finish(filename="in.jsonl", purpose=purpose, expires_after_s=None)).id
    except BaseException:
        await upload.abort()
        raise


async def create(manager: JobManager, file_id: str, owner: str = OWNER, window_s: int = 3600) -> BatchRecord:
    return await manager.create_batch(
        owner,
        input_file_id=file_id,
        endpoint=URL,
        completion_window="1h",
        completion_window_s=window_s,
        metadata=None,
        output_expires_after_s=None,
    )


async def submit(
    manager: JobManager, content: bytes, window_s: int = 3600, owner: str = OWNER
) -> BatchRecord:
    return await create(manager, await store_input(manager, content, owner=owner), owner, window_s)


async def run_batch(manager: JobManager, content: bytes, window_s: int = 3600) -> BatchRecord:
    """Submit a batch and wait for its end."""
    return await ended(manager, (await submit(manager, content, window_s)).id)


async def ended(manager: JobManager, batch_id: str, owner: str = OWNER) -> BatchRecord:
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            batch = await manager.get_batch(owner, batch_id)
            if batch.status.is_final:
                return batch
            await asyncio.sleep(0.005)


async def in_status(
    manager: JobManager, batch_id: str, status: BatchStatus, owner: str = OWNER
) -> BatchRecord:
    async with asyncio.timeout(TIMEOUT_S):
        while (batch := await manager.get_batch(owner, batch_id)).status is not status:
            await asyncio.sleep(0.002)
        return batch


async def until_some_done(manager: JobManager, batch: BatchRecord, num_lines: int = 1) -> None:
    async def are_done() -> bool:
        return (await manager.get_batch(OWNER, batch.id)).request_counts.completed >= num_lines

    await until(are_done)


async def hold_after(manager: JobManager, runner: InstantRunner, batch: BatchRecord, num_lines: int) -> None:
    """Let about so many lines have results; the others wait in the engine."""
    async with asyncio.timeout(TIMEOUT_S):
        while runner.runs.total() < num_lines:
            await asyncio.sleep(0)
    runner.hold()
    await until_some_done(manager, batch, num_lines)


async def content_of(manager: JobManager, record: FileRecord) -> bytes:
    download = await manager.files.open(record)
    try:
        return b"".join([chunk async for chunk in download.chunks()])
    finally:
        await download.close()


async def results_of(manager: JobManager, batch: BatchRecord) -> tuple[list[Any], list[Any]]:
    """Lines of the output file and of the error file."""
    found = []
    for file_id in (batch.output_file_id, batch.error_file_id):
        lines: list[Any] = []
        if file_id is not None:
            record = await manager.files.get(OWNER, file_id)
            content = await content_of(manager, record)
            assert len(content) == record.num_bytes
            lines = [json.loads(line) for line in content.splitlines()]
        found.append(lines)
    return found[0], found[1]


async def check_accounts(manager: JobManager, batch: BatchRecord, num_lines: int) -> None:
    """Every input line has exactly one result line, and the counts say so."""
    output, errors = await results_of(manager, batch)
    counts = batch.request_counts
    assert sorted(line["custom_id"] for line in output + errors) == sorted(f"r{i}" for i in range(num_lines))
    assert (counts.completed, counts.failed, counts.total) == (len(output), len(errors), num_lines)
    assert len({line["id"] for line in output + errors}) == num_lines
    assert batch.usage.input_tokens == 2 * len(output)


async def check_completed(manager: JobManager, batch: BatchRecord, num_lines: int) -> None:
    assert batch.status is BatchStatus.COMPLETED
    await check_accounts(manager, batch, num_lines)
