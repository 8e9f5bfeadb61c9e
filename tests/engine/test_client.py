"""The engine process as its client sees it, and how its failures reach the requests."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from unittest import mock

import pytest
import zmq

from backfill.core.config import EngineConfig
from backfill.core.counters import ClassCounters
from backfill.core.errors import BackfillError, EngineDead, RequestLost, StepFailed
from backfill.core.request import FinishReason, Request, RequestId, ServiceClass
from backfill.core.slo import SLO
from backfill.engine import interpreter
from backfill.engine.client import EngineClient
from backfill.engine.environment import engine_environment
from backfill.engine.interpreter import ENGINE_NAME
from backfill.engine.messages import ClassStats, EngineStats, StepReport, StepStats, TokenOutput
from backfill.engine.process import EngineLoader
from backfill.engine.streams import RequestStream, RequestStreams
from backfill.ipc.interpreter import Interpreter
from backfill.ipc.python_process import PythonProcess
from tests.api.servers import TIMEOUT_S
from tests.builders import flat_cost, make_profile, make_request
from tests.engine.loaders import (
    load_crowded,
    load_failing,
    load_hanging,
    load_never,
    load_profiled,
    load_slow,
)
from tests.patience import with_more_time

pytestmark = pytest.mark.anyio
LONG = 50_000


@asynccontextmanager
async def started(
    load: EngineLoader,
    hang_timeout_s: float = 0.0,
    on_report: Callable[[StepReport], None] = lambda _: None,
) -> AsyncIterator[EngineClient]:
    config = EngineConfig(engine_hang_timeout=hang_timeout_s)
    client = EngineClient(config, on_report=on_report, load=load)
    await client.start()
    try:
        yield client
    finally:
        await client.stop()


def request_of(name: str, max_tokens: int, service_class: ServiceClass = ServiceClass.ONLINE) -> Request:
    return make_request(
        2,
        max_tokens,
        request_id=name,
        service_class=service_class,
        arrived_at_s=time.monotonic(),
        ignore_eos=True,
    )


async def generate(
    client: EngineClient,
    name: str,
    max_tokens: int = 2,
    begun: asyncio.Event | None = None,
    service_class: ServiceClass = ServiceClass.ONLINE,
    group: str | None = None,
) -> int:
    """The number of tokens; ``begun`` is set at the first."""
    num_tokens = 0
    outputs = client.generate(request_of(name, max_tokens, service_class), group=group)
    async with aclosing(outputs):
        async for _ in outputs:
            num_tokens += 1
            if begun is not None:
                begun.set()
    return num_tokens


def test_the_first_token_and_the_end_are_told_once_whether_or_not_anyone_reads() -> None:
    told: list[str] = []
    stream = RequestStream(
        ServiceClass.ONLINE, "g", None, lambda: told.append("first"), lambda: told.append("end")
    )
    stream.put(TokenOutput(RequestId("r"), 5))
    assert told == ["first"]
    stream.put(TokenOutput(RequestId("r"), 6))
    stream.put(TokenOutput(RequestId("r"), 7, finish_reason=FinishReason.STOP))
    stream.end()
    assert told == ["first", "end"]
    failed = RequestStream(ServiceClass.ONLINE, "g", None, lambda: told.append("never"), None)
    failed.put(EngineDead("gone"))
    assert told == ["first", "end"]


def test_the_progress_of_a_prompt_is_told() -> None:
    streams, told = RequestStreams(), list[int]()
    streams.add(RequestId("long"), RequestStream(ServiceClass.ONLINE, "g", told.append, None, None))
    streams.add(RequestId("other"), RequestStream(ServiceClass.ONLINE, "g", None, None, None))
    idle = ClassStats(0, 0, ClassCounters())
    for progress in ([("long", 32), ("other", 8), ("gone", 16)], [], [("long", 64)]):
        in_ids = tuple((RequestId(name), num_tokens) for name, num_tokens in progress)
        step = StepStats("online", 32, 0.1, 0.1, prompt_progress=in_ids)
        streams.put(StepReport([], EngineStats(idle, idle, 0.0, 0, 0.0, 0, step)))
    assert told == [32, 64]


async def lose(client: EngineClient, kill: int | None = None) -> list[int | BaseException]:
    """What three requests get that were in flight when the process was sent a signal."""
    begun = [asyncio.Event() for _ in range(3)]
    tasks = [
        asyncio.create_task(generate(client, f"r{index}", LONG, event)) for index, event in enumerate(begun)
    ]
    if kill is not None:
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in begun)), TIMEOUT_S)
        assert client.pid is not None
        os.kill(client.pid, kill)
    return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), TIMEOUT_S)


def assert_lost(answers: list[int | BaseException], num_lost: int, message: str) -> None:
    for answer in answers:
        assert isinstance(answer, EngineDead)
        assert answer.num_lost == num_lost
        assert message in str(answer)


async def test_requests_of_a_killed_engine_are_told_how_many_were_lost() -> None:
    async with started(load_slow) as client:
        assert await generate(client, "ended") == 2
        assert_lost(await lose(client, signal.SIGKILL), 3, "killed by signal 9")
        await client.wait_dead()
        with pytest.raises(EngineDead) as absent:
            await generate(client, "late")
        assert absent.value.num_lost == 0


async def test_a_request_that_comes_before_a_death_is_noticed_is_told_of_it() -> None:
    async with started(load_slow) as client:
        connection = client._connection
        assert connection is not None and connection.pid is not None
        os.kill(connection.pid, signal.SIGKILL)
        while connection._commands.poll(0, zmq.POLLOUT):  # the event loop gets no turn
            time.sleep(0.001)
        with pytest.raises(EngineDead, match="killed by signal 9") as death:
            await asyncio.wait_for(generate(client, "late"), TIMEOUT_S)
        assert death.value.num_lost == 0


async def test_an_engine_that_its_client_kills_is_no_error_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with started(load_slow) as client:
        client.kill()
        await client.wait_dead()
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_request_whose_last_output_nobody_has_read_is_not_in_flight() -> None:
    async with started(load_slow) as client:
        unread = client.generate(request_of("unread", max_tokens=2))
        async with aclosing(unread):
            await anext(unread)
            assert await generate(client, "after", 20) == 20
            assert_lost(await lose(client, signal.SIGKILL), 3, "killed")
            assert (await anext(unread)).finish_reason is not None


@pytest.mark.parametrize(
    "other_class",
    [ServiceClass.ONLINE, pytest.param(ServiceClass.OFFLINE, marks=pytest.mark.slow)],  # a flex request
)
async def test_others_are_requests_outside_the_group_even_if_choices_have_ended(
    other_class: ServiceClass,
) -> None:
    async def lose_together(client: EngineClient, others: Sequence[str]) -> dict[str, EngineDead]:
        """The errors of a line's choices and of other requests; two further choices have ended."""
        for name in ("c1", "c2"):
            assert await generate(client, name, service_class=ServiceClass.OFFLINE, group="line") == 2
        kinds = dict.fromkeys(("c3", "c4"), (ServiceClass.OFFLINE, "line"))
        kinds |= dict.fromkeys(others, (other_class, None))
        begun = {name: asyncio.Event() for name in kinds}
        tasks = [
            asyncio.create_task(generate(client, name, LONG, begun[name], *kinds[name])) for name in kinds
        ]
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in begun.values())), TIMEOUT_S)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        answers = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), TIMEOUT_S)
        await client.wait_dead()
        return {
            name: answer
            for name, answer in zip(kinds, answers, strict=True)
            if isinstance(answer, EngineDead)
        }

    async with started(load_slow) as client:
        errors = await lose_together(client, ["other", "another"])
        assert {name: error.num_others for name, error in errors.items()} == {
            "c3": 2,
            "c4": 2,
            "other": 3,
            "another": 3,
        }
        await client.start()
        errors = await lose_together(client, [])
        assert {name: (error.num_lost, error.num_others) for name, error in errors.items()} == {
            "c3": (2, 0),
            "c4": (2, 0),
        }


async def test_a_failed_step_counts_its_requests_outside_the_group() -> None:
    async with started(load_crowded) as client:
        begun = [asyncio.Event() for _ in range(2)]
        choices = [
            asyncio.create_task(generate(client, f"c{index}", LONG, event, group="line"))
            for index, event in enumerate(begun)
        ]
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in begun)), TIMEOUT_S)
        assert await asyncio.wait_for(generate(client, "other"), TIMEOUT_S) == 2, "it runs once more"
        for failure in await asyncio.gather(*choices, return_exceptions=True):
            assert isinstance(failure, StepFailed)
            assert (failure.num_lost, failure.num_others) == (3, 1)


async def test_a_step_that_fails_twice_loses_its_requests_and_the_engine_continues() -> None:
    async with started(load_failing) as client:
        with pytest.raises(StepFailed, match="RuntimeError") as failure:
            await generate(client, "a")
        assert (failure.value.num_lost, failure.value.num_others) == (1, 0)
        assert isinstance(failure.value, RequestLost)
        assert not client.has_computed
        assert await generate(client, "b") == 2
        assert client.has_computed


@pytest.mark.slow  # one that hangs, below, is noticed alike
def test_a_stopped_engine_is_noticed_and_ended_and_can_be_started_again() -> None:
    async def run(timeout_s: float) -> None:
        async with started(load_slow, timeout_s) as client:
            assert_lost(await lose(client, signal.SIGSTOP), 3, f"hung for {timeout_s:g} s")
            await asyncio.wait_for(client.wait_dead(), TIMEOUT_S)
            assert_ended(client)
            assert client.silent_s >= timeout_s
            await client.start()
            assert await generate(client, "again") == 2

    with_more_time(lambda factor: asyncio.run(run(1.0 * factor)))


def test_an_engine_that_hangs_writes_its_stacks(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(timeout_s: float) -> None:
        async with started(load_hanging, timeout_s) as client:
            assert_lost(await lose(client), 3, f"hung for {timeout_s:g} s")

    def attempt(factor: float) -> None:
        monkeypatch.setattr("backfill.engine.connection._DUMP_S", 0.25 * factor)
        asyncio.run(run(0.5 * factor))
        stacks = capfd.readouterr().err
        assert "in wait_forever" in stacks
        assert stacks.count("Thread 0x") >= 1, "of all threads"

    with_more_time(attempt)


def test_an_engine_ends_quietly_with_the_loop_of_its_client(caplog: pytest.LogCaptureFixture) -> None:
    async def leave_running() -> int | None:
        client = EngineClient(EngineConfig(model_dir=""), load=load_slow)
        await client.start()
        assert await generate(client, "a") == 2
        return client.pid

    pid = asyncio.run(leave_running())
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert caplog.text == ""


def test_an_idle_engine_does_not_count_as_hanging() -> None:
    async def run(timeout_s: float) -> None:
        heard, num_reports = asyncio.Event(), itertools.count(1)

        def on_report(report: StepReport) -> None:
            if next(num_reports) == 6:  # a quarter of the timeout apart
                heard.set()

        async with started(load_slow, timeout_s, on_report) as client:
            await asyncio.wait_for(heard.wait(), TIMEOUT_S)
            assert await generate(client, "a") == 2

    with_more_time(lambda factor: asyncio.run(run(0.4 * factor)))


async def test_a_process_that_cannot_be_started_leaves_nothing_and_may_be_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    client = EngineClient(EngineConfig(model_dir=""), load=load_slow)
    refusals: list[tuple[Exception, type[Exception], str]] = [
        (OSError(12, "Cannot allocate memory"), BackfillError, "cannot be started: Cannot allocate memory"),
        (ValueError("unpicklable"), ValueError, "unpicklable"),
    ]
    for error, raised, message in refusals:
        with monkeypatch.context() as patch:
            patch.setattr(PythonProcess, "start", mock.Mock(side_effect=error))
            with pytest.raises(raised, match=message):
                await client.start()
        assert list(tmp_path.iterdir()) == []
    await client.start()
    assert await generate(client, "a") == 2
    await client.stop()


@pytest.mark.parametrize("num_turns", [0, 1, 1000])
async def test_a_start_that_is_stopped_raises_engine_dead(num_turns: int) -> None:
    client = EngineClient(EngineConfig(model_dir=""), load=load_never)
    starting = asyncio.create_task(client.start())
    while client.pid is None:
        await asyncio.sleep(0)
    for _ in range(num_turns):
        await asyncio.sleep(0)
    await client.stop()
    with pytest.raises(EngineDead, match="stopped while it was started"):
        await starting
    assert_ended(client)


async def test_an_engine_may_be_stopped_by_several_tasks() -> None:
    async def stop_after(client: EngineClient, num_turns: int) -> None:
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await client.stop()

    client = EngineClient(EngineConfig(model_dir=""), load=load_slow)
    await client.start()
    first = asyncio.create_task(client.stop())
    await asyncio.sleep(0)
    connection = client._connection
    assert connection is not None
    while connection.is_alive():
        await asyncio.sleep(0)
    await asyncio.gather(first, *(stop_after(client, num_turns) for num_turns in range(12)))
    assert_ended(client)


def test_one_process_is_launched_at_a_time_and_may_be_abandoned() -> None:
    client = EngineClient(EngineConfig(model_dir=""), load=load_never)
    client.launch()
    pid = client.pid
    with pytest.raises(AssertionError, match="there is a process already"):
        client.launch()
    assert client.pid == pid
    for _ in range(2):
        client.abandon()
        assert_ended(client)


async def test_the_first_engine_takes_the_interpreter_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Interpreter(ENGINE_NAME, engine_environment(os.environ))  # which imports no torch
    monkeypatch.setattr(interpreter, "_waiting", [waiting])
    client = EngineClient(EngineConfig(model_dir=""), load=load_slow)
    await client.start()
    first = client.pid
    assert first == waiting.process.pid
    assert await generate(client, "a") == 2
    await client.stop()
    client.launch()
    assert client.pid != first
    client.abandon()


def assert_ended(client: EngineClient) -> None:
    assert client.pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(client.pid, 0)


async def test_objectives_stay_when_the_engine_starts_again_with_another_profile(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    make_profile(flat_cost(0.1)).save(path)
    config = EngineConfig(model_dir="", profile=path)
    client = EngineClient(config, load=load_profiled)
    try:
        assert (await client.start()).default_slo == SLO(1.0, 0.4)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        await client.wait_dead()
        make_profile(flat_cost(10.0)).save(path)  # it cannot meet them, but serves
        assert (await client.start()).default_slo == SLO(1.0, 0.4)
    finally:
        await client.stop()
    widened = "tpot_slo is widened to 0.4 s from 0.15: one request alone is predicted to need 0.1 s"
    assert capfd.readouterr().err.count(widened) == 1


def test_an_engine_may_be_launched_before_there_is_an_event_loop() -> None:
    client = EngineClient(EngineConfig(model_dir=""), load=load_slow)
    client.launch()
    launched = client.pid

    async def run() -> None:
        try:
            await client.start()
            assert client.pid == launched
            assert await generate(client, "first") == 2
        finally:
            await client.stop()

    asyncio.run(run())
    assert_ended(client)
