"""Checks of the head, on every route."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from backfill.core.errors import ConfigError
from backfill.http.config import ServerConfig
from backfill.http.request_head import allowed_hosts
from tests.api.in_process import InProcessServer, in_process_server
from tests.api.sockets import RawClient, request

BODY = json.dumps({"prompt": [7], "max_tokens": 1}).encode()
JSON_TYPE = {"Content-Type": "application/json"}
OFFLINE = ("X-Gateway-Inference-Objective=batch",)


@pytest.fixture(scope="module")
def server(default_model: Path) -> Iterator[InProcessServer]:
    with in_process_server(
        default_model, allowed_hosts=("models.example:9000",), offline_header=OFFLINE
    ) as server:
        yield server


def ask(server: InProcessServer, headers: dict[str, str], method: str = "POST") -> tuple[int, str]:
    path = "/v1/completions" if method == "POST" else "/v1/models"
    with RawClient(server.port) as client:
        client.send(request(method, path, BODY if method == "POST" else b"", {**JSON_TYPE, **headers}))
        status, body = client.answer()
        return status, json.loads(body).get("error", {}).get("message", "")


def test_a_header_of_a_gateway_makes_a_request_offline(server: InProcessServer) -> None:
    for value, tier in (("batch", "flex"), ("chat", "default")):
        with RawClient(server.port) as client:
            headers = {**JSON_TYPE, "x-service-tier": "default", "x-gateway-inference-objective": value}
            client.send(request("POST", "/v1/completions", BODY, headers))
            status, body = client.answer()
        assert (status, json.loads(body)["service_tier"]) == (200, tier)


@pytest.mark.parametrize("header", ["batch", "=batch", "x-a=", "x a=b", "x-a= b", "x-a=\u00e9"])
def test_an_option_that_is_no_header_is_refused(header: str) -> None:
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        ServerConfig(offline_header=(header,)).validate()


@pytest.mark.parametrize("name", ["x-slo-ttft", "X-SLO-Ttft-S"])
def test_a_misspelt_objective_is_refused_with_the_names_that_exist(
    server: InProcessServer, name: str
) -> None:
    status, message = ask(server, {name: "500"})
    assert status == 400
    assert message == (
        f"There is no header {name.lower()}; objectives are x-slo-tpot-ms and x-slo-ttft-ms, in milliseconds."
    )


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:1", "[::1]", "[::1]:8000", "models.example"],
)
def test_hosts_that_are_this_server(server: InProcessServer, host: str) -> None:
    assert ask(server, {"Host": host}) == (200, "")


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.nip.io",
        "10.0.0.1",
        "",
        "[::2]",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_another_host_is_refused(server: InProcessServer, host: str, method: str) -> None:
    status, message = ask(server, {"Host": host}, method)
    assert status == 403
    assert "--allowed-hosts" in message


def test_a_web_page_may_not_send_anything_here(server: InProcessServer) -> None:
    for origin in ("https://evil.example", "null", "http://[::2", "http://127.0.0.1.evil.example"):
        assert ask(server, {"Origin": origin})[0] == 403, origin
    for origin in ("http://localhost:3000", "http://127.0.0.1:8000", "http://models.example"):
        assert ask(server, {"Origin": origin})[0] == 200, origin


def test_hosts_are_checked_only_on_loopback_without_a_key() -> None:
    assert allowed_hosts(ServerConfig()) == {"localhost", "127.0.0.1", "::1"}
    assert allowed_hosts(ServerConfig(host="127.0.0.5")) == {"localhost", "127.0.0.1", "::1", "127.0.0.5"}
    assert allowed_hosts(ServerConfig(host="::1")) == {"localhost", "127.0.0.1", "::1"}
    assert allowed_hosts(ServerConfig(host="0.0.0.0")) is None
    assert allowed_hosts(ServerConfig(host="10.0.0.1")) is None
    assert allowed_hosts(ServerConfig(api_key_file=Path("keys"))) is None
    assert allowed_hosts(ServerConfig(api_key=("key",))) is None
    assert allowed_hosts(ServerConfig(allowed_hosts=("*",))) is None


@pytest.mark.parametrize(
    "name",
    [
        "x-slo-ttft-ms",
        "X-Slo-Tpot-Ms",
        "X-Vllm-Priority",
        "x-request-id",
        "Authorization",
        "Content-Type",
        "Host",
    ],
)
def test_a_header_sent_twice_is_named(server: InProcessServer, name: str) -> None:
    with RawClient(server.port) as client:
        fields = {"Host": "localhost", "Content-Length": str(len(BODY)), **JSON_TYPE}
        lines = [f"{key}: {value}\r\n" for key, value in fields.items() if key != name]
        lines += [f"{name}: 1000\r\n", f"{name}: 2000\r\n"]
        client.send(f"POST /v1/completions HTTP/1.1\r\n{''.join(lines)}\r\n".encode() + BODY)
        status, body = client.answer()
    assert status == 400
    assert name.lower() in json.loads(body)["error"]["message"]


def test_two_lengths_of_one_body_are_refused(server: InProcessServer) -> None:
    with RawClient(server.port) as client:
        client.send(
            b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nabc"
        )
        assert client.answer()[0] == 400


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonp", ""]
)
def test_a_body_that_does_not_say_it_is_json_is_refused(
    server: InProcessServer, path: str, content_type: str | None
) -> None:
    """Browsers send such bodies for any page, without a preflight."""
    headers = {} if content_type is None else {"Content-Type": content_type}
    refused = server.http.post(path, content=BODY, headers=headers)
    assert refused.status_code == 400
    assert "application/json" in refused.json()["error"]["message"]


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/Vnd.Api+JSON"])
def test_other_names_of_json_are_accepted(server: InProcessServer, content_type: str) -> None:
    answered = server.http.post(
        "/v1/completions",
        content=BODY,
        headers={"Content-Type": content_type},
    )
    assert answered.status_code == 200


def test_a_compressed_body_is_415_and_an_identical_one_is_not(server: InProcessServer) -> None:
    def post(content: bytes, encoding: str) -> httpx.Response:
        headers = {**JSON_TYPE, "Content-Encoding": encoding}
        return server.http.post("/v1/completions", content=content, headers=headers)

    refused = post(gzip.compress(BODY), "gzip")
    assert refused.status_code == 415
    assert "'gzip'" in refused.json()["error"]["message"]
    assert post(BODY, "identity").is_success


@pytest.mark.parametrize(
    "path",
    ["/v1/embeddings", "/v1/messages", "/v1/responses/resp_1", "/v1/moderations", "/v1/images/generations"],
)
def test_unsupported_endpoints_are_501(server: InProcessServer, path: str) -> None:
    answered = server.http.post(path, json={"input": "a"})
    assert answered.status_code == 501
    assert answered.json()["error"]["type"] == "server_error"
    instead = path.startswith(("/v1/messages", "/v1/responses"))
    assert ("/v1/chat/completions" in answered.json()["error"]["message"]) == instead


def test_anthropic_s_counts_and_batches_name_the_path_to_use(server: InProcessServer) -> None:
    for path, instead in (("count_tokens", "/tokenize"), ("batches/msgbatch_1", "/v1/batches")):
        refused = server.http.post(f"/v1/messages/{path}", json={})
        assert refused.json()["error"]["message"].endswith(f"Use POST {instead}.")


def test_ollama_s_endpoints_name_the_path_to_use(server: InProcessServer) -> None:
    refused = server.http.post("/api/chat", json={"model": "m", "messages": []})
    asked = ("/api/tags", "/api/ps", "/api/show")
    assert {refused.status_code, *(server.http.get(path).status_code for path in asked)} == {501}
    assert refused.json()["error"].endswith("Use OpenAI's: POST /v1/chat/completions")


def test_unknown_routes_stay_404_and_wrong_methods_405(server: InProcessServer) -> None:
    nothing = server.http.get("/v1/nothing")
    assert (nothing.status_code, nothing.json()["error"]["type"]) == (404, "invalid_request_error")
    assert nothing.json()["error"]["message"].startswith("There is no /v1/nothing on this server")
    assert "Did you mean" not in nothing.json()["error"]["message"]
    for path, meant in (("/chat/completions", "/v1/chat/completions"), ("/v1/model", "/v1/models")):
        assert f"Did you mean {meant}?" in server.http.get(path).json()["error"]["message"]
    wrong = server.http.get("/v1/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert wrong.json()["error"]["message"] == "GET is not allowed for /v1/completions, only POST."
    assert "GET" in server.http.delete("/docs").headers["allow"]
