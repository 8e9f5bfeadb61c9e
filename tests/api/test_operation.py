"""Health, metrics, models, keys, overload, disconnects, a killed engine, shutdown."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.api.servers import (
    MODEL,
    RunningServer,
    launch,
    running_server,
    serve_command,
    wait_until,
)
from tests.builders import make_profile

LONG: dict[str, Any] = {"prompt": "Count:", "max_tokens": 1500, "ignore_eos": True}
SMALL = ("--kv-gib", "0.25", "--max-model-len", "2048")


def test_models_health_version_and_load(server: RunningServer) -> None:
    (card,) = server.http.get("/v1/models").json()["data"]
    assert card["id"] == MODEL
    assert card["max_model_len"] == 2048
    assert Path(card["root"], "tokenizer.json").is_file(), "clients load the tokenizer from root"
    assert server.http.get(f"/v1/models/{MODEL}").json() == card
    for path in ("/health", "/health/live", "/ping"):
        assert server.http.get(path).status_code == 200
    assert "version" in server.http.get("/version").json()
    assert server.http.get("/load").json() == {"server_load": 0}


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
    assert {name: server.metric(name) - before[name] for name in names} == names
    assert server.metric("backfill:cache_config_info", block_size="16") == 1
    text = server.http.get("/metrics").text
    assert "vllm:num_requests_running" in text
    assert 'class="online"' in text


def test_a_client_that_disconnects_has_its_request_aborted(server: RunningServer) -> None:
    aborted = server.metric("backfill:request_success_total", finished_reason="abort")
    with server.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
        next(response.iter_lines())
    with pytest.raises(httpx.ReadTimeout):
        server.http.post("/v1/completions", json=LONG, timeout=0.4)
    wait_until(lambda: server.metric("backfill:num_requests_running") == 0, 10, "both to be aborted")
    wait_until(lambda: server.metric("backfill:kv_cache_usage_perc") == 0, 10, "their blocks")
    assert server.metric("backfill:request_success_total", finished_reason="abort") == aborted + 2


def test_keys_are_asked_for(default_model: Path, tmp_path: Path) -> None:
    keys = ("--api-key", "sekret", "--api-key", "other")
    with running_server(*SMALL, *keys, "--served-model-name", "mine", data_dir=tmp_path) as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sekret"}):
            response = server.http.get("/v1/models", headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        for key in ("sekret", "other"):
            assert server.client(key).models.list().data[0].id == "mine"
        assert server.http.get("/health").status_code == 200
        assert server.http.get("/metrics").status_code == 200
        assert "sekret" not in (tmp_path / "config.json").read_text()
        assert "sekret" not in "".join(server.output)


def test_a_full_queue_answers_429_with_retry_after(default_model: Path, tmp_path: Path) -> None:
    limits = ("--max-num-seqs", "1", "--max-queued-requests", "1")
    with running_server(*SMALL, *limits, data_dir=tmp_path) as server:
        with ThreadPoolExecutor(2) as pool:
            for _ in range(2):
                pool.submit(server.http.post, "/v1/completions", json={**LONG, "max_tokens": 150})
            wait_until(lambda: server.http.get("/load").json()["server_load"] == 2, 10, "a full queue")
            response = server.http.post("/v1/completions", json={"prompt": "hi"})
            assert response.status_code == 429
            assert 1 <= int(response.headers["retry-after"]) <= 120
            assert response.json()["error"]["code"] == "rate_limit_exceeded"
            too_many = server.http.post("/v1/completions", json={"prompt": "hi", "n": 3})
            assert too_many.status_code == 400, "no retry would help"
        assert server.metric("backfill:admission_rejections_total", reason="queue_full") == 1
        # The official client retries by itself and succeeds.
        answer = server.client(max_retries=5).completions.create(model=MODEL, prompt="hi", max_tokens=1)
        assert answer.usage is not None


def test_a_killed_engine_fails_its_requests_and_comes_back(default_model: Path, tmp_path: Path) -> None:
    with running_server(*SMALL, data_dir=tmp_path) as server:
        killed = server.engine_pid()
        with server.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.kill(killed, signal.SIGKILL)
            rest = [line.removeprefix("data: ") for line in lines if line]
        assert rest[-1] == "[DONE]"
        assert "killed by signal 9" in json.loads(rest[-2])["error"]["message"]
        wait_until(lambda: server.http.get("/health").status_code == 503, 10, "the engine to be missed")
        refused = server.http.post("/v1/completions", json={"prompt": "hi"})
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        assert server.metric("backfill:num_requests_running") == 0
        server.wait_ready()
        assert server.engine_pid() != killed
        assert server.http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("num_choices", [1, 2])
def test_a_request_in_the_moment_the_engine_dies_gets_an_answer(
    default_model: Path, tmp_path: Path, num_choices: int
) -> None:
    with running_server(*SMALL, data_dir=tmp_path) as server:
        os.kill(server.engine_pid(), signal.SIGKILL)
        body = {"prompt": "hi", "max_tokens": 4, "n": num_choices}
        response = server.http.post("/v1/completions", json=body, timeout=10)
        assert response.status_code == 503
        assert response.json()["error"]["type"] == "service_unavailable_error"
        server.wait_ready()
        assert server.http.get("/load").json() == {"server_load": 0}


def test_a_signal_to_the_whole_process_group_drains_too(default_model: Path, tmp_path: Path) -> None:
    with running_server(*SMALL, data_dir=tmp_path) as server, ThreadPoolExecutor(1) as pool:
        online = pool.submit(server.http.post, "/v1/completions", json={**LONG, "max_tokens": 60})
        wait_until(lambda: server.metric("backfill:num_requests_running") == 1, 10, "it to run")
        for pid in (server.engine_pid(), server.process.pid):
            os.kill(pid, signal.SIGTERM)
        assert online.result().json()["usage"]["completion_tokens"] == 60
        assert server.process.wait(20) == 0


def test_shutdown_lets_online_requests_end_and_stops_offline_ones(
    default_model: Path, tmp_path: Path
) -> None:
    with running_server(*SMALL, data_dir=tmp_path) as server, ThreadPoolExecutor(2) as pool:
        online = pool.submit(server.http.post, "/v1/completions", json={**LONG, "max_tokens": 100})
        flex = pool.submit(server.http.post, "/v1/completions", json={**LONG, "service_tier": "flex"})
        wait_until(lambda: server.metric("backfill:num_requests_running") == 2, 10, "both to run")
        engine = server.engine_pid()
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.http.get("/health").status_code == 503, 5, "draining")
        assert server.http.post("/v1/completions", json={"prompt": "hi"}).status_code == 503
        assert online.result().json()["usage"]["completion_tokens"] == 100
        assert flex.result().status_code == 503
        assert server.process.wait(20) == 0
        assert not Path(f"/proc/{engine}").exists()


def test_a_second_signal_ends_at_once(default_model: Path, tmp_path: Path) -> None:
    with running_server(*SMALL, data_dir=tmp_path) as server, ThreadPoolExecutor(1) as pool:
        pool.submit(server.http.post, "/v1/completions", json=LONG)
        wait_until(lambda: server.metric("backfill:num_requests_running") == 1, 10, "it to run")
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: server.http.get("/health").status_code == 503, 5, "draining")
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(5) != 0


def test_the_engine_ends_with_its_server(default_model: Path, tmp_path: Path) -> None:
    with running_server(*SMALL, data_dir=tmp_path) as server:
        engine = server.engine_pid()
        server.process.kill()
        wait_until(lambda: not Path(f"/proc/{engine}").exists(), 5, "the engine to end")


def test_health_is_503_while_loading(default_model: Path, tmp_path: Path) -> None:
    server = launch(MODEL, *SMALL, data_dir=tmp_path)
    try:
        statuses: list[int] = []

        def loading_seen() -> bool:
            try:
                statuses.append(server.http.get("/health").status_code)
            except httpx.TransportError:
                return False
            return statuses[-1] == 200

        wait_until(loading_seen, 60, "the server")
        assert statuses[0] == 503
        assert set(statuses) == {200, 503}
        assert any("curl http" in line for line in server.output), "a line to try is printed"
    finally:
        server.process.kill()
        server.process.wait()


def test_a_chat_template_that_does_not_parse_is_refused_at_start(tmp_path: Path) -> None:
    template = tmp_path / "bad.jinja"
    template.write_text("{% if messages %}")
    result = subprocess.run(
        serve_command("--port", "0", "--chat-template", str(template)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 1
    assert "line 1" in result.stderr


def test_a_client_that_leaves_within_its_body_makes_no_noise(default_model: Path, tmp_path: Path) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: "
    with running_server(*SMALL, data_dir=tmp_path) as server:
        address = ("127.0.0.1", server.http.base_url.port or 80)
        with socket.create_connection(address) as leaver:
            leaver.sendall(head + b"50\r\n\r\n{")
        with socket.create_connection(address, timeout=5) as boaster:
            boaster.sendall(head + b"99999999999\r\n\r\n")
            assert b" 413 " in boaster.recv(1000)
        assert server.http.get("/health").status_code == 200
        assert "Traceback" not in "".join(server.output)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("no-such-model",), "no-such-model"),
        (("--kv-gib", "100000"), "Not enough memory"),
        (("--kv-gib", "0.00001"), "--kv-gib"),
        (("--kv-gib", "-1"), "--kv-gib"),
        (("--kv-gib", "nan"), "--kv-gib"),
        (("--threads", "100000"), "--threads"),
        (("--max-model-len", "9000"), "--max-model-len"),
        (("--max-model-len", "many"), "--max-model-len"),
        (("--kv-gib", "0.01", "--max-model-len", "8k"), "--kv-gib"),
        (("--dtype", "int8"), "--dtype"),
        (("--dtype", "float16"), "float16"),
        (("--device", "cuda"), "--device cuda"),
        (("--port", "99999"), "--port"),
        (("--max_num_seqs", "0"), "--max-num-seqs"),
        (("--chat-template", "/no/such/file"), "--chat-template"),
        (("--api-key", " "), "--api-key"),
        (("--log-level", "LOUD"), "--log-level"),
        (("--policy", "best"), "slo, online-only, fcfs, priority or round-robin"),
        (("--ttft-slo", "0"), "--ttft-slo"),
        (("--ttft-slo", "nan"), "--ttft-slo"),
        (("--tpot-slo", "-0.1"), "--tpot-slo"),
        (("--tpot-slo", "inf"), "--tpot-slo"),
        (("--promote-before", "-1"), "--promote-before"),
        (("--promote-before", "nan"), "--promote-before"),
        (("--preemption", "pause"), "--preemption must be"),
        (("--checkpointing", "lazy"), "--checkpointing must be"),
        (("--kv-restore", "never"), "--kv-restore must be"),
        (("--victims", "first"), "--victims must be"),
        (("--host-kv-gib", "-1"), "--host-kv-gib must be"),
        (("--host-kv-gib", "inf"), "--host-kv-gib must be a finite number of at least 0, got inf"),
        (("--host-kv-gib", "1e-7"), "--host-kv-gib"),
        (("--host-kv-gib", "100000"), "--host-kv-gib"),
        (("--host-kv-gib", "1", "--checkpointing", "none"), "--host-kv-gib 1 is of no use"),
        (("--host-kv-gib", "0", "--checkpointing", "eager"), "--checkpointing eager needs a pool"),
        (("--profile", "/no/such/profile"), "/no/such/profile cannot be read"),
        (("--profile", "{folder}/corrupt.json"), "corrupt.json is not JSON"),
        (("--profile", "{folder}/profile.json"), "is of another model"),
        (("--ttft-slo", "0.0001"), "--ttft-slo 0.0001: one request alone"),
        (("--tpot-slo", "1e-9"), "--tpot-slo 1e-09: one request alone"),
    ],
)
def test_a_server_that_cannot_start_says_why_in_a_line(
    default_model: Path, tmp_path: Path, arguments: tuple[str, ...], part: str
) -> None:
    make_profile().save(tmp_path / "profile.json")
    (tmp_path / "corrupt.json").write_text('{"format": 2, ')
    options = [argument.format(folder=tmp_path) for argument in arguments]
    result = subprocess.run(
        serve_command("--port", "0", *options, "--data-dir", str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 1
    assert part in result.stderr
    assert "Traceback" not in result.stderr
    assert len([line for line in result.stderr.splitlines() if line.startswith("backfill: ")]) == 1


def test_a_taken_port_is_known_at_once(default_model: Path, tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        result = subprocess.run(
            serve_command("--port", str(port), "--data-dir", str(tmp_path)),
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    assert result.returncode == 1
    assert f"127.0.0.1:{port}" in result.stderr


def test_the_server_survives_many_connections_at_once(server: RunningServer) -> None:
    def hold() -> None:
        with socket.create_connection((server.http.base_url.host, server.http.base_url.port or 80)):
            time.sleep(0.3)

    threads = [threading.Thread(target=hold) for _ in range(200)]
    for thread in threads:
        thread.start()
    assert server.http.get("/health").status_code == 200
    for thread in threads:
        thread.join()


def test_openai_client_errors_are_the_clients_own(server: RunningServer) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.client().completions.create(model=MODEL, prompt="hi", max_tokens=-1)
    assert caught.value.param == "max_tokens"
