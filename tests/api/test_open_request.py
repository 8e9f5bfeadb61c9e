"""What an open request holds is released, however far it came."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fastapi import Request
from starlette.requests import ClientDisconnect

from backfill.api.admission import OfflineSuspended
from backfill.api.objective_admission import ObjectiveUnavailable, RequestShed
from backfill.api.online_load import OnlineLoad
from backfill.api.open_request import OpenRequest, open_request, peek
from backfill.api.predictions import AskedPrompts
from backfill.api.state import ServerState
from backfill.core.clock import WallClock
from backfill.core.config import SchedulerConfig
from backfill.core.errors import RequestError
from backfill.core.request import ServiceClass
from backfill.core.slo import SLO
from backfill.http.errors import OfflineUnavailable
from backfill.protocol.generation import Generation
from tests.api.test_server import ready_server
from tests.builders import linear_cost
from tests.protocol.builders import make_generation

pytestmark = pytest.mark.anyio

ONLINE, OFFLINE = ServiceClass.ONLINE, ServiceClass.OFFLINE


def make_request(**fields: Any) -> Request:
    """A request whose body has arrived."""
    body = json.dumps({"prompt": "Hi", **fields}).encode()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {
        "type": "http",
        "headers": [(b"content-type", b"application/json")],
        "state": {"request_id": None, "arrived_at_s": WallClock().now_s()},
    }
    return Request(scope, receive)


async def ready_state(monkeypatch: pytest.MonkeyPatch, prepared: Generation | Exception) -> ServerState:
    """A state that prepares every body to ``prepared``."""

    async def prepare(*_: object) -> Generation:
        if isinstance(prepared, Exception):
            raise prepared
        return prepared

    server = await ready_server(SchedulerConfig(policy="slo"), shed_hopeless=True)
    monkeypatch.setattr(ServerState, "prepare", prepare)
    return server.state


def held(state: ServerState) -> tuple[int, ...]:
    """Choices, bytes, choices in the load, and unanswered requests."""
    assert state.online_load is not None
    offline_bytes = state.bodies.offline.total
    in_load = state.online_load.num_open
    return state.admission.num_open, state.bodies.all.total, offline_bytes, in_load, state.num_unanswered


async def test_a_request_is_held_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    generation = make_generation(num_choices=2, slo=SLO(1e9, 1e9), prompts=[[5, 6]])
    state = await ready_state(monkeypatch, generation)
    opened = await open_request(state, "/v1/completions", make_request(n=2))
    assert held(state) == (2, 0, 0, 2, 1), "the bytes are released once the body is prepared"
    assert state.online_load is not None
    another = AskedPrompts(num_tokens=[2], arrived_at_s=0.0, first_token_by_s=1e9)
    whole = state.online_load.predict(another, now_s=0.0)
    opened.on_prompt_progress(1, 1)
    assert state.online_load.predict(another, now_s=0.0).ttft_s < whole.ttft_s
    opened.on_first_token(0)
    opened.on_choice_end(0)
    assert held(state) == (1, 0, 0, 1, 1)
    for _ in range(2):
        opened.close()
        assert held(state) == (0, 0, 0, 0, 0)


async def test_a_tight_objective_is_admitted_beside_longer_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's own is 1 s. A token takes 1 ms, and a gap at most 0.1 s."""
    state = await ready_state(monkeypatch, make_generation(slo=SLO(0.3, 1.0), prompts=[[5] * 100]))
    load = OnlineLoad(linear_cost(token_s=0.001), state.engine_config.scheduler, 10_000)
    state.online_load, now_s = load, WallClock().now_s()
    (chat,) = load.add(AskedPrompts(num_tokens=[10], arrived_at_s=now_s, first_token_by_s=now_s + 1.0))
    chat.on_first_token()
    (long,) = load.add(AskedPrompts(num_tokens=[400], arrived_at_s=now_s, first_token_by_s=now_s + 1e3))
    (await open_request(state, "/v1/completions", make_request())).close()
    long.on_end()
    (urgent,) = load.add(AskedPrompts(num_tokens=[400], arrived_at_s=now_s, first_token_by_s=now_s + 0.5))
    with pytest.raises(ObjectiveUnavailable):
        await open_request(state, "/v1/completions", make_request())
    for each in (urgent, chat):
        each.on_end()
    assert held(state) == (0, 0, 0, 0, 0)


async def test_prompts_that_the_cache_holds_shed_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = [
        make_generation(slo=SLO(ttft_s, 1.0), prompts=[list(range(num_tokens))])
        for num_tokens, ttft_s in ((2992, 9.0), (3000, 9.0), (9, 1.0))
    ]
    state = await ready_state(monkeypatch, prepared[0])
    state.online_load = OnlineLoad(linear_cost(token_s=0.001), state.engine_config.scheduler, 10_000)

    async def open_next() -> OpenRequest:
        generation = prepared.pop(0)
        monkeypatch.setattr(ServerState, "prepare", lambda *_: asyncio.sleep(0, generation))
        return await open_request(state, "/v1/completions", make_request())

    (await open_next()).on_first_token(0)
    turn = await open_next()
    (await open_next()).close()  # else: a first token after 3 s, and RequestShed
    turn.close()


@pytest.mark.parametrize(
    ("prepared", "fields", "error"),
    [
        (RequestError("no"), {}, RequestError),
        (ClientDisconnect(), {"service_tier": "flex"}, ClientDisconnect),
        (make_generation(slo=SLO(0.1, 0.1), prompts=[[5] * 2000]), {}, ObjectiveUnavailable),
        (make_generation(slo=SLO(1.0, 0.1), prompts=[[5] * 900]), {}, RequestShed),
    ],
)
async def test_a_request_that_is_refused_holds_nothing(
    prepared: Generation | Exception,
    fields: dict[str, Any],
    error: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = await ready_state(monkeypatch, prepared)
    load = state.online_load
    assert load is not None
    others = load.add(AskedPrompts(num_tokens=[900, 900], arrived_at_s=-1e9, first_token_by_s=1e9))
    with pytest.raises(error):
        await open_request(state, "/v1/completions", make_request(**fields))
    for choice in others:
        choice.on_end()
    assert held(state) == (0, 0, 0, 0, 0)


async def test_an_offline_request_that_is_refused_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    state = await ready_state(monkeypatch, make_generation())
    state.bodies.max_offline_bytes = 1
    for error in (OfflineUnavailable, OfflineSuspended):
        with pytest.raises(error):
            await open_request(state, "/v1/completions", make_request(service_tier="flex"))
        assert held(state) == (0, 0, 0, 0, 0)
        state.admission.is_offline_suspended = True


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b'{"prompt": "a"}', (ONLINE, 1)),
        (b'{"n": 5, "service_tier": "flex", "messages": [{}]}', (OFFLINE, 5)),
        (b'{"n": null, "service_tier": null}', (ONLINE, 1)),
        (b'{"service_tier": "auto", "n": 3}', (ONLINE, 3)),
        (b'{"n": 128}', (ONLINE, 128)),
        (b'{"n": 129}', (ONLINE, 1)),  # refused when it is prepared, by what was sent
        (b'{"n": ' + b"9" * 5000 + b"}", (ONLINE, 1)),
        (b'{"n": -2}', (ONLINE, 1)),
        (b'{"n": 1.5, "service_tier": 7}', (ONLINE, 1)),
        (b'{"n": 0}', (ONLINE, 1)),
        (b'{"n": 4', (ONLINE, 1)),
        (b"[]", (ONLINE, 1)),
        (b"", (ONLINE, 1)),
        (b"\xff", (ONLINE, 1)),
        (b'{"a": ' + b"[" * 100_000, (ONLINE, 1)),
    ],
    ids=lambda value: str(value)[:30],
)
def test_class_and_choices_are_read_without_parsing(raw: bytes, expected: tuple[ServiceClass, int]) -> None:
    assert peek(raw) == expected


def test_a_tier_in_a_header_is_that_of_a_body_without_one() -> None:
    for raw, expected in (
        (b'{"prompt": "x"}', OFFLINE),
        (b'{"n": 2, "service_tier": null}', OFFLINE),
        (b'{"service_tier": "default"}', ONLINE),
        (b"not JSON", OFFLINE),
    ):
        assert peek(raw, "flex")[0] is expected
    assert peek(b"{}", "default") == (ONLINE, 1)
