"""TTFT and gaps are measured at the socket, and without the time of clients that do not read.

Latencies are on a clock that only the test moves.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.responses import Response

from backfill.api.app import create_app
from backfill.bench.client import BenchClient, Endpoint
from backfill.bench.record import BenchRequest, Outcome, RequestRecord
from backfill.core.clock import VirtualClock
from backfill.core.request import FinishReason, Request
from backfill.core.sampling import SamplingParams
from backfill.engine.messages import TokenOutput
from backfill.generation.generator import TextGenerator
from backfill.http.connection import ClientStalls
from backfill.http.streaming import EventStream
from backfill.protocol.service import CompletionService
from tests.api.in_process import InProcessServer, in_process_server
from tests.api.servers import TIMEOUT_S, wait_until
from tests.api.sockets import RawClient, limits, request, serving
from tests.api.test_fields import make_tokenizer
from tests.generation.test_generator import ScriptedTokens
from tests.generation.test_timeline import Waits
from tests.http.test_bodies import still_connected
from tests.patience import until
from tests.protocol.builders import make_generation

pytestmark = pytest.mark.anyio

JSON_TYPE = {"Content-Type": "application/json"}
# The server's own TPOT objective is 0.15 s.
MISSED_S = 0.373


class WatchedClock(VirtualClock):
    """Counts how often it was read."""

    num_reads = 0

    def now_s(self) -> float:
        self.num_reads += 1
        return super().now_s()


@contextmanager
def timed_server(model: Path, **options: Any) -> Iterator[tuple[InProcessServer, WatchedClock]]:
    clock = WatchedClock()
    with in_process_server(model, clock=clock, **options) as server:
        yield server, clock


def sample(server: InProcessServer, name: str, **labels: str) -> float:
    assert server.state.metrics is not None
    labels = {"model_name": "m", "engine": "0", "class": "online", **labels}
    return server.state.metrics.registry.get_sample_value(f"backfill:{name}", labels) or 0.0


def num_gaps(server: InProcessServer) -> float:
    return sample(server, "inter_token_latency_seconds_count")


def num_first_tokens(server: InProcessServer) -> float:
    return sample(server, "time_to_first_token_seconds_count")


def body_of(**fields: Any) -> bytes:
    return json.dumps({"prompt": [7], "stream": True, **fields}).encode()


def post(body: bytes) -> bytes:
    return request("POST", "/v1/completions", body, JSON_TYPE)


def read_until(client: RawClient, end: bytes) -> bytes:
    received = b""
    while end not in received:
        data = client.socket.recv(65536)
        assert data, f"the connection ended after {received[-200:]!r}"
        received += data
    return received


def test_the_wait_for_the_first_token_begins_with_the_first_byte(default_model: Path) -> None:
    with timed_server(default_model) as (server, clock), RawClient(server.port) as client:
        whole = post(body_of(max_tokens=1))
        client.send(whole[:1])
        wait_until(lambda: clock.num_reads > 0, "the first byte")
        clock.advance(0.25)
        client.send(whole[1:-5])
        wait_until(lambda: server.state.bodies.all.total > 0, "a part of the body")
        clock.advance(0.5)
        client.send(whole[-5:])
        read_until(client, b"[DONE]")
        wait_until(lambda: num_first_tokens(server) == 1, "the first token")
        assert sample(server, "time_to_first_token_seconds_sum") == 0.75
        wait_until(lambda: sample(server, "e2e_request_latency_seconds_count") == 1, "the request's end")
        assert sample(server, "e2e_request_latency_seconds_sum") == 0.75


def test_a_request_sent_ahead_is_received_when_the_one_before_it_is_answered() -> None:
    clock, received, may_answer = WatchedClock(), [], threading.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        received.append(scope["state"]["received_at_s"])
        while not may_answer.is_set():
            await asyncio.sleep(0.005)
        await Response()(scope, receive, send)

    with serving(app, limits(), clock=clock) as port, RawClient(port) as client:
        client.send(request() * 2)
        wait_until(lambda: len(received) == 1, "the first request")
        clock.advance(3.0)
        may_answer.set()
        for _ in range(2):
            assert client.answer()[0] == 200
        assert received == [0.0, 3.0]


def test_the_server_and_the_load_generator_measure_the_same(
    default_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ttft_s, gaps_s = 0.5, [0.125, MISSED_S, 0.0625]

    async def measure(server: InProcessServer, clock: WatchedClock) -> RequestRecord:
        server.engine.num_allowed = 0
        record = RequestRecord(0.0, 1)
        async with BenchClient(Endpoint(server.url, "/v1/completions", "m")) as client:
            sending = asyncio.create_task(client.send(BenchRequest([7], 1, 4), record, 0.0))
            await until(lambda: server.engine.requests)
            for number, wait_s in enumerate([ttft_s, *gaps_s], start=1):
                clock.advance(wait_s)
                server.engine.num_allowed = number
                await until(lambda n=number: len(record.chunk_after_s) == n)  # type: ignore[misc]
                await until(lambda n=number: num_first_tokens(server) + num_gaps(server) == n)  # type: ignore[misc]
            await sending
        return record

    with timed_server(default_model) as (server, clock):
        monkeypatch.setattr("backfill.bench.client.time", SimpleNamespace(perf_counter=clock.now_s))
        record = asyncio.run(measure(server, clock))
        assert record.outcome is Outcome.COMPLETED, record.error
        assert record.ttft_s == ttft_s == sample(server, "time_to_first_token_seconds_sum")
        seen_s = [
            after - before
            for before, after in zip(record.chunk_after_s, record.chunk_after_s[1:], strict=False)
        ]
        assert seen_s == pytest.approx(gaps_s)
        assert sample(server, "inter_token_latency_seconds_sum") == pytest.approx(sum(seen_s))
        assert sample(server, "slo_missed_total", slo="tpot") == 1
        assert sample(server, "slo_attained_total", slo="tpot") == 2
        assert sample(server, "client_stalled_seconds_total") == 0


def test_a_stream_reports_the_gaps_as_they_were_written(default_model: Path) -> None:
    with timed_server(default_model) as (server, clock), RawClient(server.port) as client:
        server.engine.num_allowed = 1
        client.send(post(body_of(max_tokens=3, slo={"ttft": 1.0, "tpot": 0.2})))
        wait_until(lambda: num_first_tokens(server) == 1, "the first token")
        clock.advance(0.125)
        server.engine.num_allowed = 2
        wait_until(lambda: num_gaps(server) == 1, "the second token")
        clock.advance(MISSED_S)
        server.engine.num_allowed = 3
        received = read_until(client, b"[DONE]")
        (metrics,) = [
            json.loads(event[6:])["metrics"] for event in received.split(b"\n") if b'"metrics"' in event
        ]
        assert metrics == {
            "ttft": 0.0,
            "max_itl": MISSED_S,
            "ttft_slo": 1.0,
            "tpot_slo": 0.2,
            "ttft_slo_met": True,
            "tpot_slo_met": False,
        }


def test_the_time_in_which_a_client_does_not_read_is_its_own(
    default_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stalled = threading.Event()
    begin = ClientStalls.begin

    def begin_and_wait(stalls: ClientStalls) -> None:
        begin(stalls)
        if not stalled.is_set():
            # On the server's thread, which reads the clock twice for a gap.
            clock.advance(5.0)
            stalled.set()

    monkeypatch.setattr(ClientStalls, "begin", begin_and_wait)
    with (
        timed_server(default_model) as (server, clock),
        RawClient(server.port, receive_buffer_bytes=99) as lazy,
    ):
        lazy.send(post(body_of(max_tokens=2000)))
        assert stalled.wait(TIMEOUT_S), "the server's buffer is full"
        assert num_gaps(server) < 1999
        read_until(lazy, b"[DONE]")
        wait_until(lambda: num_gaps(server) == 1999, "the last gap")
        assert sample(server, "client_stalled_seconds_total") == 5.0
        assert sample(server, "slo_missed_total", slo="tpot") == 0
        assert sample(server, "inter_token_latency_seconds_sum") == 0.0
        wait_until(
            lambda: sample(server, "request_time_per_output_token_seconds_count") == 1, "the request's end"
        )
        assert sample(server, "request_time_per_output_token_seconds_sum") == 0.0
        assert sample(server, "e2e_request_latency_seconds_sum") == 5.0


def test_the_gaps_of_a_whole_answer_are_those_between_tokens_that_reach_the_server(
    default_model: Path,
) -> None:
    with timed_server(default_model) as (server, clock), RawClient(server.port) as client:
        server.engine.num_allowed = 1
        client.send(post(body_of(max_tokens=2, stream=False, slo={"ttft": 1.0, "tpot": 1.0})))
        wait_until(lambda: num_first_tokens(server) == 1, "the first token")
        clock.advance(0.25)
        server.engine.num_allowed = 2
        metrics = json.loads(client.answer()[1])["metrics"]
        assert (metrics["ttft"], metrics["max_itl"]) == (0.0, 0.25)
        assert sample(server, "inter_token_latency_seconds_sum") == 0.25


def test_every_choice_of_a_stream_is_measured_and_ends_once(default_model: Path) -> None:
    with timed_server(default_model) as (server, _):
        answer = server.http.post("/v1/completions", content=body_of(max_tokens=3, n=2), headers=JSON_TYPE)
        assert answer.text.endswith("data: [DONE]\n\n")
        wait_until(lambda: sample(server, "request_generation_tokens_count") == 2, "the end of both")
        assert num_first_tokens(server) == 2
        assert num_gaps(server) == 4
        assert sample(server, "generation_tokens_total") == 6
        assert sample(server, "request_success_total", finished_reason="length") == 2


def test_a_client_that_leaves_has_only_what_was_written(default_model: Path) -> None:
    with timed_server(default_model) as (server, _):
        server.engine.num_allowed = 2
        with RawClient(server.port) as client:
            client.send(post(body_of(max_tokens=3)))
            wait_until(lambda: num_gaps(server) == 1, "two tokens")
        aborted = {"finished_reason": "abort"}
        wait_until(lambda: sample(server, "request_success_total", **aborted) == 1, "the end of the request")
        assert num_gaps(server) == 1


async def test_a_slow_write_is_part_of_the_wait() -> None:
    clock, waits = VirtualClock(), Waits()
    script = [{}, {}, {"finish_reason": FinishReason.LENGTH}]
    tokens: Any = ScriptedTokens(script)
    service = CompletionService(make_tokenizer(), TextGenerator(tokens, make_tokenizer(), waits, clock))

    async def send(message: Any) -> None:
        if b'"text"' in message.get("body", b""):
            clock.advance(MISSED_S)

    chunks = service.run_stream(make_generation(), 0.0)
    await EventStream(chunks, lambda: None)({"type": "http"}, still_connected, send)
    assert waits.ttfts_s == pytest.approx([MISSED_S])
    assert waits.gaps_s == pytest.approx([MISSED_S, MISSED_S])
    assert waits.num_tokens == 3
    assert len(waits.finished) == 1


async def test_each_choice_of_a_stream_ends_with_its_own_last_token() -> None:
    clock, waits = VirtualClock(), Waits()

    class UnequalTokens:
        """The first choice has one token, the second has three, 1 s apart."""

        async def generate(self, request: Request, **_: object) -> AsyncGenerator[TokenOutput, None]:
            num_tokens = request.sampling.max_tokens
            for number in range(1, num_tokens + 1):
                if number > 1:
                    while len(waits.ttfts_s) + len(waits.gaps_s) < number:
                        await asyncio.sleep(0)
                    clock.advance(1.0)
                reason = FinishReason.LENGTH if number == num_tokens else None
                yield TokenOutput(request.request_id, 5, finish_reason=reason)

    tokens: Any = UnequalTokens()
    service = CompletionService(make_tokenizer(), TextGenerator(tokens, make_tokenizer(), waits, clock))
    generation = make_generation(num_choices=2)
    generation.request.samplings[1] = SamplingParams(max_tokens=3)
    async with asyncio.timeout(TIMEOUT_S):
        async for _ in service.run_stream(generation, 0.0):
            pass
    assert [(each.num_output_tokens, each.finished_at_s) for each in waits.finished] == [(1, 0.0), (3, 2.0)]
    assert {each.finish_reason for each in waits.finished} == {FinishReason.LENGTH}


def test_another_asgi_server_measures_from_the_middleware_on(default_model: Path) -> None:
    async def stream(server: InProcessServer) -> httpx.Response:
        transport = httpx.ASGITransport(create_app(server.state))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.post("/v1/completions", content=body_of(max_tokens=2), headers=JSON_TYPE)

    with timed_server(default_model) as (server, _):
        response = asyncio.run(stream(server))
        assert response.status_code == 200
        assert response.text.endswith("data: [DONE]\n\n")
        assert (num_first_tokens(server), num_gaps(server)) == (1, 1)
        assert sample(server, "client_stalled_seconds_total") == 0


def test_stalls_add_up_and_one_that_goes_on_counts() -> None:
    clock = VirtualClock()
    stalls = ClientStalls(clock)
    stalls.end()
    for _ in range(2):
        stalls.begin()
        clock.advance(1.0)
        stalls.begin()
        clock.advance(1.0)
        stalls.end()
        clock.advance(10.0)
    assert stalls.total_s() == 4.0
    stalls.begin()
    clock.advance(0.5)
    assert stalls.total_s() == 4.5
