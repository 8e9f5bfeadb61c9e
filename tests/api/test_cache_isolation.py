"""Who may share cached prefixes: the owner of a request's API key, and its salt. The engine is scripted."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.in_process import InProcessServer, in_process_server
from tests.api.servers import chunks_of
from tests.api.test_fields import MESSAGES, make_tokenizer

KEY = "bare-key"
DIGEST = hashlib.sha256(KEY.encode()).hexdigest()
PROMPT = {"/v1/completions": {"prompt": [3]}, "/v1/chat/completions": {"messages": MESSAGES}}
ENDPOINTS = pytest.mark.parametrize("endpoint", PROMPT)


@pytest.fixture(scope="module")
def server() -> Iterator[InProcessServer]:
    keys = ("alice=one", "alice=two", "bob=three", KEY)
    with in_process_server(Path(), tokenizer=make_tokenizer(), api_keys=keys) as server:
        yield server


def post(server: InProcessServer, endpoint: str, key: str = "one", **fields: Any) -> httpx.Response:
    body = {**PROMPT[endpoint], "max_tokens": 3, **fields}
    return server.http.post(endpoint, json=body, headers={"Authorization": f"Bearer {key}"})


@ENDPOINTS
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("size", [1, 2_000], ids=["small", "large"])
def test_a_request_has_the_owner_of_its_key_and_its_salt(
    server: InProcessServer, endpoint: str, stream: bool, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    # A body over 4 KiB is prepared elsewhere.
    padding = {"metadata": "x" * 4 * size}
    for key, owner in (("one", "alice"), ("two", "alice"), ("three", "bob"), (KEY, DIGEST)):
        answer = post(server, endpoint, key, stream=stream, cache_salt="a-salt", **padding)
        assert answer.status_code == 200, answer.text
        request = server.engine.requests[-1]
        assert (request.owner, request.cache_salt) == (owner, "a-salt")
    post(server, endpoint, stream=stream, n=2)
    assert [(each.owner, each.cache_salt) for each in server.engine.requests[-2:]] == [("alice", "")] * 2
    assert DIGEST not in caplog.text and "a-salt" not in caplog.text


def test_without_keys_all_requests_have_one_owner() -> None:
    with in_process_server(Path(), tokenizer=make_tokenizer()) as server:
        assert post(server, "/v1/completions").status_code == 200
        assert server.engine.requests[-1].owner == ""


@ENDPOINTS
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("salt", ["", "s" * 257, 5, True, ["s"], {}])
def test_a_bad_salt_is_refused_and_named(
    server: InProcessServer, endpoint: str, stream: bool, salt: object
) -> None:
    refused = post(server, endpoint, stream=stream, cache_salt=salt)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "cache_salt")
    assert "cache_salt" in error["message"]


def test_a_strict_server_knows_the_salt() -> None:
    with in_process_server(Path(), tokenizer=make_tokenizer(), strict=True) as server:
        answer = post(server, "/v1/completions", cache_salt="s" * 256)
        assert answer.status_code == 200
        assert "x-backfill-warning" not in answer.headers


@ENDPOINTS
def test_usage_reports_what_the_engine_found(server: InProcessServer, endpoint: str) -> None:
    server.engine.num_cached_tokens = 1
    try:
        whole = post(server, endpoint).json()["usage"]
        several = post(server, endpoint, n=3).json()["usage"]
        stream = post(server, endpoint, stream=True, stream_options={"include_usage": True})
    finally:
        server.engine.num_cached_tokens = 0
    assert whole["prompt_tokens_details"] == {"cached_tokens": 1}
    assert several == {**whole, "completion_tokens": 9, "total_tokens": whole["prompt_tokens"] + 9}
    last = chunks_of(stream.text)[-1]
    assert (last["choices"], last["usage"]) == ([], whole)
