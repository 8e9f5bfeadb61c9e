"""Which requests a server accepts while offline work is suspended."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from backfill.api.admission import OfflineSuspended
from backfill.api.app import create_app
from backfill.api.metrics.registry import Metrics
from backfill.api.state import Phase, ServerState
from backfill.core.config import EngineConfig
from backfill.core.request import ServiceClass
from backfill.core.slo import SLO
from backfill.engine.client import EngineClient
from backfill.http.config import ServerConfig
from backfill.http.errors import error_response
from tests.builders import make_info


class NotingJobs:
    def __init__(self) -> None:
        self.num_fed = 0

    def engine_ready(self, service: object, max_num_seqs: int) -> None:
        self.num_fed += 1


def ready_state() -> ServerState:
    config = EngineConfig(model_dir="")
    doubles: dict[str, Any] = {"preparation": object(), "service": object(), "jobs": NotingJobs()}
    state = ServerState(ServerConfig(), config, EngineClient(config), phase=Phase.READY, **doubles)
    state.metrics = Metrics("m", make_info(), slo=SLO(1.0, 0.1), task_failures={"sweeper": 2})
    return state


def num_fed(state: ServerState) -> int:
    assert isinstance(state.jobs, NotingJobs)
    return state.jobs.num_fed


def get(state: ServerState, path: str) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(state))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.get(path)

    return asyncio.run(run())


def test_batches_get_the_engine_unless_offline_work_is_suspended() -> None:
    state = ready_state()
    state.feed_jobs()
    assert num_fed(state) == 1
    state.suspend_offline(True)
    state.feed_jobs()
    assert num_fed(state) == 1
    state.suspend_offline(False)
    assert num_fed(state) == 2
    state.phase = Phase.DRAINING
    state.suspend_offline(False)
    assert num_fed(state) == 2, "a server that shuts down starts no batch"


def test_flex_requests_are_refused_while_offline_work_is_suspended_and_online_ones_are_not() -> None:
    state = ready_state()
    state.suspend_offline(True)
    state.admission.reserve(ServiceClass.ONLINE, 3)
    with pytest.raises(OfflineSuspended) as refused:
        state.admission.reserve(ServiceClass.OFFLINE, 1)
    assert state.admission.num_open == 3
    response = error_response(refused.value)
    assert response.status_code == 429
    assert json.loads(bytes(response.body))["error"]["code"] == "resource_unavailable"
    assert int(response.headers["retry-after"]) > 0
    state.suspend_offline(False)
    state.admission.reserve(ServiceClass.OFFLINE, 1)


def test_health_and_a_gauge_say_that_offline_work_is_suspended() -> None:
    state = ready_state()
    gauge = 'backfill:offline_suspended{engine="0",model_name="m"} '
    assert (get(state, "/health").status_code, get(state, "/health").content) == (200, b"")
    assert f"{gauge}0.0" in get(state, "/metrics").text
    state.suspend_offline(True)
    health = get(state, "/health")
    assert (health.status_code, health.json()) == (
        200,
        {"status": "offline work is suspended: the engine kept dying"},
    )
    assert f"{gauge}1.0" in get(state, "/metrics").text


def test_tasks_that_failed_are_counted() -> None:
    assert 'backfill:task_failures_total{task="sweeper"} 2.0' in get(ready_state(), "/metrics").text
