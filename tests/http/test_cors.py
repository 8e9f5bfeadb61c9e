"""Web pages of other origins (--allowed-origins)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient

from backfill.core.errors import ConfigError
from backfill.http.config import ServerConfig
from backfill.http.keys import ApiKeys
from tests.api.in_process import InProcessServer, in_process_server, unstarted_app

PAGE = "https://app.example"
BODY = {"prompt": [5], "max_tokens": 1}
ASKED = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type",
}


@pytest.fixture(scope="module")
def server(default_model: Path) -> Iterator[InProcessServer]:
    with in_process_server(default_model, allowed_origins=(PAGE,)) as server:
        yield server


def post(server: InProcessServer, **headers: str) -> httpx.Response:
    return server.http.post("/v1/completions", json=BODY, headers=headers)


def test_an_allowed_page_reads_answers_and_errors(server: InProcessServer) -> None:
    answered = post(server, origin=PAGE)
    assert answered.status_code == 200
    assert answered.headers["access-control-allow-origin"] == PAGE
    assert "x-backfill-warning" in answered.headers["access-control-expose-headers"]
    for path, status in (("/v1/nothing", 404), ("/v1/completions", 405)):
        refused = server.http.get(path, headers={"Origin": PAGE})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (status, PAGE)
    twice = server.http.post(
        "/v1/completions",
        json=BODY,
        headers=[("origin", PAGE), ("x-slo-ttft-ms", "1")] * 2,
    )
    assert (twice.status_code, twice.headers["access-control-allow-origin"]) == (400, PAGE)


def test_an_allowed_page_reads_that_the_server_had_an_error(
    server: InProcessServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(server.state.admission, "check_capacity", fail)
    failed = post(server, **{"origin": PAGE, "x-request-id": "mine-1"})
    assert (failed.status_code, failed.json()["error"]["type"]) == (500, "server_error")
    assert failed.headers["access-control-allow-origin"] == PAGE
    assert failed.headers["x-request-id"] == "mine-1"
    (logged,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "mine-1" in logged.getMessage()
    assert logged.exc_info is not None
    assert 'status="500"' in server.http.get("/metrics").text


def test_a_preflight_says_what_an_allowed_page_may_send(server: InProcessServer) -> None:
    answered = server.http.options("/v1/completions", headers=ASKED)
    assert answered.status_code == 200
    assert answered.headers["access-control-allow-origin"] == PAGE
    assert "POST" in answered.headers["access-control-allow-methods"]
    assert answered.headers["access-control-allow-headers"] == ASKED["Access-Control-Request-Headers"]


def test_other_pages_and_rebound_names_are_refused(server: InProcessServer) -> None:
    other = post(server, origin="https://evil.example")
    assert other.status_code == 403
    assert "--allowed-origins" in other.json()["error"]["message"]
    assert "access-control-allow-origin" not in other.headers
    preflight = server.http.options("/v1/completions", headers={**ASKED, "Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in preflight.headers
    assert post(server, origin=PAGE, host="evil.example").status_code == 403


def test_a_preflight_needs_no_key_and_a_page_can_read_a_401() -> None:
    client = TestClient(unstarted_app(ApiKeys(["key"]), allowed_origins=(PAGE,)), base_url="http://localhost")
    assert client.options("/v1/completions", headers=ASKED).status_code == 200
    refused = client.post("/v1/completions", json=BODY, headers={"Origin": PAGE})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)


@pytest.mark.parametrize(
    ("allowed", "sent"),
    [
        ("https://App.Example", PAGE),
        ("HTTPS://app.example:443", PAGE),
        ("http://localhost:80", "http://localhost"),
        ("http://[::1]:8080", "http://[::1]:8080"),
        ("http://app.example:443", "http://app.example:443"),
    ],
)
def test_an_allowed_origin_is_normalised(allowed: str, sent: str) -> None:
    ServerConfig(allowed_origins=(allowed,)).validate()
    client = TestClient(unstarted_app(allowed_origins=(allowed,)), base_url="http://localhost")
    assert client.post("/v1/nothing", headers={"Origin": sent}).headers["access-control-allow-origin"] == sent


def test_allowing_any_page_without_a_key_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    unstarted_app(ApiKeys(["key"]), allowed_origins=("*",))
    unstarted_app(allowed_origins=(PAGE,))
    assert not caplog.records
    unstarted_app(allowed_origins=("*",))
    assert "any web page" in caplog.text


def test_any_page_may_send_requests_when_all_are_allowed(default_model: Path) -> None:
    with in_process_server(default_model, allowed_origins=("*",)) as server:
        answered = post(server, origin="https://any.example")
        assert answered.status_code == 200
        assert answered.headers["access-control-allow-origin"] == "*"
        assert post(server, origin="https://any.example", host="any.example").status_code == 403


def test_without_the_option_no_cors_header_is_sent(default_model: Path) -> None:
    with in_process_server(default_model) as server:
        answered = post(server, origin="http://localhost:3000")
        assert answered.status_code == 200
        assert not any(name.startswith("access-control") for name in answered.headers)


@pytest.mark.parametrize(
    "origin",
    [
        "app.example",
        "https://app.example/",
        "https://a.example/b",
        "https://a.example?b",
        "https://*.example",
        "https://b\u00fccher.example",
        "",
        "null",
    ],
)
def test_an_invalid_origin_is_named(origin: str) -> None:
    with pytest.raises(ConfigError, match="`allowed_origins`"):
        ServerConfig(allowed_origins=(origin,)).validate()
    ServerConfig(allowed_origins=("*", PAGE, "http://localhost:3000", "chrome-extension://abc")).validate()
