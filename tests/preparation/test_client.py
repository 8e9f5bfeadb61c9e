"""The preparation process, with the real default model's tokenizer: its results, and its deaths."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from backfill.core.errors import BackfillError, NotReady, RequestError
from backfill.core.request import ServiceClass
from backfill.engine.tasks import TaskWatch
from backfill.preparation.client import PreparationClient
from backfill.preparation.lines import BadLine, BatchLine
from backfill.preparation.messages import (
    AnswerBody,
    CancelJob,
    FromPreparation,
    InputLimits,
    Job,
    JobBegun,
    JobDone,
    LineSelection,
    LinesTaken,
    Loaded,
    PreparationSetup,
    PrepareBody,
    TakeLines,
    ToPreparation,
)
from backfill.preparation.readers import PreparedLines
from backfill.preparation.supervisor import PreparationDied, PreparationSupervisor
from backfill.protocol.generation import Generation
from backfill.protocol.preparer import RequestContext, ServedModel
from tests.jobs.doubles import URL, input_line, input_of
from tests.patience import TIMEOUT_S, until
from tests.preparation.facts import FACTS
from tests.preparation.test_line_file import generation_of

pytestmark = pytest.mark.anyio

CONTEXT = RequestContext(request_id="r")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def setup_of(folder: Path) -> PreparationSetup:
    model = ServedModel(names=("m",), root="m", folder=folder, created=0)
    return PreparationSetup(model=model, order="fcfs")


@pytest.fixture
async def client(default_model: Path) -> AsyncIterator[PreparationClient]:
    client = PreparationClient(setup_of(default_model))
    client.start()
    client.configure(FACTS)
    yield client
    await client.stop()


def limits(max_lines: int = 10**6) -> InputLimits:
    return InputLimits(endpoint=URL, model_names=("m",), max_lines=max_lines, max_line_bytes=10_000)


async def read_some(lines: PreparedLines) -> list[BatchLine]:
    """At most three lines."""
    return [line for _, line in await lines.read(3)]


def kill(process: PreparationSupervisor) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)


@pytest.mark.slow  # without a process: tests/preparation/test_process.py; through HTTP: tests/api
async def test_bodies_texts_lines_and_checks(client: PreparationClient, tmp_path: Path) -> None:
    generation = await client.prepare(
        "/v1/completions", b'{"prompt": "Gravity is", "max_tokens": 3, "n": 2}', CONTEXT
    )
    assert (len(generation.request.prompts), generation.request.num_choices) == (1, 2)
    assert generation.warning is None
    misspelt = await client.prepare("/v1/completions", b'{"prompt": "x", "max_tokns": 3}', CONTEXT)
    assert misspelt.warning is not None and "max_tokns" in misspelt.warning
    with pytest.raises(RequestError) as refused:
        await client.prepare("/v1/chat/completions", b'{"messages": []}', CONTEXT)
    assert refused.value.param == "messages"

    assert client.bodies.pid is not None
    niceness = os.getpriority(os.PRIO_PROCESS, client.bodies.pid) - os.getpriority(os.PRIO_PROCESS, 0)
    assert niceness >= min(5, 19 - os.getpriority(os.PRIO_PROCESS, 0)), "the engine's threads go before"

    answer = json.loads(await client.answer("/tokenize", b'{"prompt": "Gravity is"}', ""))
    assert answer["tokens"] == generation.request.prompts[0]
    tokens = json.dumps({"tokens": answer["tokens"]}).encode()
    text = json.loads(await client.answer("/detokenize", tokens, ""))
    assert text == {"prompt": "Gravity is"}

    path = tmp_path / "in"
    path.write_bytes(input_of(5) + b"{\n" + input_line(6, body={"prompt": "x", "max_tokens": 512}))
    report = await client.check_input(str(path), limits())
    assert (report.total, [error.line for error in report.errors]) == (7, [6, 7]), "the engine's limits count"
    lines = client.open_lines(LineSelection(path=str(path), max_line_bytes=10_000))
    found = [line for _ in range(2) for line in await read_some(lines)]
    assert [line.custom_id for line in found] == [f"r{index}" for index in range(5)]
    assert all(line.generation is not None for line in found)
    with pytest.raises(BadLine):
        await lines.read(10)
    lines.close()
    with pytest.raises(FileNotFoundError):
        await client.check_input(str(tmp_path / "none"), limits())


@pytest.mark.slow  # without processes: below, and tests/preparation/test_readers.py
async def test_files_have_a_process_of_their_own_and_a_death_loses_no_job_and_no_line(
    client: PreparationClient, tmp_path: Path
) -> None:
    body = b'{"prompt": "x"}'
    await client.prepare("/v1/completions", body, CONTEXT)
    assert client.is_up
    assert client.files.pid is None, "no file has come"
    path = tmp_path / "in"
    path.write_bytes(input_of(40))
    lines = client.open_lines(LineSelection(path=str(path), max_line_bytes=10_000))
    read: list[BatchLine] = await read_some(lines)
    bodies_pid, files_pid = client.bodies.pid, client.files.pid
    assert bodies_pid != files_pid

    check = asyncio.create_task(client.check_input(str(path), limits()))
    await asyncio.sleep(0)  # the job is submitted
    kill(client.files)
    await until(lambda: client.num_deaths)
    assert not client.is_up
    await client.prepare("/v1/completions", body, CONTEXT)
    while group := await read_some(lines):
        read += group
    assert sorted(line.number for line in read) == list(range(1, 41))
    assert all(line.generation is not None for line in read)
    assert (await check).total == 40
    assert client.is_up
    assert client.files.pid != files_pid and client.bodies.pid == bodies_pid

    prepared = asyncio.create_task(client.prepare("/v1/completions", body, CONTEXT))
    await asyncio.sleep(0)
    kill(client.bodies)
    assert (await prepared).request.prompts
    await until(lambda: client.bodies.num_deaths)  # it may have answered before it died
    assert (client.bodies.num_deaths, client.files.num_deaths) == (1, 1)


class Child:
    """A preparation process as the client's ``ChildProcess``: it ends if a job's work is ``poison``.

    Once it has such a job it answers no other, also if the machine stalls before it ends.
    """

    lives: ClassVar[list[list[int]]] = []  # for each process, the jobs it was sent
    cancelled: ClassVar[list[int]] = []
    poison: ClassVar[Callable[[Any], bool]] = lambda work: False

    def __init__(self, *args: object) -> None:
        self.pid = 1
        self._is_ending = False
        self._reports: asyncio.Queue[FromPreparation | None] = asyncio.Queue()
        self.lives.append([])

    def start(self) -> None:
        self._report(Loaded())

    def send(self, message: ToPreparation) -> bool:
        if isinstance(message, CancelJob):
            self.cancelled.append(message.job_id)
        if isinstance(message, Job) and isinstance(message.work, PrepareBody | AnswerBody):
            self.lives[-1].append(message.job_id)
            self._report(JobBegun(message.job_id))
            if Child.poison(message.work):
                self._is_ending = True
                asyncio.get_running_loop().call_later(0.01, self._reports.put_nowait, None)
            else:
                work = message.work
                result = generation_of(work.context) if isinstance(work, PrepareBody) else b"{}"
                answer = JobDone(message.job_id, result)
                asyncio.get_running_loop().call_later(0.02, self._answer, answer)
        return True

    async def receive(self) -> FromPreparation | None:
        return await self._reports.get()

    def how_it_ended(self) -> str:
        return "ended"

    def close(self) -> None:
        pass

    def _answer(self, answer: JobDone) -> None:
        if not self._is_ending:
            self._report(answer)

    def _report(self, message: FromPreparation) -> None:
        self._reports.put_nowait(message)


@pytest.fixture
async def lone_client(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PreparationClient]:
    """With a ``Child`` for each process."""
    monkeypatch.setattr("backfill.preparation.supervisor.ChildProcess", Child)
    monkeypatch.setattr(Child, "lives", [])
    monkeypatch.setattr(Child, "cancelled", [])
    client = PreparationClient(setup_of(Path()))
    yield client
    await client.stop()


async def test_a_body_that_ends_the_process_is_found_and_costs_no_other(
    lone_client: PreparationClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Child, "poison", lambda work: work.body == b"poison")
    lone_client.start()
    bodies = [b"a", b"poison", b"b", b"c"]
    jobs = [lone_client.prepare("/v1/completions", body, CONTEXT) for body in bodies]
    results = await asyncio.gather(*jobs, return_exceptions=True)
    assert isinstance(results[1], PreparationDied)
    assert all(isinstance(result, Generation) for index, result in enumerate(results) if index != 1)
    together, *later = Child.lives
    assert len(together) == 4
    assert lone_client.num_deaths == 2
    assert later[0] == together[:2], "one by one, until the one to blame has ended it alone"


async def test_offline_bodies_do_not_keep_online_ones_waiting(lone_client: PreparationClient) -> None:
    answered: list[str] = []
    lone_client.start()

    async def ask(name: str, service_class: ServiceClass) -> None:
        await lone_client.prepare("/v1/completions", b"x", CONTEXT, service_class)
        answered.append(name)

    offline = [ask(f"offline {index}", ServiceClass.OFFLINE) for index in range(20)]
    await asyncio.gather(*offline, ask("online", ServiceClass.ONLINE))
    assert answered.index("online") <= 1


@pytest.mark.parametrize("asks", [*ServiceClass, "a text"])
async def test_bodies_of_one_owner_do_not_keep_another_ones_waiting(
    lone_client: PreparationClient, asks: ServiceClass | str
) -> None:
    answered: list[str] = []
    lone_client.start()

    async def ask(owner: str) -> None:
        if isinstance(asks, ServiceClass):
            await lone_client.prepare("/v1/completions", b"x", replace(CONTEXT, owner=owner), asks)
        else:
            await lone_client.answer("/tokenize", b"x", owner)
        answered.append(owner)

    await asyncio.gather(*(ask("flood") for _ in range(30)), ask("late"), ask("late"))
    last_late = max(index for index, owner in enumerate(answered) if owner == "late")
    assert last_late <= 4 + 3, "those that were in, and turns"


async def test_bodies_whose_clients_leave_keep_no_turn(lone_client: PreparationClient) -> None:
    lone_client.start()
    asked = [
        asyncio.create_task(lone_client.prepare("/v1/completions", b"x", replace(CONTEXT, owner=owner)))
        for owner in 10 * ["a", "b"]
    ]
    await asyncio.sleep(0)
    for each in asked[3:]:  # of them one is in, others wait
        each.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    assert Child.cancelled == [3], "the process need not begin it"
    later = [lone_client.prepare("/v1/completions", b"x", CONTEXT) for _ in range(10)]
    assert len(await asyncio.wait_for(asyncio.gather(*later), TIMEOUT_S)) == 10


async def test_jobs_are_refused_while_no_process_can_be_started(
    lone_client: PreparationClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Child) -> None:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(Child, "start", refuse)
        lone_client.start()
        with pytest.raises(BackfillError, match="Cannot allocate memory"):
            await lone_client.bodies.wait_ready()
        with pytest.raises(NotReady):  # after more failed launches
            await lone_client.prepare("/v1/completions", b"x", CONTEXT)
    await until(lambda: lone_client.is_up)
    assert await lone_client.prepare("/v1/completions", b"x", CONTEXT)


@pytest.mark.slow  # without a process: the test before it but one
async def test_a_process_that_cannot_be_started_is_tried_again(default_model: Path, tmp_path: Path) -> None:
    client = PreparationClient(setup_of(tmp_path))
    client.configure(FACTS)
    client.start(bodies_within_s=3600)  # the first job launches it earlier
    job = asyncio.create_task(client.prepare("/v1/completions", b'{"prompt": "x"}', CONTEXT))
    await asyncio.wait([job], timeout=0.5)
    assert not job.done()
    for file in default_model.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    assert (await job).request.prompts
    await client.stop()


async def test_a_caller_that_is_cancelled_as_its_job_fails_is_cancelled() -> None:
    process = PreparationSupervisor("files", setup_of(Path()), TaskWatch(), on_launch=lambda: None)
    asking = asyncio.create_task(process.ask(TakeLines("o", 1), LinesTaken))
    await asyncio.sleep(0)
    for pending in process._jobs.values():
        pending.done.set_exception(PreparationDied("The process ended."))
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await process.stop()
