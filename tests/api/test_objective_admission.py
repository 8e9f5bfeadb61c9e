"""Online requests that are refused for their objectives: tighter ones than the load leaves, hopeless ones."""

from __future__ import annotations

import json
import math
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
from backfill.api.online_load import OnlineLoad, Prediction
from backfill.core.clock import VirtualClock
from backfill.core.slo import SLO
from backfill.costs.profile import FitError
from backfill.http.errors import MAX_RETRY_AFTER_S
from backfill.protocol.request_headers import Objective
from tests.api.in_process import InProcessServer, in_process_server
from tests.api.servers import wait_until
from tests.api.sockets import RawClient, request
from tests.api.test_online_load import CONFIG, add, predict, step_report
from tests.api.test_overload import JSON_TYPE, ONLINE, post, waiting
from tests.builders import linear_cost, make_profile

DEFAULT = SLO(1.0, 0.15)


def loaded(*prompt_tokens: int) -> OnlineLoad:
    """10 ms for a row, so 10 ms for a decode; these prompts wait."""
    load = OnlineLoad(linear_cost(token_s=0.01), CONFIG)
    if prompt_tokens:
        add(load, *prompt_tokens)
    return load


def check(
    load: OnlineLoad, ttft_s: float = DEFAULT.ttft_s, tpot_s: float = DEFAULT.tpot_s, tokens: int = 10
) -> None:
    predicted = predict(load, tokens)
    objectives = {"ttft": Objective(ttft_s, "slo.ttft"), "tpot": Objective(tpot_s, "slo.tpot")}
    check_objectives(objectives, DEFAULT, load, predicted, [tokens], lambda num: 10 * num)


def refusal(load: OnlineLoad, **asked: Any) -> ObjectiveUnavailable:
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
    refused = refusal(three, tpot_s=0.0599)
    assert str(refused) == (
        "slo.tpot: asked 0.0599 s, the present load leaves 0.06 s. Please ask for that, or retry in 10 s."
    )
    assert (refused.param, refused.retry_after_s) == ("slo.tpot", 10)
    assert refusal(three, tpot_s=0.031).retry_after_s == 20, "until two of them have ended"


def test_more_than_the_default_is_never_named_as_the_least() -> None:
    busy = loaded(*[100] * 50)
    assert "leaves 0.12 s" in str(refusal(busy, tpot_s=0.05)), "CONFIG decodes at most 8 in a step"
    busy.set_cost_model(linear_cost(token_s=0.02))
    assert "leaves 0.15 s" in str(refusal(busy, tpot_s=0.05))
    assert "leaves 1 s" in str(refusal(busy, ttft_s=0.9))


def test_a_slowdown_refuses_until_it_is_over() -> None:
    load = loaded()
    check(load, tpot_s=0.02)
    for _ in range(200):
        load.on_report(step_report(0.01, 0.018))
    refused = refusal(load, tpot_s=0.02)  # alone it takes 18 ms
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
    refused = refusal(waiting_prompt, ttft_s=0.299)
    assert str(refused) == (
        "slo.ttft: asked 0.299 s, the present load leaves 0.3 s. Please ask for that, or retry in 1 s."
    )
    assert (refused.param, refused.retry_after_s) == ("slo.ttft", 1)
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
        facts = server.state.ready_preparer().engine
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
    refused = refusal(load, tpot_s=0.0799)
    assert str(refused) == (
        "slo.tpot: asked 0.0799 s, with any offloading interval that fits the device, its bus leaves, "
        f"beside other engines, 0.08 s. Please ask for that, or retry in {refused.retry_after_s} s."
    )
    load.bus_least_step_s = math.inf
    assert "engines, 0.15 s" in str(refusal(load, tpot_s=0.1)), "the server's own is always offered"
    check(load)


def test_a_request_that_would_wait_too_long_may_be_retried_when_others_are_served() -> None:
    check_hopeless(Prediction(SHED_FACTOR * 1.0, 0.15, 0.0, 0.0), 1.0)
    check_hopeless(Prediction(9.0, 9.0, 0.0, 0.0), 1.0)  # alone it takes as long: a retry would not help
    for ttft_s, retry_after_s in ((1.8, 2), (0.9 + 0.11, 1), (1000.0, 120)):
        with pytest.raises(RequestShed, match=f"about {ttft_s:.1f} s") as refused:
            check_hopeless(Prediction(ttft_s, 0.15, 0.0, 0.0), 0.5)
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
            assert int(refused.headers["Retry-After"]) == 6  # 9 * 0.7 s less the objective of 1 s
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
