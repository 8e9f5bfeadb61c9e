from __future__ import annotations

import asyncio
import json
import math
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest
from aiohttp import web

from backfill.blending.requests import OrderName, PoolRequest
from backfill.core.clock import WallClock
from backfill.jobs import claims
from backfill.jobs.feed import InputChanged
from backfill.jobs.records import BatchStatus
from backfill.jobs.suspects import MAX_LONE_LOSSES
from backfill.preparation.messages import LineSelection
from backfill.protocol.replica_state import ReplicaState
from backfill.router import line_runner
from backfill.router.engine import Engine
from backfill.router.line_reader import PlannedBytes, RoutedLine, RoutedLines, RoutedReader
from backfill.router.line_runner import EngineRunner, _Pause
from backfill.router.looks import EngineLost
from backfill.router.metrics import RouterMetrics
from backfill.router.requests import peek
from tests.api.batch_inputs import completion_line
from tests.jobs.doubles import make_storage_quick
from tests.patience import TIMEOUT_S, until
from tests.router.stubs import COMPLETIONS, RunningRouter, StubEngine, routing

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    make_storage_quick(monkeypatch)
    monkeypatch.setattr(claims, "_LONGEST_PERIOD_S", 0.02)
    monkeypatch.setattr(line_runner, "_STORE_PERIOD_S", 0.02)


async def create_batch(router: RunningRouter, lines: list[dict[str, Any]], **headers: str) -> str:
    form = aiohttp.FormData({"purpose": "batch"})
    content = "".join(json.dumps(line) + "\n" for line in lines)
    form.add_field("file", content, filename="lines.jsonl")
    async with router.http.post("/v1/files", data=form, headers=headers) as response:
        file_id = (await response.json())["id"]
    body = {"input_file_id": file_id, "endpoint": COMPLETIONS, "completion_window": "24h"}
    async with router.http.post("/v1/batches", json=body, headers=headers) as response:
        batch: dict[str, Any] = await response.json()
        return str(batch["id"])


def lines_of(count: int, prompt: str = "prompt {}") -> list[dict[str, Any]]:
    return [
        completion_line(f"c{number}", prompt.format(number), model=None, max_tokens=1 + number % 7)
        for number in range(count)
    ]


async def batch_when(
    router: RunningRouter, batch_id: str, holds: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """The batch, once something holds of it."""
    async with asyncio.timeout(TIMEOUT_S):
        while not holds(batch := await router.show(f"/v1/batches/{batch_id}")):
            await asyncio.sleep(0.02)
    return batch


async def results_in(router: RunningRouter, batch_id: str, count: int) -> None:
    await batch_when(router, batch_id, lambda batch: batch["request_counts"]["completed"] >= count)


async def ended(router: RunningRouter, batch_id: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The batch at its end, and its results."""
    batch = await batch_when(router, batch_id, lambda batch: BatchStatus(batch["status"]).is_final)
    results = []
    for file_id in filter(None, (batch["output_file_id"], batch["error_file_id"])):
        async with router.http.get(f"/v1/files/{file_id}/content") as response:
            results += [json.loads(line) for line in (await response.text()).splitlines()]
    return batch, results


async def test_a_batch_is_divided_among_engines_as_offline_requests(tmp_path: Path) -> None:
    engines = [StubEngine(headers={"x-backfill-warning": "w"}) for _ in range(2)]
    async with routing(engines, tmp_path) as router:
        batch, results = await ended(router, await create_batch(router, lines_of(60)))
        assert batch["request_counts"] == {"total": 60, "completed": 60, "failed": 0}
        assert {result["custom_id"] for result in results} == {f"c{number}" for number in range(60)}
        for result in results:
            number = result["custom_id"].removeprefix("c")
            assert result["response"]["body"]["choices"][0]["text"] == f"prompt {number}"
            assert result["warning"] == "w"
        assert batch["usage"]["output_tokens"] == 60
        assert min(len(engine.seen) for engine in engines) > 15
        for headers, body in engines[0].seen:
            assert body["service_tier"] == "flex"
            assert "x-backfill-owner" not in headers


async def test_lines_that_begin_alike_go_to_one_engine(tmp_path: Path) -> None:
    engines = [StubEngine(), StubEngine()]
    lines = lines_of(64)
    for number, line in enumerate(lines):
        line["body"] = {"prompt": f"document {number % 8} " * 100 + str(number), "max_tokens": 4}
    for engine in engines:
        engine.gate.clear()
    async with routing(engines, tmp_path) as router:
        batch_id = await create_batch(router, lines)
        # As many as run at once, so that neither engine has taken lines of the other's part.
        await until(lambda: [len(engine.seen) for engine in engines] == [8, 8])
        first = [{body["prompt"][:11] for _, body in engine.seen} for engine in engines]
        assert len(first[0] & first[1]) <= 2, "only those on the cuts are computed twice"
        for engine in engines:
            engine.gate.set()
        batch, _ = await ended(router, batch_id)
        assert batch["request_counts"]["completed"] == 64


async def test_an_engine_that_dies_again_and_again_loses_and_doubles_no_line(tmp_path: Path) -> None:
    engines = [StubEngine(), StubEngine()]
    async with routing(engines, tmp_path) as router:
        for engine in engines:
            engine.gate.clear()
        batch_id = await create_batch(router, lines_of(120))
        for dying in engines:
            known = router.engines.get(dying.url)
            assert known is not None
            await until(lambda known=known: known.num_in_flight == 8)
            await dying.die()
            await router.until_status(dying, "down")
            await dying.start()
            await router.until_status(dying, "up")
        for engine in engines:
            engine.gate.set()
        batch, results = await ended(router, batch_id)
        assert batch["request_counts"] == {"total": 120, "completed": 120, "failed": 0}
        assert sorted(result["custom_id"] for result in results) == sorted(f"c{n}" for n in range(120))
        assert await router.metric("router_retries_total") > 0


async def test_lines_wait_while_no_engine_is_up_and_a_restarted_router_goes_on(tmp_path: Path) -> None:
    engine = StubEngine()
    async with routing([engine], tmp_path) as router:
        engine.gate.clear()
        batch_id = await create_batch(router, lines_of(20))
        await until(lambda: engine.seen)
        await engine.die()
        await router.until_status(engine, "down")
    engine.gate.set()
    await engine.start()
    async with routing([engine], tmp_path) as router:
        batch, results = await ended(router, batch_id)
        assert batch["request_counts"]["completed"] == 20
        assert len({result["custom_id"] for result in results}) == len(results) == 20


async def test_a_line_over_which_engines_are_lost_is_given_up_and_no_other(tmp_path: Path) -> None:
    class Fragile(StubEngine):
        """Is lost over the bad prompt, and answers at once that it was."""

        async def _complete(self, request: web.Request) -> web.StreamResponse:
            if (await request.json())["prompt"] != "bad":
                return await super()._complete(request)
            self.num_lost += 1
            return web.json_response({}, status=503, headers={"x-backfill-lost": "0"})

        num_lost = 0

    lines = lines_of(12)
    lines[5]["body"]["prompt"] = "bad"
    engines = [Fragile(), Fragile()]
    async with routing(engines, tmp_path) as router:
        batch, results = await ended(router, await create_batch(router, lines))
        assert batch["request_counts"] == {"total": 12, "completed": 11, "failed": 1}
        failed = [result for result in results if result["error"] is not None]
        assert [(each["custom_id"], each["error"]["code"]) for each in failed] == [("c5", "engine_error")]
        assert sum(engine.num_lost for engine in engines) == 6


async def test_a_line_with_which_an_engine_ends_is_given_up_where_it_asked_to_be_alone(
    tmp_path: Path,
) -> None:
    asked_alone: list[bool] = []

    class Fragile(StubEngine):
        """Its process ends over the bad prompt. The first time that it is to be alone it is refused."""

        async def _complete(self, request: web.Request) -> web.StreamResponse:
            if (await request.json())["prompt"] != "bad":
                return await super()._complete(request)
            asked_alone.append("x-backfill-alone" in request.headers)
            if asked_alone.count(True) == 1 and asked_alone[-1]:
                return web.json_response({"error": {"code": "turn_kept"}}, status=429)
            assert request.transport is not None
            request.transport.abort()
            return web.Response()

    bad = completion_line("bad", "bad", model=None)
    async with routing([Fragile()], tmp_path) as router:
        batch, results = await ended(router, await create_batch(router, [bad]))
    assert batch["request_counts"]["failed"] == 1 and results[0]["error"]["code"] == "engine_error"
    # A loss is two deaths. Whether the first was beside another router's line nobody knows.
    assert asked_alone == [False] * 2 + [True] * (1 + 2 * MAX_LONE_LOSSES)


@pytest.mark.parametrize(
    "reason", ["is_offline_quarantined", pytest.param("is_offline_suspended", marks=pytest.mark.slow)]
)
async def test_a_line_that_is_to_be_alone_leaves_an_engine_that_keeps_it_no_turn(
    tmp_path: Path, reason: str
) -> None:
    class Fragile(StubEngine):
        """Is lost over the bad prompt; once it is to be alone, the first engine takes no lines."""

        async def _complete(self, request: web.Request) -> web.StreamResponse:
            if "x-backfill-alone" not in request.headers:
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            if not any(each.load for each in engines if each is not self):
                self.load[reason] = True
                return web.json_response({"error": {"code": "resource_unavailable"}}, status=429)
            return await super()._complete(request)

    engines = [Fragile(), Fragile()]
    async with routing(engines, tmp_path) as router:
        batch, _ = await ended(router, await create_batch(router, lines_of(1)))
    assert batch["request_counts"]["completed"] == 1


@pytest.mark.parametrize("num_engines", [1, 2])
async def test_a_line_whose_turn_to_be_alone_does_not_come_gives_it_up_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_engines: int
) -> None:
    turn_s = 0.1
    monkeypatch.setattr(line_runner, "_TURN_S", turn_s)
    monkeypatch.setattr(line_runner, "_REFUSED_S", 0.01)
    asked: list[tuple[StubEngine, float]] = []

    class Busy(StubEngine):
        """Is lost over what is not alone. Lets it begin once it has asked another, or none for a while."""

        async def _complete(self, request: web.Request) -> web.StreamResponse:
            if "x-backfill-alone" not in request.headers:
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            now_s = asyncio.get_running_loop().time()
            before, before_s = asked[-1] if asked else (self, now_s)
            asked.append((self, now_s))
            if before is not self or (num_engines == 1 and now_s - before_s >= turn_s):
                return await super()._complete(request)
            return web.json_response({"error": {"code": "turn_kept"}}, status=429)

    async with routing([Busy() for _ in range(num_engines)], tmp_path) as router:
        batch, _ = await ended(router, await create_batch(router, lines_of(1)))
    assert batch["request_counts"]["completed"] == 1
    assert len({engine for engine, _ in asked}) == num_engines
    assert asked[-1][1] - asked[0][1] >= turn_s, "it waits for its turn"


@pytest.mark.parametrize(
    ("load", "counts"),
    [
        ({"is_offline_quarantined": True}, False),
        ({"is_offline_quarantined": True, "num_online": 1}, True),
        ({}, True),  # an engine that knows of no turns
    ],
)
async def test_what_ends_before_a_line_is_alone_was_not_beside_it(load: dict[str, Any], counts: bool) -> None:
    state = ReplicaState(instance="1", phase="ready", models=("m",), digest="d", num_offline=2, **load)
    engine = Engine("http://engine", state)
    engine.note_load(state.num_online + state.num_offline)

    def lose() -> None:
        with engine.attempt(is_alone=True):
            engine.note_load(state.num_online + state.num_offline)
            raise ConnectionError

    with pytest.raises(EngineLost) as lost:
        lose()
    assert lost.value.had_others is counts


async def test_what_an_engine_refuses_fails_its_line_alone(tmp_path: Path) -> None:
    engine = StubEngine(status=400)
    async with routing([engine], tmp_path) as router:
        batch, results = await ended(router, await create_batch(router, lines_of(3)))
        assert batch["request_counts"] == {"total": 3, "completed": 0, "failed": 3}
        assert {result["response"]["status_code"] for result in results} == {400}
        bad = lines_of(2)
        bad[1]["body"] = {"prompt": "p", "stream": True}
        batch, _ = await ended(router, await create_batch(router, bad))
        assert batch["status"] == "failed" and batch["errors"]["data"][0]["line"] == 2


async def test_an_engine_that_does_not_know_the_routers_key_gets_no_lines_for_a_while(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    faulty, other = StubEngine(status=401), StubEngine()
    async with routing([faulty, other], tmp_path) as router:
        batch, _ = await ended(router, await create_batch(router, lines_of(60)))
        assert batch["request_counts"] == {"total": 60, "completed": 60, "failed": 0}
        assert 1 <= len(faulty.seen) <= 2 * faulty.max_num_seqs
        found = [line for line in caplog.messages if "answers them with status 401" in line]
        assert len(found) == 1 and faulty.url in found[0]


async def test_an_engine_at_fault_counts_for_no_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_runner, "_FAULT_S", 0.1)
    engines = [StubEngine(), StubEngine()]
    async with routing(engines) as router:
        runner = EngineRunner(router.engines, RouterMetrics(router.engines, WallClock()))
        most = runner.capacity
        runner._note_fault(engines[0].url, 401)
        assert runner.capacity == most / 2 > 0
        await until(lambda: runner.capacity == most)


async def test_an_engine_that_loses_every_line_is_not_held_against_lines(tmp_path: Path) -> None:
    engines = [StubEngine(status=503, headers={"x-backfill-lost": "0"}), StubEngine()]
    async with routing(engines, tmp_path) as router:
        batch, _ = await ended(router, await create_batch(router, lines_of(30)))
        assert batch["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
        assert engines[0].seen


@pytest.mark.parametrize("why", ["it was lost on this one", "its turn at this one did not come"])
async def test_a_line_that_waits_for_another_engine_holds_up_no_other_line(why: str) -> None:
    engines = [StubEngine(max_num_seqs=2), StubEngine(max_num_seqs=2)]
    async with routing(engines) as router:
        runner = EngineRunner(router.engines, RouterMetrics(router.engines, WallClock()))
        line = RoutedLine(number=1, custom_id="a", body=b'{"prompt": "x"}')
        lost_on = {engines[0].url}
        request, held = peek(line.body, {}), 0
        while router.engines.replicas.place_line(request, lost_on) is not None:
            held += 1
        missed = {engines[0].url: _Pause(60.0, math.inf)}
        places = (lost_on, {}) if "lost" in why else (set(), missed)
        waits = asyncio.create_task(runner._place(line, *places))
        await asyncio.sleep(0.01)
        placed = await asyncio.wait_for(runner._place(line, set(), {}), TIMEOUT_S)
        assert held and placed.replica.name == engines[0].url and not waits.done()
        waits.cancel()


async def test_batches_belong_to_owners_and_engines_are_told(tmp_path: Path) -> None:
    engine = StubEngine()
    keys = ["alice=first", "bob=second"]
    async with routing([engine], tmp_path, keys, engine_api_key="secret") as router:
        batch_id = await create_batch(router, lines_of(2), authorization="Bearer first")
        await until(lambda: len(engine.seen) == 2)
        assert {seen["x-backfill-owner"] for seen, _ in engine.seen} == {"alice"}
        assert {seen["authorization"] for seen, _ in engine.seen} == {"Bearer secret"}
        headers = {"authorization": "Bearer second"}
        async with router.http.get(f"/v1/batches/{batch_id}", headers=headers) as response:
            assert response.status == 404
        async with router.http.post(f"/v1/batches/{batch_id}/cancel", headers=headers) as response:
            assert response.status == 404
        await create_batch(router, lines_of(3), authorization="Bearer second")
        await until(lambda: len(engine.seen) == 5)
        assert [seen["x-backfill-owner"] for seen, _ in engine.seen[2:]] == ["bob"] * 3


_SERVER = """
import asyncio, json, sys
from pathlib import Path
from tests.jobs.doubles import InstantRunner, make_manager, ready

class SlowRunner(InstantRunner):
    async def run(self, line, count=None, **_):
        await asyncio.sleep(0.002)
        return await super().run(line, count)

async def main():
    manager = make_manager(Path(sys.argv[1]), SlowRunner(), limits=json.loads(sys.argv[2]))
    await manager.start()
    ready(manager)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@contextmanager
def server_process(folder: Path, limits: Mapping[str, Any]) -> Iterator[None]:
    """A server in a process of its own, which is killed as the block is left."""
    command = [sys.executable, "-c", _SERVER, str(folder), json.dumps(limits)]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2])
    try:
        yield
    finally:
        process.kill()
        process.wait(TIMEOUT_S)


@asynccontextmanager
async def sharing(folder: Path) -> AsyncIterator[tuple[RunningRouter, dict[str, Any]]]:
    """A router whose engine shares its store, and the options with which a server shares it."""
    engine = StubEngine()
    async with routing([engine], folder / "router") as router:
        engine.store = router.engines.store_id
        known = router.engines.get(engine.url)
        assert known is not None
        await until(lambda: router.engines.shares_store(known))
        store = {
            "batch_database_url": f"sqlite:///{folder / 'router' / 'jobs.db'}",
            "batch_file_store": str(folder / "router"),
        }
        yield router, {**store, "batch_lease_timeout": 1.0, "batch_min_free_gib": 0}
        assert not engine.seen, "lines are leased by engines that share the store"


@pytest.mark.slow
async def test_an_engine_that_leases_lines_is_killed_and_others_lease_them_again(tmp_path: Path) -> None:
    async with sharing(tmp_path) as (router, options):
        batch_id = await create_batch(router, lines_of(1000))
        for number in range(3):
            with server_process(tmp_path / f"server-{number}", options):
                if number < 2:
                    await results_in(router, batch_id, 50 + 200 * number)
                else:
                    batch, results = await ended(router, batch_id)
        assert batch["request_counts"] == {"total": 1000, "completed": 1000, "failed": 0}
        assert sorted(each["custom_id"] for each in results) == sorted(f"c{n}" for n in range(1000))


@pytest.mark.slow  # servers that share a router's store and die: tests/jobs/test_world.py
async def test_a_cancelled_batch_ends_once_no_line_of_it_is_leased(tmp_path: Path) -> None:
    async with sharing(tmp_path) as (router, options):
        batch_id = await create_batch(router, lines_of(1000))
        with server_process(tmp_path / "server", options):
            await results_in(router, batch_id, 50)
        async with router.http.post(f"/v1/batches/{batch_id}/cancel") as response:
            assert (await response.json())["status"] == "cancelling"
        batch, results = await ended(router, batch_id)
        assert batch["status"] == "cancelled"
        assert len({each["custom_id"] for each in results}) == len(results) == 1000
        assert 50 <= batch["request_counts"]["completed"] < 1000


async def test_a_batch_is_cancelled_while_no_engine_is_up(tmp_path: Path) -> None:
    engine = StubEngine()
    engine.gate.clear()
    async with routing([engine], tmp_path) as router:
        batch_id = await create_batch(router, lines_of(20))
        await until(lambda: engine.seen)
        await engine.die()
        await router.until_status(engine, "down")
        async with router.http.post(f"/v1/batches/{batch_id}/cancel") as response:
            assert response.status == 200
        batch, results = await ended(router, batch_id)
        assert batch["status"] == "cancelled"
        assert [each["error"]["code"] for each in results] == ["batch_cancelled"] * 20


async def test_the_metrics_and_the_windows_of_batches_need_no_engine(tmp_path: Path) -> None:
    async with sharing(tmp_path) as (router, _):
        batch_id = await create_batch(router, lines_of(20))
        async with asyncio.timeout(TIMEOUT_S):
            while await router.metric('batch_jobs{model_name="m",status="validating"}') != 1:
                await asyncio.sleep(0.05)
        assert await router.metric("batch_deadline_slack_seconds") > 3600
        with closing(sqlite3.connect(tmp_path / "router" / "jobs.db")) as database, database:
            database.execute("UPDATE batches SET expires_at = created_at")
        batch, results = await ended(router, batch_id)
        assert batch["status"] == "expired"
        assert [each["error"]["code"] for each in results] == ["batch_expired"] * 20
        assert await router.metric('batch_lines_total{model_name="m",outcome="expired"}') == 20


@pytest.mark.parametrize("order", ["blend", "fcfs"])
async def test_a_line_is_read_once_and_lines_of_a_shorter_file_are_missed(
    tmp_path: Path, order: OrderName
) -> None:
    path = tmp_path / "lines.jsonl"
    texts = ["\ufeff" + json.dumps(lines_of(1)[0]), "", *(json.dumps(line) for line in lines_of(40)[1:])]
    path.write_text("\n".join(texts), encoding="utf-8")
    reader = RoutedReader(order)
    selection = LineSelection(path=str(path), max_line_bytes=1000, owner="alice", done=bytes([1 << 4]))
    lines = reader.open_lines(selection)
    found = [line for _ in range(8) for _, line in await lines.read(5)]
    assert all(isinstance(line, RoutedLine) and line.owner == "alice" for line in found)
    assert sorted(line.custom_id for line in found) == sorted(f"c{n}" for n in range(40) if n != 2)
    assert await lines.read(5) == []
    lines.end(found[0].number, 3)
    lines.end(found[1].number, None)
    lines = reader.open_lines(selection)
    await lines.read(1)
    path.write_text(texts[0])
    with pytest.raises(InputChanged):
        await lines.read(60)


async def test_leases_plan_so_many_bytes_of_prompts_together(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    prompts = ["b", "a"] * 20
    path.write_text("".join(json.dumps(line) + "\n" for line in map(line_of, range(40), prompts)))
    reader = RoutedReader("dfs")
    reader._planned = PlannedBytes(path.stat().st_size)
    selection = LineSelection(path=str(path), max_line_bytes=1000)

    async def order_of(lines: RoutedLines) -> list[str]:
        return [line.custom_id for _, line in await lines.read(40)]

    in_file = [f"c{number}" for number in range(40)]
    first = reader.open_lines(selection)
    assert await order_of(first) != in_file
    second = reader.open_lines(selection)
    assert await order_of(second) == in_file, "the first has all"
    for number in range(1, 41):
        first.end(number, 1)
    third = reader.open_lines(selection)
    assert await order_of(third) != in_file, "lines that have ended have none"
    third.close()
    assert await order_of(reader.open_lines(selection)) != in_file


@pytest.mark.parametrize(("order", "lengths"), [("blend", [6, 1]), ("dfs", [])])
async def test_an_order_by_lengths_is_told_those_of_a_choice_of_lines_that_ended(
    tmp_path: Path, order: OrderName, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, added = tmp_path / "lines.jsonl", list[PoolRequest]()
    bodies = [completion_line(f"c{n}", "a prompt", model=None, max_tokens=9, n=3) for n in range(3)]
    path.write_text("".join(json.dumps(line) + "\n" for line in bodies))
    selection = LineSelection(
        path=str(path), max_line_bytes=1000, done=bytes([0b110]), observed={1: 18, 2: 2}
    )
    lines = RoutedReader(order).open_lines(selection)
    monkeypatch.setattr(lines._pool, "add", added.extend)
    assert [line.number for _, line in await lines.read(3)] == [3]
    assert [each.observed_output_tokens for each in added if each.observed_output_tokens] == lengths
    finish = Mock()
    monkeypatch.setattr(lines._pool, "finish", finish)
    lines.end(3, 12)
    finish.assert_called_once_with(3, 4)


def line_of(number: int, prompt: str) -> dict[str, Any]:
    return completion_line(f"c{number}", prompt * 100, model=None, max_tokens=1)
