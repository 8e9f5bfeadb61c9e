"""Load shedding: requests that would wait too long are refused."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from backfill.api.shedding import SHED_FACTOR, RequestShed, Shedder, prefill_time_s, should_shed
from backfill.core.config import SchedulerConfig
from backfill.core.counters import ClassCounters
from backfill.costs.load import StepLoad
from backfill.engine.messages import ClassStats, EngineStats, StepReport, StepStats
from tests.api.in_process import in_process_server
from tests.api.servers import TIMEOUT_S, wait_until
from tests.api.sockets import RawClient, request
from tests.api.test_overload import ONLINE, post, waiting
from tests.builders import linear_cost

CONFIG = SchedulerConfig(max_num_batched_tokens=100, max_prefill_chunk_tokens=100)
# 0.1 s for a step of 100 tokens, and 0.05 s for every step.
COST = linear_cost(token_s=0.001, step_s=0.05)


def make_shedder() -> Shedder:
    return Shedder(COST, CONFIG)


def step_report(predicted_s: float, seconds: float, *, stopped: bool = False) -> StepReport:
    idle = ClassStats(0, 0, ClassCounters())
    step = StepStats("online", 10, seconds, predicted_s, stopped)
    return StepReport([], EngineStats(idle, idle, 0.0, 0, 0.0, 0, step))


def test_prompts_are_computed_in_full_steps() -> None:
    many = StepLoad.of([(0, 10, True)] * 25)
    assert prefill_time_s(COST, many, 100) == pytest.approx(0.25 + 3 * 0.05)
    assert prefill_time_s(COST, StepLoad(), 100) == 0.0
    context = linear_cost(token_s=0.001, context_s=0.01)
    for num_tokens in (7, 100, 250):
        chunks = [
            (start, min(100, num_tokens - start), start + 100 >= num_tokens)
            for start in range(0, num_tokens, 100)
        ]
        predicted = prefill_time_s(context, StepLoad.of(chunks), 100)
        assert predicted == pytest.approx(context.prefill_time_s(num_tokens, 100)), "by the cost model"


def test_only_requests_ahead_of_it_shed_a_request() -> None:
    assert not should_shed(SHED_FACTOR * 1.0, 0.1, 1.0)
    assert should_shed(SHED_FACTOR * 1.0 + 0.1, 0.1, 1.0)
    assert not should_shed(9.0, 9.0, 1.0), "alone it takes as long: a retry would not help"


def test_a_request_that_would_wait_too_long_is_refused_with_retry_after() -> None:
    shedder = make_shedder()
    for _ in range(10):
        shedder.admit([100], priority=0, objective_s=1.0, waited_s=0.0)
    assert shedder.num_waiting_tokens == 1000
    shedder.admit([100], priority=0, objective_s=1.0, waited_s=0.0)
    with pytest.raises(RequestShed) as refused:
        shedder.admit([100], priority=0, objective_s=0.5, waited_s=0.0)  # 12 steps of 0.15 s
    assert refused.value.retry_after_s == 2
    assert "about 1.8 s" in str(refused.value)
    assert shedder.num_waiting_tokens == 1100, "it is not counted"
    with pytest.raises(RequestShed):
        shedder.admit([100], priority=0, objective_s=1.0, waited_s=0.3)
    shedder.admit([100], priority=0, objective_s=1.0, waited_s=0.1)


def test_a_prompt_counts_until_its_first_token_or_its_release() -> None:
    shedder = make_shedder()
    request = shedder.admit([100, 250, 1], priority=3, objective_s=1.0, waited_s=0.0)
    request.on_first_token(1)
    assert shedder.num_waiting_tokens == 101
    request.release()
    request.release()
    assert shedder.num_waiting_tokens == 0


def test_requests_of_lower_priority_do_not_count() -> None:
    shedder = make_shedder()
    for _ in range(20):
        shedder.admit([100], priority=1, objective_s=9.0, waited_s=0.0)
    shedder.admit([100], priority=0, objective_s=0.2, waited_s=0.0)
    with pytest.raises(RequestShed):
        shedder.admit([100], priority=1, objective_s=0.2, waited_s=0.0)


def test_steps_correct_the_prediction() -> None:
    shedder = make_shedder()
    for _ in range(10):
        shedder.admit([100], priority=0, objective_s=1.0, waited_s=0.0)
    shedder.on_report(step_report(1.0, 50.0, stopped=True))
    shedder.admit([1], priority=0, objective_s=1.0, waited_s=0.0)
    for _ in range(100):
        shedder.on_report(step_report(0.1, 0.15))
    with pytest.raises(RequestShed):
        shedder.admit([1], priority=0, objective_s=1.0, waited_s=0.0)


def test_the_prompt_of_a_stalled_reader_does_not_count(default_model: Path) -> None:
    body = json.dumps({"prompt": [7] * 5, "n": 2, "max_tokens": 2000, "stream": True}).encode()
    with (
        in_process_server(default_model) as server,
        RawClient(server.port, receive_buffer_bytes=99) as lazy,
    ):
        server.state.shedder = shedder = Shedder(linear_cost(token_s=1.0), CONFIG)
        lazy.send(request("POST", "/v1/completions", body, {"Content-Type": "application/json"}))
        wait_until(lambda: bool(server.engine.prompts), "the request")
        wait_until(lambda: shedder.num_waiting_tokens == 0, "the first tokens")
        assert server.state.num_unanswered == 1


def test_a_shed_request_is_429_and_counted(default_model: Path) -> None:
    with in_process_server(default_model, is_open=False) as server:
        server.state.shedder = shedder = Shedder(linear_cost(token_s=1.0), CONFIG)
        long = {**ONLINE, "prompt": [7] * 5}
        with waiting(server, long, 1):
            wait_until(lambda: shedder.num_waiting_tokens == 5, "the prompt to be prepared")
            refused = post(server, ONLINE)
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "slow_down"
            assert int(refused.headers["Retry-After"]) == 5
            flex = {**ONLINE, "service_tier": "flex"}
            with waiting(server, flex, 1):
                wait_until(lambda: len(server.engine.requests) == 2, "the flex request in the engine")
                assert shedder.num_waiting_tokens == 5
        wait_until(lambda: shedder.num_waiting_tokens == 0, "the release of the waiting tokens")
        assert post(server, {**long, "stream": True}).status_code == 200
        wait_until(lambda: shedder.num_waiting_tokens == 0, "the release of the waiting tokens")
        exposed = httpx.get(f"{server.url}/metrics", timeout=TIMEOUT_S).text
        assert 'class="online",model_name="m",reason="hopeless"} 1.0' in exposed
