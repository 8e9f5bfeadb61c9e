from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from backfill.bench.client import BenchClient, Endpoint
from backfill.bench.record import BenchRequest, Outcome
from backfill.bench.runner import Run, send_load
from backfill.cli.live import describe_run
from tests.api.servers import TIMEOUT_S
from tests.bench.scripted_server import DONE, Script, ScriptedServer, event, refusal, streamed, token, usage
from tests.patience import with_more_time

# How much later than scripted something may happen on a busy machine.
LATE_S = 0.5
ANSWER = streamed(token(), 0.02, token(finish="length"), usage(2), DONE)


def load(due_at_s: Sequence[float]) -> list[BenchRequest]:
    return [BenchRequest([1], 1, 2, at) for at in due_at_s]


def run_load(
    due_at_s: Sequence[float],
    answer: Callable[[int, dict[str, Any]], Script] = lambda index, body: ANSWER,
    *,
    stop_at_request: int | None = None,
    dies_at_request: int | None = None,
    after_s: float = 0.1,
) -> tuple[Run, ScriptedServer]:
    async def run() -> tuple[Run, ScriptedServer]:
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()

        def watched(index: int, body: dict[str, Any]) -> Script:
            if index == stop_at_request:
                loop.call_later(after_s, stop.set)
            if index == dies_at_request:
                loop.call_later(after_s, server.die)
            return answer(index, body)

        scripted = ScriptedServer(watched).running()
        async with scripted as server, BenchClient(Endpoint(server.url, "/v1/completions", "m")) as client:
            return await send_load(client, load(due_at_s), stop=stop), server

    return asyncio.run(run())


def outcomes(run: Run) -> list[Outcome]:
    return [record.outcome for record in run.records]


def test_malformed_chunks_fail_their_requests_and_not_the_run() -> None:
    malformed = streamed(event({"choices": [None]}), DONE)
    run, _ = run_load([0.0, 0.05, 0.1], lambda index, body: ANSWER if index == 1 else malformed)
    assert outcomes(run) == [Outcome.FAILED, Outcome.COMPLETED, Outcome.FAILED]


def test_requests_leave_when_they_are_due() -> None:
    with_more_time(check_due)


def check_due(factor: float) -> None:
    due = [factor * at_s for at_s in (0.0, 0.1, 0.1, 0.25)]
    run, _ = run_load(due)
    assert outcomes(run) == [Outcome.COMPLETED] * 4
    for record, at in zip(run.records, due, strict=True):
        assert record.due_at_s == at
        assert at <= (record.sent_at_s or 0.0) <= at + LATE_S * factor


def test_a_server_that_errors_midway_does_not_end_the_run() -> None:
    def answer(index: int, _: object) -> Script:
        return refusal(500, {"error": {"message": "broken"}}) if index in (1, 2) else ANSWER

    run, _ = run_load([0.0, 0.05, 0.1, 0.15], answer)
    assert outcomes(run) == [Outcome.COMPLETED, Outcome.FAILED, Outcome.FAILED, Outcome.COMPLETED]
    assert [record.error for record in run.records[1:3]] == ["HTTP 500: broken"] * 2


def test_a_server_that_dies_leaves_what_was_measured() -> None:
    with_more_time(check_death)


def check_death(factor: float) -> None:
    due = [factor * at_s for at_s in (0.0, 0.02, 0.5, 0.55)]
    run, _ = run_load(due, dies_at_request=1, after_s=0.1 * factor)
    assert outcomes(run) == [Outcome.COMPLETED] * 2 + [Outcome.FAILED] * 2
    assert {record.error for record in run.records[2:]} == {"Connection refused"}


def test_stopping_keeps_partial_results_and_marks_them() -> None:
    with_more_time(check_stop)


def check_stop(factor: float) -> None:
    def answer(index: int, _: object) -> Script:
        return ANSWER if index == 0 else streamed(token(), TIMEOUT_S, token(finish="stop"), DONE)

    due = [0.0, 0.1 * factor, 0.1 * factor, TIMEOUT_S]
    run, _ = run_load(due, answer, stop_at_request=2, after_s=0.1 * factor)
    assert outcomes(run) == [Outcome.COMPLETED, Outcome.INTERRUPTED, Outcome.INTERRUPTED]
    assert len(run.records[1].chunk_after_s) == 1
    assert "0 running" in describe_run(run)
