"""Options and phases of a server in the test's process."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import httpx
import pytest

from backfill.api import server as server_module
from backfill.api.app import create_app
from backfill.api.objective_admission import RequestShed
from backfill.api.open_request import count_online
from backfill.api.predictions import AskedPrompts, Prediction
from backfill.api.server import Server
from backfill.api.state import Phase
from backfill.core.clock import VirtualClock
from backfill.core.config import EngineConfig, SchedulerConfig
from backfill.core.errors import ConfigError
from backfill.core.slo import SLO
from backfill.engine.client import EngineClient
from backfill.engine.messages import ProfileRefined, Ready
from backfill.generation.tokenizer import Tokenizer
from backfill.http.config import ServerConfig
from backfill.models.generation_config import GenerationDefaults
from backfill.protocol.preparer import RequestPreparer, ServedModel
from tests.api.test_online_load import step_report
from tests.builders import flat_cost, linear_cost, make_info, make_profile
from tests.cli.running import run_cli_here
from tests.protocol.builders import make_generation

pytestmark = pytest.mark.anyio

MODEL = ServedModel(names=("m",), root="m", folder=Path(), created=0)


def new_server(scheduler: SchedulerConfig | None = None, **options: Any) -> Server:
    config = EngineConfig(model_dir="", scheduler=scheduler or SchedulerConfig())
    client = EngineClient(config)
    return Server(ServerConfig(**options), config, MODEL, client=client, url="", jobs_config=None)


async def ready_server(scheduler: SchedulerConfig | None = None, **options: Any) -> Server:
    """A server whose engine is ready."""
    server = new_server(scheduler, **options)
    preparer = RequestPreparer(MODEL, cast(Tokenizer, None), GenerationDefaults())
    server._processes._loading = asyncio.create_task(asyncio.sleep(0, preparer))
    await server._on_engine_ready(Ready(make_info(), SLO(1.0, 0.1), make_profile(linear_cost())))
    return server


async def test_the_online_load_is_predicted_under_a_policy_with_a_cost_model() -> None:
    assert (await ready_server()).state.online_load is None
    server = await ready_server(SchedulerConfig(policy="slo"))
    load = server.state.online_load
    assert load is not None

    def predicted() -> Prediction:
        return load.predict(
            AskedPrompts(num_tokens=[900], arrived_at_s=0.0, first_token_by_s=100.0), now_s=0.0
        )

    before = predicted()
    for _ in range(100):
        server._on_report(step_report(0.1, 0.2))
    slow = predicted()
    assert slow.ttft_s == pytest.approx(2 * before.ttft_s, rel=0.01)
    server._on_profile(make_profile(linear_cost()))
    assert predicted() == before


async def test_objectives_that_return_are_those_of_requests_and_of_the_next_engine() -> None:
    server = await ready_server(SchedulerConfig(policy="slo"))
    client, preparer = server.state.client, server.state.preparer
    assert preparer is not None and preparer.engine_facts.default_slo == SLO(1.0, 0.1)
    client._on_message(ProfileRefined(make_profile(), SLO(0.9, 0.05)))
    assert preparer.engine_facts.default_slo == SLO(0.9, 0.05)
    assert client.config.scheduler.kept_slo == client.default_slo == SLO(0.9, 0.05)


@pytest.mark.parametrize("sheds", [False, True])
async def test_requests_are_shed_with_the_option(sheds: bool) -> None:
    request = make_generation(slo=SLO(1.0, 0.1), prompts=[[5] * 900])
    state = (await ready_server(SchedulerConfig(policy="slo"), shed_hopeless=sheds)).state
    now_s = state.clock.now_s()
    for _ in range(2):
        assert count_online(state, request, now_s)
    with pytest.raises(RequestShed) if sheds else nullcontext():
        count_online(state, request, now_s)


async def test_a_database_that_hangs_gives_open_requests_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    server, clock, waits_s = await ready_server(shutdown_timeout=30.0), VirtualClock(), list[float]()

    class HangingJobs:
        async def pause(self) -> None:
            clock.advance(10.0)

    async def until_none_is_open(num_open: object, timeout_s: float) -> None:
        waits_s.append(timeout_s)

    monkeypatch.setattr(server_module, "until_none_is_open", until_none_is_open)
    server._processes.supervisor = Mock()
    server.state.clock, server.state.jobs = clock, cast(Any, HangingJobs())
    await server._drain()
    assert waits_s == [20.0]


class NotingJobs:
    num_fed = 0

    def engine_ready(self, service: object, max_num_seqs: int) -> None:
        self.num_fed += 1


async def test_without_offline_work_batches_get_no_engine_and_health_says_why() -> None:
    state, jobs = (await ready_server()).state, NotingJobs()
    state.jobs = cast(Any, jobs)
    transport = httpx.ASGITransport(create_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:

        async def shown(num_fed: int) -> tuple[int, bytes, bool]:
            """The answer to /health, and whether the gauge is set."""
            assert jobs.num_fed == num_fed
            health, metrics = await client.get("/health"), (await client.get("/metrics")).text
            is_set = 'backfill:offline_suspended{engine="0",model_name="m"} 1.0' in metrics
            return health.status_code, health.content, is_set

        state.feed_jobs()
        assert await shown(1) == (200, b"", False)
        state.suspend_offline(True)
        state.feed_jobs()
        status, content, is_set = await shown(1)
        assert (status, is_set) == (200, True) and b"offline work is suspended" in content
        state.suspend_offline(False)
        assert await shown(2) == (200, b"", False)
        state.phase = Phase.DRAINING
        state.suspend_offline(False)
        assert jobs.num_fed == 2, "a server that shuts down starts no batch"


def test_a_strict_server_is_strict_in_both_processes() -> None:
    for is_strict in (False, True):
        setup = new_server(strict=is_strict).state.preparation.setup
        assert setup.is_strict == setup.line_check.is_strict == is_strict
        assert setup.create_preparer(cast(Tokenizer, None)).line_check.is_strict == is_strict


def test_the_options_reach_the_server(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: list[ServerConfig] = []

    def create(config: ServerConfig, *_: object, **__: object) -> None:
        configs.append(config)
        raise SystemExit(0)

    monkeypatch.setattr("backfill.api.server.Server", create)
    monkeypatch.setattr(EngineClient, "launch", lambda client: None)
    options = ("--strict", "--shed-hopeless", "--data-dir", str(tmp_path))
    origins = ("--allowed-origins", "https://a.example", "--allowed-origins", "*")
    run_cli_here("serve", str(small_model), "--port", "0", *options, *origins)
    (config,) = configs
    assert config.strict and config.shed_hopeless
    assert config.allowed_origins == ("https://a.example", "*")


def test_impossible_objectives_of_the_server_are_refused_or_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def ready(ttft_slo: float) -> None:
        profile = make_profile(flat_cost(0.1))
        server = new_server(SchedulerConfig(policy="slo", ttft_slo=ttft_slo))
        preparer = RequestPreparer(MODEL, cast(Tokenizer, None), GenerationDefaults())
        server._processes._loading = asyncio.create_task(asyncio.sleep(0, preparer))
        await server._on_engine_ready(Ready(make_info(), SLO(ttft_slo, 0.1), profile))

    with pytest.raises(ConfigError, match=r"^`ttft_slo` 1e-09: one request alone needs 0.1 s on this device"):
        asyncio.run(ready(1e-9))
    asyncio.run(ready(0.09))
    assert "`ttft_slo` 0.09: one request alone needs 0.1 s, by a" in caplog.text
