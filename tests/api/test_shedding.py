"""Load shedding: requests that would wait too long are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backfill.api.objective_admission import SHED_FACTOR, RequestShed, check_hopeless
from backfill.api.online_load import OnlineLoad, Prediction
from backfill.core.clock import VirtualClock
from tests.api.in_process import in_process_server
from tests.api.servers import wait_until
from tests.api.sockets import RawClient, request
from tests.api.test_online_load import CONFIG, predict
from tests.api.test_overload import ONLINE, post, waiting
from tests.builders import linear_cost


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
        lazy.send(request("POST", "/v1/completions", body, {"Content-Type": "application/json"}))
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
