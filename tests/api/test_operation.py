"""Health, metrics, models, keys, overload, disconnects, a killed engine, shutdown."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from backfill.bench.scrape import parse_totals, total_tokens
from tests.api.servers import MODEL, TIMEOUT_S, RunningServer, ending, launch_small, small_server, wait_until
from tests.cli.running import assert_refused, run_cli_here

LONG: dict[str, Any] = {"prompt": "Count:", "max_tokens": 1500, "ignore_eos": True}
# The small model takes as long for this many tokens.
LONGER: dict[str, Any] = {**LONG, "max_tokens": 20000}


def test_models_health_version_and_load(server: RunningServer) -> None:
    (card,) = server.http.get("/v1/models").json()["data"]
    assert card["id"] == MODEL
    assert card["max_model_len"] == 2048
    assert Path(card["root"], "tokenizer.json").is_file(), "clients load the tokenizer from root"
    assert server.http.get(f"/v1/models/{MODEL}").json() == card
    for path in ("/health", "/health/live", "/ping"):
        assert server.http.get(path).status_code == 200
    assert "version" in server.http.get("/version").json()
    wait_until(lambda: server.http.get("/load").json() == {"server_load": 0}, "the end of other tests' load")


def test_tokenize_round_trip(server: RunningServer) -> None:
    answer = server.http.post("/tokenize", json={"prompt": "café 12"}).json()
    assert answer["count"] == len(answer["tokens"])
    assert server.http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "café 12"}
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    assert server.http.post("/tokenize", json=chat).json()["count"] > 5


def test_metrics_count_what_happened(server: RunningServer) -> None:
    names = {
        "backfill:generation_tokens_total": 3.0,
        "backfill:prompt_tokens_total": 2.0,
        "backfill:time_to_first_token_seconds_count": 1.0,
        "backfill:inter_token_latency_seconds_count": 2.0,
        "backfill:request_queue_time_seconds_count": 1.0,
        "backfill:request_success_total": 1.0,
        "http_requests_total": 1.0,
    }
    before = {name: server.metric(name) for name in names}
    server.http.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 3, "ignore_eos": True})
    http = "http_requests_total"  # counted once the response is sent
    wait_until(lambda: server.metric(http) > before[http], "the request to be counted")
    assert {name: server.metric(name) - before[name] for name in names} == names
    assert server.metric("backfill:cache_config_info", block_size="16") == 1
    text = server.http.get("/metrics").text
    assert "vllm:num_requests_running" in text
    assert 'class="online"' in text


def test_the_counters_give_every_token_once(server: RunningServer) -> None:
    def served() -> float:
        return total_tokens(parse_totals(server.http.get("/metrics").text)) or 0.0

    # What an aborted request of another test had computed is reported after its step.
    wait_until(
        lambda: server.metric("backfill:num_requests_running") == 0, "the end of other tests' requests"
    )
    before = served()
    for number, tier in enumerate(("default", "flex")):
        prompt = list(range(1000 + 100 * number, 1030 + 100 * number))
        answer = server.complete(prompt, max_tokens=5, service_tier=tier)
        assert answer["usage"]["total_tokens"] == 35
    assert served() - before == 70


def test_a_client_that_disconnects_has_its_request_aborted(server: RunningServer) -> None:
    aborted = server.metric("backfill:request_success_total", finished_reason="abort")
    with server.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
        next(response.iter_lines())
    wait_until(lambda: server.metric("backfill:num_requests_running") == 0, "it to be aborted")
    body = json.dumps(LONG).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: %d"
    with socket.create_connection((server.http.base_url.host, server.http.base_url.port or 80)) as leaver:
        leaver.sendall(head % len(body) + b"\r\n\r\n" + body)
        wait_until(lambda: server.metric("backfill:num_requests_running") == 1, "the next to run")
    wait_until(lambda: server.metric("backfill:num_requests_running") == 0, "this one too")
    wait_until(lambda: server.metric("backfill:kv_cache_usage_perc") == 0, "their blocks")
    assert server.metric("backfill:request_success_total", finished_reason="abort") == aborted + 2


@pytest.fixture(scope="module")
def own_server(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of this module with room for four requests, which tests may kill; the last one ends it."""
    limits = ("--max-num-seqs", "2", "--max-queued-requests", "2")
    with small_server(small_model, *limits, data_dir=tmp_path_factory.mktemp("data")) as server:
        yield server


@pytest.mark.slow  # in one process: tests/api/test_overload.py
def test_a_full_queue_answers_429_with_retry_after(own_server: RunningServer) -> None:
    server, refused = own_server, "backfill:admission_rejections_total"
    before = server.metric(refused, reason="queue_full")
    with ThreadPoolExecutor(4) as pool, server.paused_engine():
        for _ in range(4):
            pool.submit(server.http.post, "/v1/completions", json={**LONG, "max_tokens": 20})
        wait_until(lambda: server.http.get("/load").json()["server_load"] == 4, "a full queue")
        response = server.http.post("/v1/completions", json={"prompt": "hi"})
        assert response.status_code == 429
        assert 1 <= int(response.headers["retry-after"]) <= 120
        assert response.json()["error"]["code"] == "rate_limit_exceeded"
        too_many = server.http.post("/v1/completions", json={"prompt": "hi", "n": 5})
        assert too_many.status_code == 400, "no retry would help"
    assert server.metric(refused, reason="queue_full") == before + 1
    # The official client retries on its own and succeeds.
    answer = server.client(max_retries=5).completions.create(model=MODEL, prompt="hi", max_tokens=1)
    assert answer.usage is not None


def test_a_killed_engine_fails_its_requests_and_comes_back(server: RunningServer) -> None:
    killed = server.engine_pid()
    with server.http.stream("POST", "/v1/completions", json={**LONG, "n": 8, "stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        os.kill(killed, signal.SIGKILL)
        rest = [line.removeprefix("data: ") for line in lines if line]
    assert rest[-1] == "[DONE]"
    assert "killed by signal 9" in json.loads(rest[-2])["error"]["message"]
    wait_until(lambda: server.http.get("/health").status_code == 503, "the engine to be missed")
    refused = server.http.post("/v1/completions", json={"prompt": "hi"})
    assert refused.status_code == 503
    assert "retry-after" in refused.headers
    assert server.metric("backfill:num_requests_running") == 0
    server.wait_ready()
    assert server.engine_pid() != killed
    assert server.http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1}).status_code == 200


@pytest.mark.slow
def test_requests_sent_while_the_engine_dies_get_an_answer(own_server: RunningServer) -> None:
    def complete(num_choices: int) -> httpx.Response:
        body = {"prompt": "hi", "max_tokens": 4, "n": num_choices}
        return own_server.http.post("/v1/completions", json=body)

    with ThreadPoolExecutor(2) as pool:
        os.kill(own_server.engine_pid(), signal.SIGKILL)
        for response in pool.map(complete, (1, 2)):
            assert response.status_code == 503
            assert response.json()["error"]["type"] == "service_unavailable_error"
    wait_until(lambda: own_server.http.get("/health").status_code == 503, "the engine to be missed")
    own_server.wait_ready()
    assert own_server.http.get("/load").json() == {"server_load": 0}


@pytest.mark.slow
def test_a_second_signal_ends_at_once(own_server: RunningServer) -> None:
    """The last test of this server."""
    server = own_server
    with ThreadPoolExecutor(1) as pool:
        pool.submit(server.http.post, "/v1/completions", json=LONGER)
        wait_until(lambda: server.metric("backfill:num_requests_running") == 1, "it to run")
        with server.paused_engine() as engine:
            server.process.send_signal(signal.SIGINT)
            wait_until(lambda: server.http.get("/health").status_code == 503, "draining")
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(TIMEOUT_S) != 0
        wait_until(lambda: not Path(f"/proc/{engine}").exists(), "the engine to end")


def test_a_server_with_keys_from_its_start_to_its_end(small_model: Path, tmp_path: Path) -> None:
    """Without the batch API, whose routes do not exist then."""
    key_file = tmp_path / "keys"
    key_file.write_text("alice=sekret-of-alice\n")
    options = ("--api-key", "sekret", "--api-key", "bob=other", "--api-key-file", str(key_file))
    options += ("--served-model-name", "mine", "--no-batch-api", "--shutdown-timeout", str(TIMEOUT_S))
    with ending(launch_small(small_model, *options, data_dir=tmp_path)) as server:
        server.logged("; /health answers 503 until")
        assert server.http.get("/v1/models", headers=bearer("sekret-of-alice")).status_code != 401
        key_file.write_text("alice=sekret-of-alice-renewed\n")  # which it sees within seconds
        check_health_while_loading(server)
        server.logged("curl http")
        check_keys(server)
        assert "sekret" not in (tmp_path / "config.json").read_text()
        assert "sekret" not in "".join(server.output)
        server.http.headers.update(bearer("sekret"))
        for path in ("/v1/files", "/v1/batches"):
            assert server.http.get(path).status_code == 404
        assert "batch_jobs" not in server.http.get("/metrics").text
        assert not (tmp_path / "server.lock").exists()
        check_shutdown(server)


def check_health_while_loading(server: RunningServer) -> None:
    statuses: list[int] = []

    def loading_seen() -> bool:
        statuses.append(server.http.get("/health").status_code)
        return statuses[-1] == 200

    wait_until(loading_seen, "the server")
    assert statuses[0] == 503
    assert set(statuses) == {200, 503}


def check_keys(server: RunningServer) -> None:
    def is_known(key: str) -> bool:
        return server.http.get("/v1/models", headers=bearer(key)).status_code == 200

    wait_until(lambda: is_known("sekret-of-alice-renewed"), "the key file to be read again")
    assert not is_known("sekret-of-alice")
    for headers in ({}, bearer("wrong"), {"Authorization": "sekret"}):
        response = server.http.get("/v1/models", headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
    for key in ("sekret", "other", "sekret-of-alice-renewed"):
        assert server.client(key).models.list().data[0].id == "mine"
    assert server.http.get("/metrics").status_code == 200


def check_shutdown(server: RunningServer) -> None:
    """It lets online requests end and stops offline ones, also if the whole process group gets the signal."""
    with ThreadPoolExecutor(2) as pool:
        flex = pool.submit(server.http.post, "/v1/completions", json={**LONGER, "service_tier": "flex"})
        # The offline request starts first and keeps its blocks: behind a late online one it would not start.
        wait_until(lambda: server.metric("backfill:num_requests_running") == 1, "the first to run")
        online = pool.submit(server.http.post, "/v1/completions", json={**LONG, "max_tokens": 400})
        wait_until(lambda: server.metric("backfill:num_requests_running") == 2, "both to run")
        with server.paused_engine() as engine:
            for pid in (engine, server.process.pid):
                os.kill(pid, signal.SIGTERM)
            wait_until(lambda: server.http.get("/health").status_code == 503, "draining")
            assert server.http.post("/v1/completions", json={"prompt": "hi"}).status_code == 503
        assert online.result().json()["usage"]["completion_tokens"] == 400
        assert flex.result().status_code == 503
        assert server.process.wait(TIMEOUT_S) == 0
        assert not Path(f"/proc/{engine}").exists()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.slow
def test_the_exit_status_shows_a_signal_while_the_model_loads(small_model: Path, tmp_path: Path) -> None:
    """Of SIGTERM; of SIGINT: tests/cli/test_interrupts.py."""
    with ending(launch_small(small_model, data_dir=tmp_path)) as server:

        def is_loading() -> bool:
            try:
                return server.http.get("/health").status_code == 503
            except httpx.TransportError:
                return False

        wait_until(is_loading, "the server to listen")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(TIMEOUT_S) == 143
        wait_until(lambda: "backfill: stopped while loading\n" in server.output, "a line")


def test_a_chat_template_that_does_not_parse_is_refused_at_start(tmp_path: Path) -> None:
    template = tmp_path / "bad.jinja"
    template.write_text("{% if messages %}")
    result = run_cli_here("serve", "--port", "0", "--chat-template", str(template))
    assert result.returncode == 1
    assert "line 1" in result.stderr


def test_a_client_that_leaves_during_its_body_logs_no_error(server: RunningServer) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: "
    address = ("127.0.0.1", server.http.base_url.port or 80)
    with socket.create_connection(address) as leaver:
        leaver.sendall(head + b"50\r\n\r\n{")
    with socket.create_connection(address, timeout=TIMEOUT_S) as boaster:
        boaster.sendall(head + b"99999999999\r\n\r\n")
        assert b" 413 " in boaster.recv(1000)
    assert server.http.get("/health").status_code == 200
    assert "Traceback" not in "".join(server.output)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--kv-gib", "nan"), "--kv-gib"),
        (("--port", "99999"), "--port"),
        (("--max_num_seqs", "0"), "--max-num-seqs"),
        (("--api-key", " "), "--api-key"),
        (("--api-key-file", "/no/such/file"), "--api-key-file /no/such/file cannot be read"),
        (("--head-timeout", "0"), "--head-timeout must be above 0"),
        (("--max-inflight-body-bytes", "5"), "--max-inflight-body-bytes must be at least"),
        (("--policy", "best"), "slo, conserve, bros, online-only, fcfs, priority or round-robin"),
        (("--tpot-slo", "inf"), "--tpot-slo"),
        (("--promote-before", "nan"), "--promote-before"),
        (("--checkpoint-all-from", "0.8", "--policy", "fcfs"), "is of no use with --checkpointing none"),
        (("--host-kv-gib", "inf"), "--host-kv-gib must be finite and at least 0, got inf"),
        (("--host-kv-gib", "1", "--checkpointing", "none"), "--host-kv-gib 1 is of no use"),
        (("--batch-max-lines", "0"), "--batch-max-lines"),
        (("--batch-max-bytes", "0"), "--batch-max-bytes"),
        (("--batch-max-storage-gib", "0"), "--batch-max-storage-gib"),
        (("--batch-retention-hours", "nan"), "--batch-retention-hours"),
        (("--batch-min-free-gib", "-1"), "--batch-min-free-gib"),
        (("--batch-database-url", "sqlite:////no/such/folder/jobs.db"), "--batch-database-url"),
    ],
)
def test_invalid_options_are_refused_in_a_line(
    default_model: Path, tmp_path: Path, arguments: tuple[str, ...], part: str
) -> None:
    result = run_cli_here("serve", "--port", "0", *arguments, "--data-dir", str(tmp_path))
    assert_refused(result, part)


def test_a_taken_port_is_known_at_once(default_model: Path, tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        result = run_cli_here("serve", "--port", str(port), "--data-dir", str(tmp_path))
    assert result.returncode == 1
    assert f"127.0.0.1:{port}" in result.stderr
