from __future__ import annotations

import asyncio
import errno
import gc
import itertools
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st

from backfill.bench.client import BenchClient, Endpoint, SseDecoder
from backfill.bench.record import BenchRequest, Outcome, RequestRecord
from backfill.bench.runner import Run, send_load, wait_until_ready
from backfill.cli.live import describe_run
from backfill.core.errors import ConfigError
from backfill.http.errors import why_not_connected
from tests.api.servers import TIMEOUT_S
from tests.bench.scripted_server import (
    DONE,
    END,
    HEAD,
    Script,
    ScriptedServer,
    event,
    part,
    refusal,
    streamed,
    token,
    usage,
)
from tests.patience import with_more_time

# How much later than scripted a pause may end on a busy machine.
LATE_S = 0.5


def send(script: Script, **endpoint: Any) -> tuple[RequestRecord, ScriptedServer]:
    async def run() -> tuple[RequestRecord, ScriptedServer]:
        async with ScriptedServer(lambda index, body: script).running() as server:
            target = Endpoint(**{"base_url": server.url, "path": "/v1/completions", "model": "m", **endpoint})
            async with BenchClient(target) as client:
                record = RequestRecord(0.0, 5)
                await client.send(BenchRequest([1, 2, 3], 5, 7), record, 0.0)
            return record, server

    return asyncio.run(run())


def test_times_of_a_stream() -> None:
    with_more_time(check_times)


def check_times(factor: float) -> None:
    pauses_s = [factor * pause_s for pause_s in (0.1, 0.05, 0.15)]
    first, second, third = pauses_s
    script = streamed(first, token(), second, token(), third, token(finish="length"), usage(3), second, DONE)
    record, server = send(script)
    assert record.outcome is Outcome.COMPLETED
    assert (record.output_tokens, record.input_tokens) == (3, 3)
    for measured, scripted in zip([record.ttft_s, *record.itls_s], pauses_s, strict=True):
        assert scripted - 0.03 * factor <= measured <= scripted + LATE_S * factor
    assert record.latency_s == pytest.approx(record.ttft_s + sum(record.itls_s))
    assert record.ended_after_s >= record.latency_s + 0.03 * factor
    assert server.bodies == [
        {
            "model": "m",
            "prompt": [1, 2, 3],
            "max_tokens": 7,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


def test_events_that_share_a_read_and_events_in_parts() -> None:
    with_more_time(check_parts)


def check_parts(factor: float) -> None:
    split = token("é!")
    middle = split.index(b"\\u") + 3
    both = token("a") + token("b")
    record, _ = send(
        streamed(
            both + split[:middle],
            0.05 * factor,
            split[middle:] + b": comment\n\n",
            token(finish="stop") + DONE,
        )
    )
    assert record.outcome is Outcome.COMPLETED
    assert len(record.chunk_after_s) == 4
    assert record.itls_s[0] == 0.0
    assert record.itls_s[1] >= 0.03 * factor


def test_a_chunk_without_text_counts_as_first_and_empty_choices_do_not() -> None:
    role = event({"choices": [{"text": "", "finish_reason": None}]})
    last = event({"choices": [{"text": "hi", "finish_reason": "stop"}], "usage": None})
    record, server = send(
        streamed(event({"choices": []}), 0.05, role, last, DONE),
        ignore_eos=True,
        body={"seed": 1},
    )
    assert record.ttft_s >= 0.03 and len(record.chunk_after_s) == 2
    assert server.bodies[0]["ignore_eos"] is True and server.bodies[0]["seed"] == 1


def test_headers_are_sent() -> None:
    _, server = send(streamed(token(finish="stop"), DONE), headers={"Authorization": "Bearer k", "X-A": "b"})
    assert "Authorization: Bearer k" in server.heads[0] and "X-A: b" in server.heads[0]


@pytest.mark.parametrize(
    ("script", "error", "chunks"),
    [
        (refusal(429, {"error": {"message": "Queue is full."}}), "HTTP 429: Queue is full.", 0),
        (refusal(500, "oops"), "HTTP 500: oops", 0),
        (
            streamed(token(), event({"error": {"message": "step failed"}}), DONE),
            "error in the stream: step",
            1,
        ),
        ([HEAD, part(token()), part(token())], "broke off within the response", 2),
        (streamed(token(), token()), "the response broke off before its end", 2),
        (streamed(usage(0), DONE), "ended without a chunk", 0),
        (streamed(b"data: {not json\n\n", DONE), "JSON", 0),
        (streamed(b"data: 5\n\n", DONE), "unexpected event", 0),
        ([0.01], "closed the connection without an answer", 0),
    ],
)
def test_failures_are_recorded(script: Script, error: str, chunks: int) -> None:
    assert_failed(send(script, timeout_s=TIMEOUT_S)[0], error, chunks)


def assert_failed(record: RequestRecord, error: str, chunks: int) -> None:
    assert record.outcome is Outcome.FAILED
    assert error in record.error
    assert "\n" not in record.error
    assert len(record.chunk_after_s) == chunks


def test_a_response_without_an_end_is_a_failure() -> None:
    def attempt(factor: float) -> None:
        timeout_s = 0.25 * factor
        record, _ = send([HEAD, part(token()), TIMEOUT_S, END], timeout_s=timeout_s)
        assert_failed(record, f"no end of the response within {timeout_s:g} s", 1)

    with_more_time(attempt)


@pytest.mark.parametrize(
    "chunk",
    [
        {"choices": [None]},
        {"choices": [], "usage": [1]},
        {"usage": {"completion_tokens": "7"}},
        "text",
    ],
    ids=str,
)
def test_a_malformed_chunk_fails_its_request_and_counts_for_nothing(chunk: Any) -> None:
    record, _ = send(streamed(token("a"), 0.02, event(chunk), token(finish="stop"), DONE))
    assert record.outcome is Outcome.FAILED
    assert record.error.startswith("unexpected event: Expected ")
    assert (record.output_tokens, len(record.chunk_after_s)) == (1, 1)


@pytest.mark.parametrize("nested", [b"[" * 100_000, b'{"id":' * 100_000], ids=["list", "unread field"])
def test_a_bottomless_chunk_fails_its_request(nested: bytes) -> None:
    record, _ = send(streamed(b"data: " + nested + b"\n\n", DONE))
    assert record.outcome is Outcome.FAILED and record.error


@pytest.mark.parametrize("answer", [{"data": 5}, {"data": [5, {"id": "m"}]}, [], 5, {"data": None}], ids=str)
def test_a_malformed_list_of_models_is_no_list(answer: Any) -> None:
    expected = [{"id": "m"}] if answer == {"data": [5, {"id": "m"}]} else []
    script = refusal(200, answer)

    async def look_up() -> list[dict[str, Any]]:
        scripted = ScriptedServer(lambda index, body: script).running()
        async with scripted as server, BenchClient(Endpoint(server.url, "", "m")) as client:
            return await client.get_models()

    assert asyncio.run(look_up()) == expected


def test_no_server() -> None:
    record, _ = send([], base_url="http://127.0.0.1:1")
    assert record.outcome is Outcome.FAILED
    assert record.error == "Connection refused"


def test_no_server_on_look_up() -> None:
    async def look_up(url: str) -> None:
        async with BenchClient(Endpoint(base_url=url, path="", model="")) as client:
            await client.get_models()

    for url in ("http://127.0.0.1:1", "http://no-such-host.invalid", "http://"):
        with pytest.raises(ConfigError, match=f"No server answers at {url}: "):
            asyncio.run(look_up(url))


def test_a_server_that_speaks_tls_alone_is_named_with_its_https_url() -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)

    async def look_up() -> str:
        async with await asyncio.start_server(lambda *_: None, "127.0.0.1", ssl=context) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with BenchClient(Endpoint(base_url=url, path="", model="")) as client:
                with pytest.raises(ConfigError, match=f"{url}: .*its URL is https://{url[7:]}.$"):
                    await client.get_models()

    asyncio.run(look_up())


def test_readiness_waits_for_a_success_and_names_the_last_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backfill.bench.runner._READY_RETRY_S", 0.02)
    loading = refusal(503, {"error": {"message": "loading"}})
    ready = streamed(token(finish="stop"), DONE)

    async def wait(num_failures: int, timeout_s: float) -> int:
        async with ScriptedServer(
            lambda index, _: loading if index < num_failures else ready
        ).running() as server:
            async with BenchClient(Endpoint(server.url, "/v1/completions", "m")) as client:
                await wait_until_ready(client, BenchRequest([1], 1, 1), timeout_s)
            return len(server.bodies)

    assert asyncio.run(wait(1, TIMEOUT_S)) == 2
    with pytest.raises(ConfigError, match=r"not ready within 0.1 s: HTTP 503: loading"):
        asyncio.run(wait(99, 0.1))


STREAM = (
    'data: {"a": "é"}\n\n: ping\n\ndata: two\r\n\r\nevent: x\ndata:three\ndata: lines\n\ndata: [DONE]\n\n'
)
EVENTS = ['{"a": "é"}', "two", "three\nlines", "[DONE]"]


@given(st.lists(st.integers(0, len(STREAM.encode())), max_size=12))
def test_any_cut_gives_the_same_events(cuts: list[int]) -> None:
    encoded, decoder, events = STREAM.encode(), SseDecoder(), []
    edges = [0, *sorted(cuts), len(encoded)]
    for start, end in itertools.pairwise(edges):
        events += decoder.feed(encoded[start:end])
    assert [event.decode() for event in events] == EVENTS
    assert decoder.finish() == []


def test_the_end_of_the_stream_ends_an_event() -> None:
    decoder = SseDecoder()
    assert decoder.feed(b"data: [DONE]") == []
    assert decoder.finish() == [b"[DONE]"]


# How much later than scripted something may happen on a busy machine.
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


def test_what_was_frozen_before_a_run_is_so_after_it() -> None:
    gc.freeze()
    run_load([0.0])
    assert gc.get_freeze_count() > 0


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


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            OSError(errno.ECONNREFUSED, "Connect call failed"),
            os.strerror(errno.ECONNREFUSED),
        ),
        (socket.gaierror(socket.EAI_NONAME, "no such name"), "no such name"),
        (ssl.SSLError(1, "wrong version number"), "wrong version number"),  # 1 is also EPERM
        (OSError("no number"), "no number"),
    ],
)
def test_why_a_server_is_not_reached(error: OSError, reason: str) -> None:
    assert why_not_connected(error) == reason
