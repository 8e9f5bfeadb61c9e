from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from yarl import URL

from backfill.http.errors import LOST_HEADER
from backfill.http.limits import OwnerLimiter
from backfill.router.policy import RoutedRequest
from backfill.router.proxy import NO_ENGINES
from backfill.router.requests import peek
from tests.patience import TIMEOUT_S, until, with_more_time
from tests.router.stubs import COMPLETIONS, RunningRouter, StubEngine, event, routing

pytestmark = pytest.mark.anyio


async def complete(router: RunningRouter, prompt: str, **fields: Any) -> tuple[int, Any]:
    async with router.http.post(COMPLETIONS, json={"prompt": prompt, **fields}) as response:
        return response.status, await response.read() if "stream" in fields else await response.json()


async def test_an_answer_comes_back_byte_for_byte_with_the_headers_of_both_sides() -> None:
    engine = StubEngine(headers={"x-backfill-warning": "w"})
    async with routing([engine]) as router:
        headers = {
            "x-request-id": "mine",
            "x-slo-ttft-ms": "500",
            "authorization": "Bearer k",
            "x-backfill-owner": "another",
            "x-backfill-alone": "1",
        }
        body = {"prompt": "one two", "stream": True, "priority": 3}
        async with router.http.post(COMPLETIONS, json=body, headers=headers) as response:
            assert await response.read() == event("one") + event("two") + b"data: [DONE]\n\n"
            assert response.headers["x-request-id"] == "mine"
            assert response.headers["x-backfill-warning"] == "w"
            assert response.content_type == "text/event-stream"
        seen, seen_body = engine.seen[0]
        assert seen_body == body
        assert seen["x-request-id"] == "mine" and seen["x-slo-ttft-ms"] == "500"
        assert not seen.keys() & {"authorization", "x-backfill-owner", "x-backfill-alone"}
        status, answer = await complete(router, "three")
        assert status == 200 and answer["choices"] == [{"text": "three"}]
        async with router.http.get("/v1/models") as response:
            assert (await response.json())["data"][0]["id"] == "m"


async def test_a_request_that_has_sent_nothing_runs_elsewhere_when_its_engine_dies() -> None:
    engines = [StubEngine(), StubEngine()]
    for engine in engines:
        engine.gate.clear()
    async with routing(engines) as router:
        whole = [asyncio.create_task(complete(router, f"p{number}")) for number in range(3)]
        streams = [asyncio.create_task(complete(router, f"s{number}", stream=True)) for number in range(3)]
        await until(lambda: sum(len(engine.seen) for engine in engines) == 6)
        dead, other = sorted(engines, key=lambda engine: -len(engine.seen))
        num_before = len(other.seen)
        await dead.die()
        await until(lambda: len(other.seen) == num_before + len(dead.seen))
        other.gate.set()
        assert all(status == 200 and body["choices"] for status, body in await asyncio.gather(*whole))
        for number, (status, body) in enumerate(await asyncio.gather(*streams)):
            assert (status, body) == (200, event(f"s{number}") + b"data: [DONE]\n\n")
        assert await router.metric("router_retries_total") == len(dead.seen)
        await router.until_status(dead, "down")
        dead.gate.set()
        await dead.start()
        await router.until_status(dead, "up")
        assert (await complete(router, "again"))[0] == 200


async def test_a_stream_that_has_begun_ends_with_an_error_and_is_not_run_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engines = [StubEngine(sends_first=True), StubEngine(sends_first=True)]
    for engine in engines:
        engine.gate.clear()
    async with routing(engines) as router:
        body = {"prompt": "one two", "stream": True}
        async with router.http.post(COMPLETIONS, json=body) as response:
            assert await response.content.readexactly(len(event("one"))) == event("one")
            used = next(engine for engine in engines if engine.seen)
            await used.die()
            rest = await response.read()
        first, done, nothing = rest.split(b"\n\n")
        error = json.loads(first.removeprefix(b"data: "))["error"]
        assert error["code"] == "server_is_overloaded" and "lost" in error["message"]
        assert (done, nothing) == (b"data: [DONE]", b"")
        assert sum(len(engine.seen) for engine in engines) == 1
        await until(lambda: any(f"{used.url} is lost with" in line for line in caplog.messages))


async def test_an_engine_that_refuses_for_now_is_passed_over_and_the_last_refusal_is_passed_on() -> None:
    full, other = StubEngine(status=429, headers={"retry-after": "7"}), StubEngine()
    async with routing([full, other]) as router:
        for number in range(4):
            assert (await complete(router, f"p{number}"))[0] == 200
        other.status = 503
        async with router.http.post(COMPLETIONS, json={"prompt": "p"}) as response:
            assert response.status in (429, 503)


async def test_an_error_of_the_request_is_passed_on() -> None:
    engines = [StubEngine(status=400), StubEngine(status=400)]
    async with routing(engines) as router:
        status, answer = await complete(router, "p")
        assert status == 400 and answer["error"]["message"] == "no"
        assert sum(len(engine.seen) for engine in engines) == 1
        async with router.http.post(COMPLETIONS, data=b"{", headers={"content-type": "a/b"}) as response:
            assert response.status == 400


async def test_a_client_that_leaves_ends_its_request_at_the_engine() -> None:
    engine = StubEngine()
    engine.gate.clear()
    async with routing([engine]) as router:
        task = asyncio.create_task(complete(router, "p"))
        await until(lambda: engine.seen)
        task.cancel()
        await until(lambda: engine.num_left == 1)
        await until(lambda: all(each.num_in_flight == 0 for each in router.engines.all))
        replica = next(iter(router.engines.replicas.replicas))
        assert replica.num_online == 0


async def test_a_failed_look_or_two_end_no_request_and_those_of_a_while_do() -> None:
    engine, other = StubEngine(), StubEngine()
    engine.gate.clear()
    async with routing([engine]) as router:
        task = asyncio.create_task(complete(router, "p"))
        await until(lambda: engine.seen)
        engine.num_failing_looks = 2
        await until(lambda: engine.num_failing_looks == 0)
        await router.until_status(engine, "up")
        assert engine.num_left == 0
        assert router.engines.num_lost == {}
        await other.start()
        await router.engines.join(other.url)
        engine.num_failing_looks = 1000
        assert (await task)[0] == 200
        assert router.engines.num_lost == {engine.url: 1} and other.runs["p"] == 1
    await other.die()


async def test_a_pause_of_the_router_is_not_an_engines() -> None:
    engine = StubEngine()
    engine.gate.clear()
    async with routing([engine], engine_timeout=0.5) as router:
        task = asyncio.create_task(complete(router, "p"))
        await until(lambda: engine.seen)
        engine.hangs = True
        await until(lambda: engine.num_hanging)
        time.sleep(0.7)
        engine.hangs = False
        engine.gate.set()
        assert (await task)[0] == 200
        assert engine.num_left == 0 and router.engines.num_lost == {}


async def test_a_large_body_is_read_apart_from_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []

    def noted(*args: Any) -> RoutedRequest:
        threads.append(threading.current_thread() is threading.main_thread())
        return peek(*args)

    monkeypatch.setattr("backfill.router.proxy.peek", noted)
    engine = StubEngine()
    async with routing([engine]) as router:
        for prompt in ("p", "p" * 100_000):
            assert (await complete(router, prompt))[1]["choices"] == [{"text": prompt}]
    assert threads == [True, False]


async def test_requests_wait_for_an_engine_and_get_503_where_none_comes() -> None:
    engine = StubEngine()
    async with routing([engine], retry_timeout=0.05) as router:
        await engine.die()
        status, answer = await complete(router, "p")
        assert status == 503 and answer["error"]["code"] == "server_is_overloaded"
        async with router.http.get("/health") as response:
            assert response.status == 503
    engine = StubEngine()
    async with routing([engine]) as router:
        await engine.die()
        task = asyncio.create_task(complete(router, "p"))
        await router.until_status(engine, "down")
        await engine.start()
        assert (await task)[0] == 200


async def test_engines_join_and_leave_while_requests_run(caplog: pytest.LogCaptureFixture) -> None:
    first, second, foreign = StubEngine(), StubEngine(), StubEngine(models=("another",))
    await second.start()
    await foreign.start()
    first.gate.clear()
    async with routing([first]) as router:
        running = asyncio.create_task(complete(router, "p"))
        await until(lambda: first.seen)
        async with router.http.post("/router/engines", json={"url": second.url + "/v1/"}) as response:
            joined = await response.json()
            assert (joined["status"], joined["url"]) == ("up", second.url)
            assert f"{second.url}/v1/ is used without its path: {second.url}" in caplog.messages
        async with router.http.post("/router/engines", json={"url": foreign.url}) as response:
            assert response.status == 409
            message = (await response.json())["error"]["message"]
            assert "has m" in message and "has another" in message
        for body in ({}, {"url": "ftp://a"}, {"url": "http://a:b"}):
            async with router.http.post("/router/engines", json=body) as response:
                assert response.status == 400, body
        async with router.http.delete("/router/engines", params={"url": first.url + "/"}) as response:
            assert (await response.json())["status"] == "leaving"
        for number in range(3):
            assert (await complete(router, f"q{number}"))[0] == 200
        assert len(first.seen) == 1
        first.gate.set()
        assert (await running)[0] == 200
        await router.until_status(first, None)
        async with router.http.delete("/router/engines", params={"url": first.url}) as response:
            assert response.status == 404
    await second.die()
    await foreign.die()


async def test_without_any_engine_requests_are_refused_at_once() -> None:
    engine = StubEngine()
    async with routing([engine], retry_timeout=1000.0) as router:
        await engine.die()
        waiting = [
            asyncio.create_task(complete(router, "p")),
            asyncio.create_task(complete(router, "p", service_tier="flex")),
        ]
        await until(lambda: engine.url in router.engines.num_lost)
        waiting_for_one = asyncio.create_task(router.engines.until_up(1000.0))
        await asyncio.sleep(0)
        assert not waiting_for_one.done()
        async with router.http.delete("/router/engines", params={"url": engine.url}) as response:
            assert response.status == 200
        assert not await waiting_for_one
        for status, body in [*await asyncio.gather(*waiting), await complete(router, "q")]:
            assert status == 503
            assert body["error"]["message"] == NO_ENGINES
        for path in ("/v1/models", "/health"):
            async with router.http.get(path) as response:
                assert response.status == 503 and NO_ENGINES in await response.text()
        await engine.start()
        async with router.http.post("/router/engines", json={"url": engine.url}) as response:
            assert response.status == 200
        assert (await complete(router, "p"))[0] == 200


async def test_the_predicted_ttft_of_an_idle_engine_is_that_of_a_question() -> None:
    async with routing([StubEngine()]) as router:
        assert await router.metric("router_predicted_ttft_seconds") == 256 / 1e5


async def test_keys_are_checked_by_the_router_and_engines_are_told_the_owner() -> None:
    engine = StubEngine()
    async with routing([engine], api_keys=["alice=first"], engine_api_key="secret") as router:
        assert (await complete(router, "p"))[0] == 401
        headers = {"authorization": "Bearer first", "x-backfill-owner": "bob"}
        async with router.http.post(COMPLETIONS, json={"prompt": "p"}, headers=headers) as response:
            assert response.status == 200
        seen, _ = engine.seen[0]
        assert seen["authorization"] == "Bearer secret"
        assert seen["x-backfill-owner"] == "alice"


async def test_an_owner_has_its_limits_at_the_router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = list[str]()

    def refuse(_: OwnerLimiter, owner: str) -> float:
        refused.append(owner)
        return 0.0

    monkeypatch.setattr(OwnerLimiter, "refuse", refuse)
    key_file = tmp_path / "keys"
    key_file.write_text("flood=one\nflood requests-per-minute=2\n")
    async with routing([StubEngine()], api_keys=["other=two"], api_key_file=key_file) as router:

        async def status_of(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            async with router.http.post(COMPLETIONS, json={"prompt": "p"}, headers=headers) as response:
                assert ("Retry-After" in response.headers) == (response.status == 429)
                assert ("x-ratelimit-remaining-requests" in response.headers) == (key == "one")
                return response.status

        assert [await status_of("one") for _ in range(3)] == [200, 200, 429]
        assert await status_of("two") == 200
    assert refused == ["flood"], "what is refused again and again waits"


@pytest.mark.parametrize("others", [1, 0])
async def test_an_engine_that_answers_and_loses_requests_is_ejected_where_another_is_left(
    others: int,
) -> None:
    broken = StubEngine(status=503, headers={LOST_HEADER: "0"})
    engines = [broken, *(StubEngine() for _ in range(others))]
    async with routing(engines, retry_timeout=0.0, policy="round-robin") as router:
        engine = router.engines.get(broken.url)
        assert engine is not None

        def is_ejected() -> bool:
            return engine.health.is_ejected(time.monotonic())

        async with asyncio.timeout(TIMEOUT_S):
            while not is_ejected() and len(broken.seen) < 10:  # five in a row are enough
                await complete(router, f"p {len(broken.seen)}")
                async with router.http.get("/v1/models") as response:
                    await response.read()  # no sign that it computes
                await until(lambda: engine.is_up or is_ejected())
        assert is_ejected() == bool(others)


@pytest.mark.parametrize(
    ("options", "statuses"),
    [
        ({}, {None: 200, "first": 200}),
        ({"api_keys": ["admin=first"]}, {None: 403, "first": 403}),
        ({"engine_api_key": "secret"}, {None: 403, "secret": 403}),
        ({"allowed_hosts": ["router.example.com"]}, {None: 403}),
        ({"api_keys": ["alice=first"], "admin_key": "own"}, {None: 401, "first": 401, "own": 200}),
        ({"admin_key": "own"}, {None: 401, "owner": 401, "own": 200}),
    ],
)
async def test_engines_are_shown_and_changed_by_who_administers_the_router(
    options: dict[str, Any], statuses: dict[str | None, int]
) -> None:
    engine, other = StubEngine(), StubEngine()
    await other.start()
    async with routing([engine], **options) as router:
        for key, status in statuses.items():
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            async with router.http.post(
                "/router/engines", json={"url": other.url}, headers=headers
            ) as response:
                assert response.status == status, key
            async with router.http.get("/router/engines", headers=headers) as response:
                assert response.status == status, key
        assert (other.url in {each.url for each in router.engines.all}) == (200 in statuses.values())
    await other.die()


@pytest.mark.parametrize(
    ("path", "seen"),
    [
        ("/v1/models/a/b-1.5", "/v1/models/a/b-1.5"),
        ("/v1/models/a%3Fb%23c%2525", "/v1/models/a%3Fb%23c%2525"),
        ("/v1/models/%2e%2e/files", None),
        ("/v1/models/a/%2E%2E/%2E%2E/files", None),
        ("/v1/models/..%2ffiles", None),
        ("/v1/models/%2E/x", None),
    ],
)
async def test_a_forwarded_path_is_the_clients_and_of_a_model(path: str, seen: str | None) -> None:
    async with (
        routing([StubEngine()]) as router,
        router.http.get(URL(router.url + path, encoded=True)) as response,
    ):
        assert (await response.json()).get("path") == seen
        assert response.status == (404 if seen is None else 200)


async def test_many_streams_at_once_are_complete() -> None:
    engines = [StubEngine(max_num_seqs=64) for _ in range(3)]
    async with routing(engines) as router:

        async def stream(number: int) -> None:
            body = {"prompt": f"{number} " * 20, "stream": True}
            async with router.http.post(COMPLETIONS, json=body) as response:
                assert await response.read() == event(str(number)) * 20 + b"data: [DONE]\n\n"

        await asyncio.gather(*(stream(number) for number in range(60)))
        assert sum(sum(engine.runs.values()) for engine in engines) == 60
        assert all(engine.runs for engine in engines)


def test_an_engine_that_hangs_is_taken_for_dead_and_its_requests_run_elsewhere() -> None:
    async def run(engine_timeout: float) -> None:
        engines = [StubEngine(), StubEngine()]
        for engine in engines:
            engine.gate.clear()
        async with routing(engines, engine_timeout=engine_timeout) as router:
            request = asyncio.create_task(complete(router, "p"))
            await until(lambda: any(engine.seen for engine in engines))
            hanging, other = sorted(engines, key=lambda engine: -len(engine.seen))
            hanging.hangs = True
            other.gate.set()
            assert (await request)[0] == 200
            assert other.runs["p"] == 1 and hanging.num_left == 1
            hanging.hangs = False
            await router.until_status(hanging, "up")

    with_more_time(lambda factor: asyncio.run(run(0.5 * factor)))
