"""A line that ends the process that prepares it, again and again: what it costs the others."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest

from backfill.jobs.lines import ServiceRunner
from backfill.preparation import supervisor
from backfill.preparation.client import PreparationClient
from backfill.preparation.line_file import LineFile
from backfill.preparation.messages import (
    FromPreparation,
    IndexLines,
    Job,
    JobBegun,
    JobDone,
    Loaded,
    OpenLines,
    PreparationSetup,
    ReadNames,
    TakeLines,
    ToPreparation,
    Work,
)
from backfill.preparation.readers import PreparedLines
from backfill.protocol.generation import Generation, GenerationEndpoint
from backfill.protocol.preparer import RequestContext, ServedModel
from tests.api.servers import TIMEOUT_S
from tests.preparation.facts import FACTS
from tests.preparation.pool_doubles import make_pool, prepare, prompts, selection_of

pytestmark = pytest.mark.anyio

POISON = 66666


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Ended(BaseException):
    """The process has ended in the midst of a job."""


class Child:
    """A process with a pool of lines. It ends when it prepares a prompt that begins with ``POISON``."""

    num_prepared: ClassVar[Counter[str]] = Counter()

    def __init__(self, *args: object) -> None:
        self.pid = 1
        self._pool = make_pool("dfs")
        self._has_ended = False
        self._reports: asyncio.Queue[FromPreparation | None] = asyncio.Queue()

    def start(self) -> None:
        self._report(Loaded())

    def send(self, message: ToPreparation) -> bool:
        if self._has_ended:
            return True
        match message:
            case OpenLines(reader_id, selection, running):
                self._pool.open(reader_id, selection, LineFile(selection, self._prepare), running)
            case Job(job_id, work):
                self._report(JobBegun(job_id))
                try:
                    self._report(JobDone(job_id, self._do(work)))
                except Ended:
                    self._has_ended = True
                    self._reports.put_nowait(None)
        return True

    async def receive(self) -> FromPreparation | None:
        return await self._reports.get()

    def how_it_ended(self) -> str:
        return "ended"

    def close(self) -> None:
        pass

    def _do(self, work: Work) -> Any:
        match work:
            case IndexLines(reader_id, position, max_lines):
                return self._pool.index(reader_id, position, max_lines)
            case TakeLines(owner, max_lines):
                return self._pool.take(owner, max_lines)
            case ReadNames(selection, position, max_lines):
                return LineFile(selection, self._prepare).read_names(position, max_lines)
        raise AssertionError(work)

    def _prepare(self, endpoint: GenerationEndpoint, body: bytes, context: RequestContext) -> Generation:
        prompt = json.loads(body)["prompt"]
        if prompt[0] == POISON:
            raise Ended
        self.num_prepared[str(prompt)] += 1
        return prepare(endpoint, body, context)

    def _report(self, message: FromPreparation) -> None:
        self._reports.put_nowait(message)


async def numbers_of(lines: PreparedLines) -> list[int]:
    """Of all lines of the owner; those that could not be prepared are negative, and get an error."""
    runner, found = ServiceRunner(lambda: None), []
    while group := await lines.read(32):
        for _, line in group:
            if line.generation is None:
                result = await runner.run(line)
                assert result.error is not None and result.error["code"] == "internal_error"
            found.append(line.number if line.generation is not None else -line.number)
    return sorted(found)


async def test_a_line_is_given_up_after_four_deaths_and_all_others_are_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "ChildProcess", Child)
    monkeypatch.setattr(Child, "num_prepared", Counter())
    content = [[n] for n in range(600)]
    content[400] = [POISON]
    (tmp_path / "bad").write_bytes(prompts(*content))
    (tmp_path / "good").write_bytes(prompts(*[[n, n] for n in range(300)]))
    model = ServedModel(names=("m",), root="m", folder=Path(), created=0)
    client = PreparationClient(PreparationSetup(model=model, order="fcfs"))
    client.start()
    client.configure(FACTS)
    async with asyncio.timeout(TIMEOUT_S):
        bad, good = (client.open_lines(selection_of(tmp_path / name, owner=name)) for name in ("bad", "good"))
        while not (bad.is_indexed and good.is_indexed):  # nothing is taken meanwhile: it costs the most
            await asyncio.sleep(0)
        assert await numbers_of(bad) == sorted({*range(1, 601)} - {401} | {-401})
        assert await numbers_of(good) == list(range(1, 301))
    assert (client.files.num_deaths, client.bodies.num_deaths) == (4, 0)
    assert max(Child.num_prepared.values()) <= 1 + 5, (
        "once, and again after each death and once it is left out"
    )
    await client.stop()
