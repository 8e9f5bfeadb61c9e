"""Objectives of requests: fields, headers, attainment in responses, refusals, tighter ones under load."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from backfill.api.objective_admission import (
    SHED_FACTOR,
    ObjectiveUnavailable,
    RequestShed,
    check_hopeless,
    check_objectives,
)
from backfill.api.online_load import OnlineLoad
from backfill.api.predictions import Passing, Prediction
from backfill.core.clock import VirtualClock
from backfill.core.slo import SLO
from backfill.costs.profile import FitError
from backfill.http.errors import MAX_RETRY_AFTER_S
from backfill.protocol.request_headers import Objective
from tests.api.in_process import InProcessServer, in_process_server
from tests.api.servers import RunningServer, chunks_of, small_server, wait_until
from tests.api.sockets import RawClient, request
from tests.api.test_online_load import CONFIG, add, predict, step_report
from tests.api.test_overload import JSON_TYPE, ONLINE, post, waiting
from tests.builders import linear_cost, make_profile

NOT_PASSING = Passing(math.inf, math.inf)
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
    assert metrics.keys() == {"ttft", "max_itl", "ttft_slo", "tpot_slo", "ttft_slo_met", "tpot_slo_met"}
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
    assert 0.0 < needs[0] <= needs[1]
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


@pytest.mark.slow
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


DEFAULT = SLO(1.0, 0.15)


def loaded(*prompt_tokens: int) -> OnlineLoad:
    """10 ms for a row, so 10 ms for a decode; these prompts wait."""
    load = OnlineLoad(linear_cost(token_s=0.01), CONFIG)
    if prompt_tokens:
        add(load, *prompt_tokens)
    return load


def check(
    load: OnlineLoad,
    ttft_s: float = DEFAULT.ttft_s,
    tpot_s: float = DEFAULT.tpot_s,
    tokens: int = 10,
    passing: Passing = NOT_PASSING,
) -> None:
    predicted = predict(load, tokens)
    objectives = {"ttft": Objective(ttft_s, "slo.ttft"), "tpot": Objective(tpot_s, "slo.tpot")}
    check_objectives(objectives, DEFAULT, load, predicted, lambda: passing, [tokens], lambda num: 10 * num)


def refused_with(load: OnlineLoad, **asked: Any) -> ObjectiveUnavailable:
    with pytest.raises(ObjectiveUnavailable) as refused:
        check(load, **asked)
    return refused.value


def test_objectives_of_the_server_and_larger_ones_are_never_refused() -> None:
    busy = loaded(*[100] * 50)
    check(busy)
    check(busy, ttft_s=9.0, tpot_s=9.0)


def test_a_tpot_objective_needs_half_as_much_again_as_the_decodes() -> None:
    check(loaded(), tpot_s=0.0151)
    three = loaded(1, 1, 1)
    check(three, tpot_s=0.0601)  # four rows of 10 ms
    refused = refused_with(three, tpot_s=0.0599)
    assert str(refused) == (
        "slo.tpot: asked 0.0599 s, the present load leaves 0.06 s. Please ask for that, or retry in 10 s."
    )
    assert (refused.param, refused.retry_after_s) == ("slo.tpot", 10)
    assert refused_with(three, tpot_s=0.031).retry_after_s == 20, "until two of them have ended"


def test_more_than_the_default_is_never_named_as_the_least() -> None:
    busy = loaded(*[100] * 50)
    assert "leaves 0.12 s" in str(refused_with(busy, tpot_s=0.05)), "CONFIG decodes at most 8 in a step"
    busy.set_cost_model(linear_cost(token_s=0.02))
    assert "leaves 0.15 s" in str(refused_with(busy, tpot_s=0.05))
    assert "leaves 1 s" in str(refused_with(busy, ttft_s=0.9))


def test_a_slowdown_refuses_until_it_is_over() -> None:
    load = loaded()
    check(load, tpot_s=0.02)
    for _ in range(200):
        load.on_report(step_report(0.01, 0.018))
    refused = refused_with(load, tpot_s=0.02)  # alone it takes 18 ms
    assert (refused.param, refused.retry_after_s) == ("slo.tpot", MAX_RETRY_AFTER_S)
    assert str(refused) == (
        "slo.tpot: asked 0.02 s, too low even without load; the server's present speed leaves 0.027 s. "
        "Please ask for that, or retry in 120 s."
    )
    for _ in range(200):
        load.on_report(step_report(0.01, 0.01))
    check(load, tpot_s=0.02)


def test_a_ttft_objective_must_leave_time_for_the_prompts_ahead() -> None:
    waiting_prompt = loaded(20)
    check(waiting_prompt, ttft_s=0.301)  # 20 tokens ahead and 10 of its own
    refused = refused_with(waiting_prompt, ttft_s=0.299)
    assert str(refused) == (
        "slo.ttft: asked 0.299 s, the present load leaves 0.3 s. Please ask for that, or retry in 1 s."
    )
    assert (refused.param, refused.retry_after_s) == ("slo.ttft", 1)
    check(waiting_prompt, ttft_s=0.25, passing=Passing(0.25, 0.0))  # the one ahead lets it pass
    refused = refused_with(waiting_prompt, ttft_s=0.25, passing=Passing(0.26, 2.2))
    assert "leaves 0.26 s" in str(refused) and refused.retry_after_s == 3
    check(loaded(), ttft_s=0.05, tokens=10)  # late even alone: the answer says so


def ask(
    server: InProcessServer, headers: dict[str, str] | None = None, **fields: Any
) -> tuple[int, dict[str, Any], httpx.Headers]:
    body = {"prompt": [7], "max_tokens": 1, **fields}
    response = server.http.post("/v1/completions", json=body, headers=headers)
    return response.status_code, response.json(), response.headers


@pytest.mark.parametrize("is_streamed", [False, True])
def test_over_http_tight_objectives_are_refused_under_load_and_counted(
    default_model: Path, is_streamed: bool
) -> None:
    with in_process_server(default_model, is_open=False) as server:
        server.state.online_load = load = OnlineLoad(linear_cost(token_s=0.01), CONFIG)
        held = {"prompt": [7] * 20, "max_tokens": 1, "n": 2, "stream": is_streamed}
        with waiting(server, held, 1):
            wait_until(lambda: load.num_open == 2, "the prompt to be prepared")
            for objective, asked in (("tpot", 0.04), ("ttft", 0.3)):
                status, body, headers = ask(server, slo={objective: asked})
                assert (status, body["error"]["code"]) == (429, "objective_unavailable")
                assert body["error"]["type"] == "rate_limit_error"
                assert body["error"]["param"] == f"slo.{objective}"
                assert f"asked {asked} s, the present load leaves 0." in body["error"]["message"]
                assert int(headers["Retry-After"]) >= 1
                assert "x-should-retry" not in headers
            status, body, _ = ask(server, {"x-slo-tpot-ms": "40"})
            assert (status, body["error"]["param"]) == (429, "x-slo-tpot-ms")
            assert body["error"]["message"].startswith("x-slo-tpot-ms: asked 40 ms, the present load leaves ")
            assert ask(server, slo={"tpot": 0.001})[0] == 429, "it may be a slowdown that passes"
            assert load.num_open == 2, "a refused request is not counted"
            assert server.state.admission.num_open == 2
        wait_until(lambda: load.num_open == 0, "the end of the request")
        assert ask(server, slo={"tpot": 0.04, "ttft": 0.3})[0] == 200
        exposed = server.http.get("/metrics").text
        assert 'class="online",model_name="m",reason="objective_unavailable"} 4.0' in exposed


def test_over_http_what_no_load_leaves_is_400_once_the_profile_is_certain(default_model: Path) -> None:
    cost = linear_cost(token_s=0.01)
    full = replace(make_profile(cost), error=FitError(0.01, 0.05, 40), known_tokens=64, known_chunk_tokens=64)
    with in_process_server(default_model) as server:
        server.state.online_load = OnlineLoad(cost, CONFIG)
        facts = server.state.ready_preparer().engine_facts
        # Alone a decode takes 10 ms, 7 of them for certain; two thirds of an objective are for decodes.
        for quality, asked_s, expected in (
            ("coarse", 0.005, 429),
            ("full", 0.005, 400),
            ("coarse", 0.0104, 429),
            ("full", 0.0104, 400),
            ("full", 0.012, 429),
            ("full", 0.0151, 200),
        ):
            profile = replace(full, quality=quality)
            scheduler = replace(facts.scheduler, policy="slo")
            server.state.ready_preparer().facts = replace(facts, profile=profile, scheduler=scheduler)
            status, body, headers = ask(server, slo={"tpot": asked_s})
            assert status == expected, f"{quality} {asked_s}: {body}"
            assert ("Retry-After" in headers) == (status == 429)
            if status == 400:
                assert "Ask for 0.015 s or more" in body["error"]["message"]
                assert body["error"]["param"] == "slo.tpot"


def test_without_a_cost_model_nothing_is_refused(default_model: Path) -> None:
    with in_process_server(default_model) as server:
        assert server.state.online_load is None
        assert ask(server, slo={"tpot": 1e-6, "ttft": 1e-6})[0] == 200


def test_a_tpot_objective_that_others_on_the_bus_leave_no_room_for_is_refused() -> None:
    load = loaded()
    load.bus_least_step_s = 0.08
    check(load, tpot_s=0.0801)
    refused = refused_with(load, tpot_s=0.0799)
    assert str(refused) == (
        "slo.tpot: asked 0.0799 s, with any offloading interval that fits the device, its bus leaves, "
        f"beside other engines, 0.08 s. Please ask for that, or retry in {refused.retry_after_s} s."
    )
    load.bus_least_step_s = math.inf
    assert "engines, 0.15 s" in str(refused_with(load, tpot_s=0.1)), "the server's own is always offered"
    check(load)


def test_a_request_that_would_wait_too_long_may_be_retried_when_others_are_served() -> None:
    def check_wait(ttft_s: float, alone_s: float, objective_s: float, passing_s: float = math.inf) -> None:
        check_hopeless(Prediction(ttft_s, alone_s, 0.0, 0.0), objective_s, lambda: Passing(passing_s, 0.0))

    check_wait(SHED_FACTOR * 1.0, 0.15, 1.0)
    check_wait(9.0, 9.0, 1.0)  # alone it takes as long: a retry would not help
    check_wait(9.0, 0.15, 1.0, passing_s=SHED_FACTOR * 1.0)
    with pytest.raises(RequestShed, match=r"about 2\.5 s"):
        check_wait(9.0, 0.15, 1.0, passing_s=2.5)
    for ttft_s, objective_s, retry_after_s in (
        (1.8, 0.5, 2),
        (1.01, 0.5, 1),
        (8.0, 3.0, 8),
        (1000.0, 0.5, 120),
    ):
        with pytest.raises(RequestShed, match=f"about {ttft_s:.1f} s") as refused:
            check_wait(ttft_s, 0.15, objective_s)
        assert refused.value.retry_after_s == retry_after_s


def test_the_prompt_of_a_stalled_reader_does_not_count(default_model: Path) -> None:
    body = json.dumps({"prompt": [7] * 5, "n": 2, "max_tokens": 2000, "stream": True}).encode()
    with (
        in_process_server(default_model) as server,
        RawClient(server.port, receive_buffer_bytes=99) as lazy,
    ):
        server.state.online_load = load = OnlineLoad(linear_cost(token_s=1.0), CONFIG)
        lazy.send(request("POST", "/v1/completions", body, JSON_TYPE))
        wait_until(lambda: bool(server.engine.prompts), "the request")
        wait_until(lambda: load.num_open == 0, "the end of both choices in the engine")
        predicted = predict(load, 1)
        assert predicted.ttft_s == predicted.ttft_alone_s
        assert server.state.num_unanswered == 1


def test_a_shed_request_is_429_and_counted(default_model: Path) -> None:
    clock = VirtualClock()
    with in_process_server(default_model, is_open=False, shed_hopeless=True, clock=clock) as server:
        server.state.online_load = load = OnlineLoad(linear_cost(token_s=0.7), CONFIG)
        long = {**ONLINE, "n": 8}
        with waiting(server, long, 1):
            wait_until(lambda: load.num_open == 8, "the prompts to be prepared")
            refused = post(server, ONLINE)
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "slow_down"
            assert int(refused.headers["Retry-After"]) == 6  # 8 choices of 0.7 s
            flex = {**ONLINE, "service_tier": "flex"}
            with waiting(server, flex, 1):
                wait_until(lambda: len(server.engine.requests) == 9, "the flex request in the engine")
                assert load.num_open == 8
                clock.advance(0.5)
                with waiting(server, ONLINE, 1):
                    wait_until(lambda: load.num_open == 9, "a request that goes before the relegated ones")
        wait_until(lambda: load.num_open == 0, "the end of the request")
        assert post(server, {**long, "stream": True}).status_code == 200
        wait_until(lambda: load.num_open == 0, "the end of the request")
        exposed = server.http.get("/metrics").text
        assert 'class="online",model_name="m",reason="hopeless"} 1.0' in exposed
