from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from backfill.bench.client import BenchClient, Endpoint
from backfill.bench.metrics import compute_metrics
from backfill.bench.record import BenchRequest, Outcome
from backfill.bench.runner import Run, send_load, warm_up
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
    **options: Any,
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
            return await send_load(client, load(due_at_s), stop=stop, **options), server

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
    assert due[-1] + 0.02 <= run.duration_s <= due[-1] + 2 * LATE_S * factor
    assert not run.is_interrupted


def test_waiting_for_a_place_is_kept_apart() -> None:
    run, server = run_load([0.0] * 4, lambda *_: streamed(0.1, token(finish="stop"), DONE), max_concurrency=2)
    assert server.most_running == 2
    waits = [record.queue_time_s for record in run.records]
    assert max(waits[:2]) < min(waits[2:]) and min(waits[2:]) >= 0.08


def test_a_server_that_errors_midway_does_not_end_the_run() -> None:
    def answer(index: int, _: object) -> Script:
        return refusal(500, {"error": {"message": "broken"}}) if index in (1, 2) else ANSWER

    run, _ = run_load([0.0, 0.05, 0.1, 0.15], answer)
    assert outcomes(run) == [Outcome.COMPLETED, Outcome.FAILED, Outcome.FAILED, Outcome.COMPLETED]
    metrics = compute_metrics(run.records, duration_s=run.duration_s, num_requests=4)
    assert metrics.errors == {"HTTP 500: broken": 2}


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
    run, _ = run_load(due, answer, stop_at_request=2, after_s=0.1 * factor, max_concurrency=2)
    assert run.is_interrupted
    assert run.duration_s < 20 * factor
    assert outcomes(run) == [Outcome.COMPLETED, Outcome.INTERRUPTED, Outcome.INTERRUPTED]
    assert len(run.records[1].chunk_after_s) == 1
    metrics = compute_metrics(run.records, duration_s=run.duration_s, num_requests=4)
    assert (metrics.num_completed, metrics.num_interrupted, metrics.num_not_sent) == (1, 2, 1)
    assert "0 running" in describe_run(run)


def test_stopping_ends_those_still_waiting_for_a_place() -> None:
    run, server = run_load([0.0] * 3, lambda *_: [30.0], stop_at_request=0, max_concurrency=1)
    assert set(outcomes(run)) == {Outcome.INTERRUPTED}
    assert all(record.sent_at_s is None for record in run.records[1:])
    assert len(server.bodies) == 1


def test_probes_go_past_the_limit_and_are_not_in_the_load() -> None:
    def answer(_: int, body: dict[str, Any]) -> Script:
        pause = 0.0 if body["prompt"] == "Hi" else 0.3
        return streamed(pause, token(finish="stop"), DONE)

    run, server = run_load([0.0, 0.0], answer, max_concurrency=1, probe_rate_per_s=20.0)
    assert len(run.records) == 2 and len(run.probes) >= 2
    assert {probe.outcome for probe in run.probes} == {Outcome.COMPLETED}
    assert {body["max_tokens"] for body in server.bodies if body["prompt"] == "Hi"} == {1}


@pytest.mark.parametrize("fails", [False, True])
def test_warm_ups_are_sent_and_not_recorded(fails: bool) -> None:
    async def run() -> int:
        answer = refusal(500, {}) if fails else ANSWER
        async with ScriptedServer(lambda *_: answer).running() as server:
            async with BenchClient(Endpoint(server.url, "/v1/completions", "m")) as client:
                await warm_up(client, load([0.0] * 3), 2)
            assert server.most_running <= 2
            return len(server.bodies)

    assert asyncio.run(run()) == 3
