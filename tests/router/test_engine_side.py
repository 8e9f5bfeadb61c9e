"""What a server does for a router: its state, the owner that the router names, and what it lost."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import msgspec
import pytest

from backfill.api import state as state_module
from backfill.api.replica_state import StateReporter, model_digest
from backfill.core.errors import EngineDead, StepFailed
from backfill.core.request import ServiceClass
from backfill.http.error_responses import error_response
from backfill.protocol.replica_state import ReplicaState, parse_state
from backfill.router.replica import Replica
from tests.api.in_process import in_process_server
from tests.api.servers import wait_until
from tests.api.test_fields import make_tokenizer
from tests.router.stubs import COMPLETIONS


def test_a_server_shows_its_state(tmp_path: Path) -> None:
    with in_process_server(Path(), tokenizer=make_tokenizer(), max_num_seqs=3, is_open=False) as server:
        server.state.reporter = StateReporter(("m", "n"), tmp_path)
        state = msgspec.json.decode(server.http.get("/state").content, type=ReplicaState)
        assert state.phase == "ready" and state.models == ("m", "n")
        assert (state.max_num_seqs, state.kv_tokens, state.ttft_slo_s) == (3, 1024 * 16, 1.0)
        assert state.num_online == state.num_offline == 0
        admission = server.state.admission
        reservations = [
            admission.reserve("", which, num)
            for which, num in ((ServiceClass.ONLINE, 1), (ServiceClass.OFFLINE, 2))
        ]
        state = msgspec.json.decode(server.http.get("/state").content, type=ReplicaState)
        assert (state.num_online, state.num_offline) == (1, 2)
        for reservation in reservations:
            reservation.release()


OLDER: dict[str, object] = {"instance": "i", "phase": "loading", "models": ["m"], "digest": "d"}


def test_the_state_of_an_older_server_has_null_or_0_for_what_it_cannot_tell() -> None:
    nulls = dict.fromkeys(("prefill_tokens_per_s", "waiting_prompt_tokens"))
    zeros = dict.fromkeys(("max_model_len", "max_num_seqs", "kv_tokens", "ttft_slo_s", "num_lines"), 0)
    assert parse_state(msgspec.json.encode(OLDER | nulls | zeros)) == parse_state(msgspec.json.encode(OLDER))


@pytest.mark.parametrize("name", ["prefill_tokens_per_s", "max_num_seqs", "kv_tokens"])
def test_a_state_by_which_no_router_can_divide_is_refused_with_the_name(name: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=name):
        parse_state(msgspec.json.encode(OLDER | {name: -1}))
    state = parse_state(msgspec.json.encode(OLDER | {name: 0}))
    assert Replica("a", state).ttft_s(1, 0.0) > 0.0 and Replica("a", state).line_headroom > 0


def test_the_digest_tells_models_apart_by_configuration_and_sizes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"12")
    first = model_digest(tmp_path)
    assert model_digest(tmp_path) == first
    (tmp_path / "model.safetensors").write_bytes(b"123")
    second = model_digest(tmp_path)
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert len({first, second, model_digest(tmp_path)}) == 3


def test_the_key_named_router_alone_speaks_for_owners() -> None:
    keys = ("router=secret", "alice=one")
    with in_process_server(Path(), tokenizer=make_tokenizer(), api_keys=keys) as server:

        def owner_of(key: str, **headers: str) -> str:
            body = {"prompt": [3], "max_tokens": 1}
            headers["authorization"] = f"Bearer {key}"
            answer = server.http.post(COMPLETIONS, json=body, headers=headers)
            assert answer.status_code == 200
            return server.engine.requests[-1].owner

        assert owner_of("secret", **{"x-backfill-owner": "bob"}) == "bob"
        assert owner_of("secret") == "router"
        assert owner_of("one", **{"x-backfill-owner": "bob"}) == "alice"


def test_routers_alone_have_a_request_run_alone() -> None:
    keys = ("router=secret", "alice=one")
    with in_process_server(Path(), tokenizer=make_tokenizer(), api_keys=keys) as server:
        running = server.state.admission.reserve("", ServiceClass.OFFLINE, 1)

        def answer_to(key: str, **headers: str) -> httpx.Response:
            body = {"prompt": [3], "max_tokens": 1, "service_tier": "flex"}
            headers["authorization"] = f"Bearer {key}"
            return server.http.post(COMPLETIONS, json=body, headers=headers)

        def status_of(key: str, **headers: str) -> int:
            return answer_to(key, **headers).status_code

        assert status_of("one", **{"x-backfill-alone": "1"}) == 200
        assert status_of("secret", **{"x-backfill-alone": "1"}) == 200, "it has no name to come back with"
        alone = {"x-backfill-alone": "1", "x-request-id": "line"}
        assert status_of("secret", **alone) == 429 == status_of("one")
        other = {**alone, "x-request-id": "other"}
        codes = [answer_to("secret", **each).json()["error"]["code"] for each in (alone, other)]
        assert codes == ["turn_kept", "resource_unavailable"]
        running.release()
        assert status_of("one") == 429
        assert status_of("secret", **alone) == 200 == status_of("one")


class Batches:
    """Of the server. ``capacity``: lines that may be in the engine; ``num_held``: how often held."""

    def __init__(self) -> None:
        self.feeder = SimpleNamespace(num_running=1)
        self.capacity = 9
        self.num_held = 0

    def hold(self) -> None:
        self.capacity = 0
        self.num_held += 1

    def engine_ready(self, service: object, max_num_seqs: int) -> None:
        self.capacity = max_num_seqs


def test_the_servers_own_lines_wait_for_a_request_that_is_to_run_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state_module, "_HELD_LOOK_S", 0.01)
    with (
        in_process_server(Path(), tokenizer=make_tokenizer(), is_open=False) as server,
        ThreadPoolExecutor(1) as client,
    ):
        jobs = Batches()
        server.state.jobs = cast(Any, jobs)
        body = {"prompt": [3], "max_tokens": 1, "service_tier": "flex"}
        headers = {"x-backfill-alone": "1", "x-request-id": "line"}
        ask = partial(server.http.post, COMPLETIONS, json=body, headers=headers)
        assert ask().json()["error"]["code"] == "turn_kept", "a line is in the engine"
        assert jobs.capacity == 0
        jobs.feeder.num_running = 0
        asked = client.submit(ask)
        wait_until(lambda: server.engine.num_running == 1, "its run")
        num_held = jobs.num_held
        wait_until(lambda: jobs.num_held > num_held + 2, "looks")
        assert jobs.capacity == 0, "it runs"
        server.engine.may_end.set()
        assert asked.result().status_code == 200
        wait_until(lambda: jobs.capacity > 0, "lines")


def test_an_answer_says_that_the_engine_lost_the_request() -> None:
    lost = error_response(EngineDead("dead", num_lost=3, num_others=2))
    assert (lost.status_code, lost.headers["x-backfill-lost"]) == (503, "2")
    assert error_response(StepFailed("failed", num_lost=1, num_others=0)).headers["x-backfill-lost"] == "0"
    assert "x-backfill-lost" not in error_response(EngineDead("it never ran")).headers
