"""Which requests an overloaded server refuses, and when it accepts requests again, with a scripted engine."""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from backfill.http.limits import OwnerLimiter
from tests.api.in_process import InProcessServer, in_process_server
from tests.api.servers import wait_until
from tests.api.sockets import RawClient, request
from tests.patience import with_more_time

FLEX = {"prompt": [7], "max_tokens": 1, "service_tier": "flex"}
ONLINE = {"prompt": [7], "max_tokens": 1}
LIMITS = {"max_num_seqs": 1, "max_queued_requests": 1, "max_queued_offline_requests": 2}
JSON_TYPE = {"Content-Type": "application/json"}


def post(server: InProcessServer, body: dict[str, Any]) -> httpx.Response:
    return server.http.post("/v1/completions", json=body)


@contextmanager
def waiting(server: InProcessServer, body: dict[str, Any], count: int) -> Iterator[list[int]]:
    """Keep this many requests in the server; they end with the block, which fills in their statuses."""
    statuses: list[int] = []
    threads = [
        threading.Thread(target=lambda: statuses.append(post(server, body).status_code)) for _ in range(count)
    ]
    num_open = server.state.admission.num_open + count * body.get("n", 1)
    for thread in threads:
        thread.start()
    wait_until(lambda: server.state.admission.num_open == num_open, "the requests to be admitted")
    try:
        yield statuses
    finally:
        server.engine.may_end.set()
        for thread in threads:
            thread.join()


def test_offline_requests_do_not_limit_online_ones(default_model: Path) -> None:
    with in_process_server(default_model, is_open=False, **LIMITS) as server:
        with waiting(server, FLEX, 2) as flex:
            refused = post(server, FLEX)
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "resource_unavailable"
            assert int(refused.headers["Retry-After"]) >= 1
            with waiting(server, ONLINE, 2) as online:
                refused = post(server, ONLINE)
                assert refused.status_code == 429
                assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert flex == online == [200, 200]
        assert server.state.admission.num_open == 0
        exposed = server.http.get("/metrics").text
        for kind in ("online", "offline"):
            assert f'class="{kind}",model_name="m",reason="queue_full"}} 1.0' in exposed


def test_one_owner_cannot_take_the_places_of_another(default_model: Path, tmp_path: Path) -> None:
    """It floods with online and flex requests, large bodies and many choices: it is refused, nobody else."""
    key_file = tmp_path / "keys"
    key_file.write_text("flood=one\n* requests-per-minute=100\nflood concurrency=3 weight=0.5\n")
    limits = {**LIMITS, "max_queued_requests": 5, "api_key_file": key_file, "is_open": False}
    with in_process_server(default_model, api_keys=("other=two",), **limits) as server:
        server.http.headers["Authorization"] = "Bearer one"
        other = {"Authorization": "Bearer two"}
        with waiting(server, ONLINE, 1), waiting(server, {**FLEX, "n": 2}, 1):
            for body in (ONLINE, FLEX):
                refused = post(server, body)
                assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
                assert "limit of 3 choices at once" in refused.json()["error"]["message"]
            with RawClient(server.port) as client:
                headers = {"Content-Length": "1000", "Authorization": "Bearer one", **JSON_TYPE}
                client.send(request(path="/v1/completions", headers=headers))
                assert client.answer()[0] == 429, "before its body has come"
            server.engine.may_end.set()
            answer = server.http.post("/v1/completions", json=ONLINE, headers=other)
            assert answer.status_code == 200
            assert answer.headers["x-ratelimit-limit-requests"] == "100"
            assert answer.headers["x-ratelimit-remaining-requests"] == "99"
        assert post(server, {**ONLINE, "n": 4}).status_code == 400, "more than it may ever have"
        too_many = post(server, {**ONLINE, "n": 200}).json()["error"]["message"]
        assert "128, got 200" in too_many, "more than anybody may have"
        assert post(server, ONLINE).status_code == 200
        weights = {each.owner: each.owner_weight for each in server.engine.requests}
        assert weights == {"flood": 0.5, "other": 1.0}
        assert 'reason="owner_limit"} 3.0' in server.http.get("/metrics").text


def test_a_flood_of_one_owner_leaves_others_their_even_parts(default_model: Path) -> None:
    """Without limits of owners, it fills both queues, from which nobody is dropped."""
    keys = ("flood=one", "other=two")
    with in_process_server(default_model, api_keys=keys, is_open=False, **LIMITS) as server:
        flood, other = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        server.http.headers.update(flood)
        with waiting(server, ONLINE, 2) as online, waiting(server, FLEX, 2) as flex:
            server.http.headers.update(other)
            with waiting(server, ONLINE, 1) as late, waiting(server, FLEX, 1) as late_flex:
                for headers in (flood, other):
                    for body in (ONLINE, FLEX):
                        refused = server.http.post("/v1/completions", json=body, headers=headers)
                        assert refused.status_code == 429
                        assert int(refused.headers["Retry-After"]) >= 1
        assert online + flex + late + late_flex == 6 * [200]
        assert server.state.admission.num_open == 0


def test_an_owner_that_is_refused_again_and_again_waits_for_it(
    default_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not without keys, where all clients are one owner."""
    monkeypatch.setattr("backfill.http.limits._REFUSALS_AT_ONCE", -5.0)  # each waits from the first on
    bad = {**ONLINE, "max_tokens": -1}
    with in_process_server(default_model) as server:
        assert post(server, bad).status_code == 400
        assert not server.state.limiter._uses, "it is not counted"
    with in_process_server(default_model, api_keys=("a=key",)) as server:
        server.http.headers["Authorization"] = "Bearer key"
        began_s = time.monotonic()
        assert post(server, bad).status_code == 400
        assert time.monotonic() - began_s > 0.1


def test_a_refusal_that_waits_keeps_no_body(default_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The body does not count any more, so an owner could have one on each of its connections."""
    kept: list[list[int]] = []

    def refuse(limiter: OwnerLimiter, owner: str) -> float:
        kept.append([])
        error = sys.exc_info()[1]
        while error is not None:
            for frame, _ in traceback.walk_tb(error.__traceback__):
                values = frame.f_locals.values()
                kept[-1] += [len(each) for each in values if isinstance(each, bytes) and len(each) > 9000]
            error = error.__context__
        return 0.0

    monkeypatch.setattr(OwnerLimiter, "refuse", refuse)
    sizes = {"max_body_bytes": 25_000, "max_inflight_body_bytes": 25_000}
    with in_process_server(default_model, api_keys=("a=key",), **sizes) as server:
        key = {"Authorization": "Bearer key", **JSON_TYPE}
        bad = json.dumps({"prompt": "a" * 10_000, "max_tokens": -1}).encode()
        for body in (b"[" * 10_000, bad):
            answer = server.http.post("/v1/completions", content=body, headers=key)
            assert answer.status_code == 400
        with RawClient(server.port) as slow:
            slow.send(request(path="/v1/completions", headers={"Content-Length": "20000", **key}) + bad)
            wait_until(lambda: server.state.bodies.all.total == len(bad), "the slow body")
            answer = server.http.post("/v1/completions", content=b" " * 16_000, headers=key)
            assert answer.status_code == 503
    assert kept == [[], [], []]


def test_a_request_is_refused_before_its_body_is_parsed(default_model: Path) -> None:
    with in_process_server(default_model, is_open=False, **LIMITS) as server:
        with waiting(server, ONLINE, 2):
            bad = server.http.post("/v1/completions", content=b'{"prompt": ', headers=JSON_TYPE)
            assert bad.status_code == 429, "it counts as one online choice, and the online queue is full"
        assert server.http.post("/v1/completions", content=b"{", headers=JSON_TYPE).status_code == 400


def test_a_request_is_refused_before_its_body_when_every_class_is_full(default_model: Path) -> None:
    with (
        in_process_server(default_model, is_open=False, **LIMITS) as server,
        waiting(server, ONLINE, 2),
        waiting(server, {**FLEX, "n": 2}, 1),
        RawClient(server.port) as client,
    ):
        head = request(path="/v1/completions", headers={"Content-Length": "1000", **JSON_TYPE})
        client.send(head)
        assert client.answer()[0] == 429


def test_a_request_that_is_refused_later_releases_its_reservation(default_model: Path) -> None:
    with in_process_server(default_model, **LIMITS) as server:
        for body in ({"prompt": [-1]}, {"prompt": "a", "n": 0}, {"prompt": [[1], [2], [3]]}, {}):
            assert post(server, body).status_code == 400
            assert server.state.admission.num_open == 0
            assert server.state.bodies.all.total == 0
        assert post(server, ONLINE).status_code == 200


def test_prompts_count_as_choices(default_model: Path) -> None:
    limits = {**LIMITS, "max_queued_requests": 3}
    with in_process_server(default_model, is_open=False, **limits) as server, waiting(server, ONLINE, 2):
        assert post(server, {"prompt": [[1], [2], [3]]}).status_code == 429
        assert server.state.admission.num_open == 2


def test_a_class_that_only_parsing_finds_is_counted(default_model: Path) -> None:
    """Parsers differ: the one that only peeks cannot read a body with NaN."""
    raw = b'{"prompt": [7], "max_tokens": 1, "service_tier": "flex", "made_up": NaN}'
    with in_process_server(default_model, is_open=False, **LIMITS) as server, waiting(server, FLEX, 2):
        refused = server.http.post("/v1/completions", content=raw, headers=JSON_TYPE)
        assert refused.json()["error"]["code"] == "resource_unavailable"
        assert server.state.admission.num_open == 2


def test_bodies_of_all_connections_share_a_budget(default_model: Path) -> None:
    sizes = {"max_body_bytes": 10_000, "max_inflight_body_bytes": 10_000}
    with in_process_server(default_model, **sizes) as server, RawClient(server.port) as slow:
        head = request(path="/v1/completions", headers={"Content-Length": "9000", **JSON_TYPE})
        slow.send(head + b'{"prompt": [7], "max_tokens": 1, ' + b" " * 5000)
        wait_until(lambda: server.state.bodies.all.total > 5000, "the slow body")
        for path in ("/v1/completions", "/tokenize", "/detokenize"):
            refused = server.http.post(path, content=b" " * 8000, headers=JSON_TYPE)
            assert refused.status_code == 503, path
            assert "Retry-After" in refused.headers
        assert post(server, ONLINE).status_code == 200, "small bodies fit"
        slow.send(b'"n": 1}' + b" " * (9000 - 5033 - 7))
        assert slow.answer()[0] == 200
        assert server.state.bodies.all.total == 0


def test_offline_bodies_in_preparation_do_not_block_online_ones(default_model: Path) -> None:
    sizes = {"max_body_bytes": 10_000, "max_inflight_body_bytes": 40_000}
    flex = json.dumps({**FLEX, "user": "u" * 4000}).encode() + b" " * 900
    with in_process_server(default_model, **sizes) as server, ExitStack() as stack:
        server.preparation.held = b'"flex"'
        for _ in range(2):
            client = stack.enter_context(RawClient(server.port))
            client.send(request(path="/v1/completions", body=flex, headers=JSON_TYPE))
        wait_until(lambda: server.preparation.num_held == 2, "both to be in preparation")
        refused = post(server, {**FLEX, "user": "u" * 1000})
        assert refused.status_code == 429
        error = refused.json()["error"]
        assert (error["code"], "bodies" in error["message"]) == ("resource_unavailable", True)
        assert "Retry-After" in refused.headers
        assert post(server, {**ONLINE, "user": "u" * 9000}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_client_that_leaves_cancels_the_preparation_of_its_body(default_model: Path, path: str) -> None:
    with in_process_server(default_model) as server:
        server.preparation.held = b"prompt"
        with RawClient(server.port) as client:
            body = json.dumps({"prompt": "word " * 1000}).encode()
            client.send(request(path=path, body=body, headers=JSON_TYPE))
            wait_until(lambda: server.preparation.num_held == 1, "the body to be in preparation")
            assert server.state.bodies.all.total == len(body)
        wait_until(lambda: server.preparation.num_held == 0, "it to be given up")
        wait_until(lambda: server.state.bodies.all.total == 0, "its memory to be given back")
        assert server.state.admission.num_open == 0
        assert server.engine.prompts == []


def test_a_reader_that_stops_holds_no_reservation_and_is_aborted(default_model: Path) -> None:
    with_more_time(lambda factor: stop_reading(default_model, write_timeout_s=0.3 * factor))


def stop_reading(model: Path, write_timeout_s: float) -> None:
    connection = {"write_timeout_s": write_timeout_s}
    with (
        in_process_server(model, connection=connection, is_open=False) as server,
        RawClient(server.port, receive_buffer_bytes=4096) as client,
    ):
        body = json.dumps({"prompt": [7], "max_tokens": 2000, "stream": True}).encode()
        client.send(request(path="/v1/completions", body=body, headers=JSON_TYPE))
        wait_until(lambda: server.engine.num_running == 1, "it to run")
        assert server.state.admission.num_open == 1
        server.engine.may_end.set()
        wait_until(lambda: server.state.admission.num_open == 0, "the engine to end the request")
        assert server.state.num_unanswered == 1, "the client has not read the response"
        wait_until(lambda: server.state.num_unanswered == 0, "the reader to be given up")
        with pytest.raises(ConnectionResetError):
            read_all(client)


def read_all(client: RawClient) -> None:
    while client.socket.recv(1 << 20):
        pass
