"""Objectives of requests: fields, headers, refusals, attainment in responses and metrics."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.api.servers import RunningServer, chunks_of, small_server

EASY = {"ttft": 50.0, "tpot": 40.0}
BODY: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "ignore_eos": True}


def refusal(
    server: RunningServer, body: dict[str, Any], headers: dict[str, str] | None = None
) -> dict[str, Any]:
    response = server.http.post("/v1/completions", json={**BODY, **body}, headers=headers)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error


def streamed(server: RunningServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    return chunks_of(server.http.post("/v1/completions", json={**body, "stream": True}).text)


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)])
def test_a_request_with_objectives_is_told_how_they_were_met(
    server: RunningServer, path: str, body: dict[str, Any]
) -> None:
    response = server.http.post(path, json={**body, "slo": EASY})
    assert response.status_code == 200, response.text
    metrics = response.json()["metrics"]
    assert metrics.keys() == {"ttft", "max_itl", "ttft_slo_met", "tpot_slo_met"}
    assert 0 < metrics["max_itl"] < 40
    assert 0 < metrics["ttft"] < 50
    assert metrics["ttft_slo_met"] is metrics["tpot_slo_met"] is True


@pytest.mark.parametrize("slo", [{}, {"slo": None}, {"slo": {}}, {"slo": {"ttft": None}}])
def test_a_request_without_objectives_gets_no_metrics(server: RunningServer, slo: dict[str, Any]) -> None:
    assert "metrics" not in server.http.post("/v1/completions", json={**BODY, **slo}).json()


def test_one_objective_is_enough_and_one_token_has_no_gap(server: RunningServer) -> None:
    body = {**BODY, "max_tokens": 1, "n": 2, "seed": 1}
    for slo in ({"ttft": 30}, {"tpot": 30}):
        metrics = server.http.post("/v1/completions", json={**body, "slo": slo}).json()["metrics"]
        assert metrics["max_itl"] is None
        assert metrics["tpot_slo_met"] is True


@pytest.mark.parametrize("includes_usage", [False, True])
def test_a_stream_reports_attainment_in_its_last_chunk(server: RunningServer, includes_usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if includes_usage else {}
    chunks = streamed(server, {**BODY, "n": 2, "slo": EASY, **options})
    assert [index for index, chunk in enumerate(chunks) if "metrics" in chunk] == [len(chunks) - 1]
    assert ("usage" in chunks[-1]) == includes_usage
    assert chunks[-1]["metrics"]["ttft_slo_met"] is True
    assert not any("metrics" in chunk for chunk in streamed(server, BODY))


def test_headers_bring_objectives_and_the_body_wins(server: RunningServer) -> None:
    # Far too short for any request: it is refused unless the body overrides it.
    tiny = {"x-slo-ttft-ms": "0.001"}
    assert refusal(server, {}, tiny)["param"] == "x-slo-ttft-ms"
    both = server.http.post("/v1/completions", json={**BODY, "slo": {"ttft": 30}}, headers=tiny)
    assert both.json()["metrics"]["ttft_slo_met"] is True
    unread = server.http.post(
        "/v1/completions", json={**BODY, "slo": EASY}, headers={"x-slo-ttft-ms": "soon"}
    )
    assert unread.status_code == 200
    other = refusal(server, {"slo": {"tpot": 30}}, tiny)
    assert other["param"] == "x-slo-ttft-ms", "each objective comes from the body or else its header"
    response = server.http.post("/v1/completions", json=BODY, headers={"X-SLO-TPOT-MS": "20000.5"})
    assert response.json()["metrics"]["tpot_slo_met"] is True


@pytest.mark.parametrize(
    ("slo", "param"),
    [
        ({"ttft": 0}, "slo.ttft"),
        ({"ttft": -1.5}, "slo.ttft"),
        ({"ttft": 1, "tpot": 0.0}, "slo.tpot"),
        ({"tpot": "0.1"}, "slo.tpot"),
        ({"tpot": True}, "slo.tpot"),
        ({"tpot": [0.1]}, "slo.tpot"),
        ({"ttft_ms": 100}, "slo.ttft_ms"),
        (1.5, "slo"),
        ([1.5, 0.1], "slo"),
        ("fast", "slo"),
    ],
)
def test_invalid_objectives_are_refused(server: RunningServer, slo: Any, param: str) -> None:
    error = refusal(server, {"slo": slo})
    assert error["param"] == param
    assert param in error["message"]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_objectives_that_are_not_finite_are_refused(server: RunningServer, value: str) -> None:
    content = '{"prompt": "a", "slo": {"ttft": ' + value + "}}"
    response = server.http.post(
        "/v1/completions", content=content, headers={"content-type": "application/json"}
    )
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] in ("slo.ttft", None)


@pytest.mark.parametrize("name", ["x-slo-ttft-ms", "x-slo-tpot-ms"])
@pytest.mark.parametrize("value", ["0", "-5", "nan", "inf", "soon", "", "1_000", "5 ms"])
def test_headers_without_a_valid_objective_are_refused(server: RunningServer, name: str, value: str) -> None:
    assert refusal(server, {}, {name: value})["param"] == name


def test_an_impossible_objective_is_refused_with_the_least_possible_one(
    server: RunningServer,
) -> None:
    short = refusal(server, {"slo": {"ttft": 0.0001}})
    long = refusal(server, {"slo": {"ttft": 0.0001}, "prompt": [5] * 1500})
    gap = refusal(server, {"slo": {"tpot": 0.0001}})
    assert (short["param"], long["param"], gap["param"]) == ("slo.ttft", "slo.ttft", "slo.tpot")
    needs = [float(error["message"].split("need ")[1].split(" s ")[0]) for error in (short, long)]
    assert needs[0] < needs[1]
    asked = {**BODY, "prompt": [5] * 1500, "max_tokens": 1, "slo": {"ttft": needs[1]}}
    assert server.http.post("/v1/completions", json=asked).status_code == 200, "what it says can be asked"


def test_an_objective_in_milliseconds_is_answered_in_them(server: RunningServer) -> None:
    error = refusal(server, {}, {"x-slo-ttft-ms": "0.01"})
    assert error["param"] == "x-slo-ttft-ms"
    assert "x-slo-ttft-ms of 0.01 ms cannot" in error["message"]
    assert re.search(r"need [0-9.]+ ms even alone", error["message"])


def test_offline_requests_have_no_objectives(server: RunningServer) -> None:
    flex = {"service_tier": "flex"}
    assert refusal(server, {**flex, "slo": EASY})["param"] == "slo"
    assert refusal(server, flex, {"x-slo-tpot-ms": "100"})["param"] == "x-slo-tpot-ms"
    assert server.http.post("/v1/completions", json={**BODY, **flex, "slo": {}}).status_code == 200


def test_steps_are_counted_by_kind_and_compared_with_their_prediction(server: RunningServer) -> None:
    before = {kind: server.metric("backfill:step_seconds_count", kind=kind) for kind in ("online", "offline")}
    ratios = server.metric("backfill:step_predicted_ratio_count")
    server.http.post("/v1/completions", json=BODY)
    server.http.post("/v1/completions", json={**BODY, "service_tier": "flex"})
    for kind, was in before.items():
        assert server.metric("backfill:step_seconds_count", kind=kind) == was + 4
    assert server.metric("backfill:step_predicted_ratio_count") == ratios + 8
    text = server.http.get("/metrics").text
    for name in ("step_stops_total", "discarded_tokens_total", "recomputed_tokens_total"):
        assert f"\nbackfill:{name}{{" in text


def test_a_baseline_starts_without_a_profile_and_only_measures(small_model: Path, tmp_path: Path) -> None:
    options = ("--policy", "priority", "--ttft-slo", "0.777")
    with small_server(small_model, *options, data_dir=tmp_path) as server:
        slo = {"ttft": 1e-6, "tpot": 1e-6}
        metrics = server.http.post("/v1/completions", json={**BODY, "slo": slo}).json()["metrics"]
        assert metrics["ttft_slo_met"] is metrics["tpot_slo_met"] is False
        assert server.metric("backfill:slo_missed_total", slo="ttft") == 1
        assert server.metric("backfill:slo_missed_total", slo="tpot") == 3
        assert server.metric("backfill:step_predicted_ratio_count") == 0
        text = server.http.get("/metrics").text
        assert 'time_to_first_token_seconds_bucket{class="online",engine="0",le="0.777"' in text
        assert 'inter_token_latency_seconds_bucket{class="online",engine="0",le="0.15"' in text
