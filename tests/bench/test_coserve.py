"""Online and offline load on a server at once."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from backfill.bench.client import Endpoint
from backfill.bench.coserve import CoserveRun, Status, run_coserve
from backfill.bench.coserve_figures import figures_of, timeline_of
from backfill.bench.coserve_load import CoserveLoad, OfflineMode
from backfill.bench.offline import BatchLoad
from backfill.core.errors import ConfigError
from tests.api.servers import TIMEOUT_S
from tests.bench.fake_server import FakeServer
from tests.patience import with_more_time

LOAD = CoserveLoad(
    duration=1.5,
    warmup=0.5,
    rate=8.0,
    input_len="4",
    output_len="3",
    offline_input_len="20:30",
    offline_output_len="5:9",
    offline_concurrency=4,
    offline_lines=5,
    drain_timeout=1.0,
)
# For what does not depend on how many requests there are.
BRIEF = dataclasses.replace(LOAD, duration=0.25, warmup=0.1, rate=16.0)
# Until the test ends it; the first four requests are of the warm-up.
ENDLESS = dataclasses.replace(LOAD, duration=100.0, warmup=0.1, rate=40.0)


def coserve(
    server: FakeServer,
    load: CoserveLoad = LOAD,
    meanwhile: Callable[[asyncio.Event], Coroutine[Any, Any, None]] | None = None,
    **options: Any,
) -> CoserveRun:
    async def run() -> CoserveRun:
        stop = asyncio.Event()
        async with server.running():
            endpoint = Endpoint(server.url, "/v1/completions", "", ignore_eos=True)
            task = None if meanwhile is None else asyncio.create_task(meanwhile(stop))
            try:
                return await run_coserve(endpoint, load, stop=stop, **options)
            finally:
                if task is not None:
                    await task

    return asyncio.run(run())


async def num_online(server: FakeServer, count: int) -> None:
    """Wait until so many online requests came."""
    while sum(body["max_tokens"] == 3 for body in server.bodies) < count:
        await asyncio.sleep(0.01)


def with_mode(mode: OfflineMode) -> CoserveLoad:
    return dataclasses.replace(LOAD, offline_mode=mode)


def slowed(factor: float, load: CoserveLoad = LOAD) -> CoserveLoad:
    """The same requests in so much more time."""
    names = ("duration", "warmup", "drain_timeout")
    times = {name: factor * getattr(load, name) for name in names}
    return dataclasses.replace(load, **times, rate=load.rate / factor)


def slow_server(factor: float, **options: Any) -> FakeServer:
    return FakeServer(gap_s=0.01 * factor, offline_s=0.05 * factor, **options)


def test_both_classes_are_sent_and_counted() -> None:
    with_more_time(check_counts)


def check_counts(factor: float) -> None:
    server, load = slow_server(factor), slowed(factor)
    run = coserve(server, load)
    online = [body for body in server.bodies if body.get("stream") and body["max_tokens"] == 3]
    offline = [body for body in server.bodies if not body.get("stream")]
    assert run.status is Status.COMPLETE
    assert len(online) == 16 and all(body["ignore_eos"] for body in online + offline)
    assert {body["service_tier"] for body in offline} == {"flex"}
    assert not any("priority" in body or "service_tier" in body for body in online)
    assert server.most_offline == 4
    figures = figures_of(run)
    assert figures.num_online == sum(r.due_at_s >= load.warmup for r in load.online_requests())
    assert (figures.failed, figures.unfinished, figures.offline_failed) == (0, 0, 0)
    assert figures.tokens_from == "server" and figures.errors == {}
    assert figures.offline_tok_s == pytest.approx(4 * 32 / (0.05 * factor), rel=0.4)
    # What the client alone knows of completed requests agrees with the server's counters.
    alone = run.offline.tokens_between(load.warmup, run.ended_at_s)
    assert alone == pytest.approx((figures.offline_tok_s or 0.0) * figures.measured_s, rel=0.15)
    assert figures.online_tok_s == pytest.approx(8 * 7 / factor, rel=0.35)
    assert figures.total_tok_s == pytest.approx((figures.online_tok_s or 0) + (figures.offline_tok_s or 0))
    assert figures.recomputed_token_share == 0.0 and figures.discarded_token_share is None
    assert len(timeline_of(run).ttfts) == 16


def test_seconds_of_which_a_hypervisor_took_much_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backfill.bench.coserve._STOLEN_INTERVAL_S", 0.05)
    # Much before the run, some in the second interval, and much in the fourth. An interval may be a late one.
    taken_s = itertools.chain([7.0, 7.0, 7.002, 7.002], itertools.repeat(8000.0))
    ((start_s, end_s),) = coserve(FakeServer(), BRIEF, stolen_s=lambda: next(taken_s)).stolen
    assert 0.15 <= start_s <= end_s - 0.05


def test_no_offline_load_at_all() -> None:
    server = FakeServer()
    figures = figures_of(coserve(server, dataclasses.replace(BRIEF, offline_mode="none")))
    assert all(body.get("stream") for body in server.bodies)
    assert figures.offline_tok_s == 0.0 and figures.total_tok_s == figures.online_tok_s


def test_priorities_as_vllm_reads_them_and_no_metrics() -> None:
    with_more_time(check_priorities)


def check_priorities(factor: float) -> None:
    server = slow_server(factor, has_metrics=False)
    load = dataclasses.replace(LOAD, duration=1.0, warmup=0.25, offline_mode="priority")
    figures = figures_of(coserve(server, slowed(factor, load)))
    priorities = {(bool(body.get("stream")), body["priority"]) for body in server.bodies}
    assert priorities == {(True, 0), (False, 1)}
    assert figures.tokens_from == "client" and figures.recomputed_token_share is None
    assert figures.offline_tok_s == pytest.approx(4 * 32 / (0.05 * factor), rel=0.4)


def test_batches_of_other_lines_follow_until_the_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backfill.bench.offline._POLL_S", 0.1)
    with_more_time(check_batches)


def check_batches(factor: float) -> None:
    server = FakeServer(has_metrics=False, batch_lines=3)
    load = dataclasses.replace(with_mode("batch"), duration=0.75 * factor, warmup=0.25)
    run = coserve(server, load)
    assert len(server.batches) >= 2
    lines = [line["body"] for file in server.files for line in file]
    assert len(lines) == 5 * len(server.batches)
    assert len({tuple(body["prompt"]) for body in lines}) == len(lines)
    assert lines[0]["max_tokens"] in range(5, 10)
    files = [f"file-{number + 1}" for number in range(len(server.batches))]
    assert [batch["input_file_id"] for batch in server.batches.values()] == files
    assert {batch["status"] for batch in server.batches.values()} <= {"completed", "cancelled"}
    assert server.deleted == files
    figures = figures_of(run)
    assert figures.offline_completed > 5 and figures.tokens_from == "client"
    assert 0 < (figures.offline_tok_s or 0) < 10 * figures.offline_completed


def test_a_server_that_is_gone_leaves_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backfill.bench.coserve._SAMPLE_S", 0.1)
    monkeypatch.setattr("backfill.bench.coserve._RETRY_S", 0.1)
    server = FakeServer()

    async def die(_: asyncio.Event) -> None:
        await num_online(server, 12)
        await server.die()

    run = coserve(server, ENDLESS, die)
    figures = figures_of(run)
    assert run.status is Status.SERVER_LOST and figures.status == "server lost"
    assert figures.num_online < 40 * 100


def test_stopping_leaves_what_was_measured() -> None:
    server = FakeServer()

    async def soon(stop: asyncio.Event) -> None:
        await num_online(server, 12)
        stop.set()

    figures = figures_of(coserve(server, dataclasses.replace(ENDLESS, ttft_slo=100.0), soon))
    assert figures.status == "interrupted"
    assert 0 < figures.measured_s < 100 and figures.num_online > 0
    assert figures.ttft_attainment == 1.0


def test_requests_without_a_token_count_with_what_they_waited() -> None:
    load = dataclasses.replace(BRIEF, drain_timeout=0.3, ttft_slo=0.2, offline_mode="none")
    figures = figures_of(coserve(_Silent(), load))
    assert figures.unfinished == figures.num_online and figures.ttft_attainment == 0.0
    assert 0.3 < (figures.ttft_p50_s or 0.0) < 30 and figures.itl_p99_s is None


class _Silent(FakeServer):
    """Answers only the request that asks whether it is ready."""

    async def _complete(self, request: Any) -> Any:
        if (await request.json())["max_tokens"] != 2:
            await asyncio.sleep(TIMEOUT_S)
        return await super()._complete(request)


@pytest.mark.parametrize(
    ("mode", "message"), [("batch", "The server takes no batch: HTTP 404: no batches here.")]
)
def test_a_refused_batch_ends_the_run(mode: OfflineMode, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        coserve(FakeServer(refuses=404), with_mode(mode))


def test_refused_offline_requests_are_counted_and_not_hammered() -> None:
    figures = figures_of(coserve(FakeServer(refuses=429), BRIEF))
    assert 4 <= figures.offline_failed <= 4 * 8
    assert figures.errors == {"HTTP 429: no": figures.offline_failed}
    assert figures.failed == 0


def test_requests_beyond_the_context_are_refused_before_they_are_sent() -> None:
    server = FakeServer()
    load = dataclasses.replace(LOAD, offline_input_len="4000:4095")
    with pytest.raises(ConfigError, match="up to 4104 tokens, more than the server's context of 4096"):
        coserve(server, load)
    assert server.bodies == []


def test_a_batch_that_is_created_as_the_run_ends_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled: list[str] = []

    class Api:
        """Answers the creation only once the run has ended."""

        def __init__(self, *args: object, **options: object) -> None: ...

        async def __aenter__(self) -> Api:
            return self

        async def __aexit__(self, *_: object) -> None: ...

        async def call(self, method: str, path: str, body: object = None) -> dict[str, Any]:
            if path == "/v1/batches":
                asked.set()
                await may_answer.wait()
                return {"id": "b1", "status": "validating"}
            if path.endswith("/cancel"):
                cancelled.append(path)
            return {"id": "f1", "status": "cancelled"}

    async def run() -> None:
        load = BatchLoad(LOAD, Endpoint("http://x", "/v1/completions", "m"))
        unused: Any = None
        running = asyncio.create_task(load.run(unused))
        await asyncio.wait_for(asked.wait(), 60)
        running.cancel()
        await asyncio.sleep(0)
        may_answer.set()
        await asyncio.wait([running])
        await load.finish()

    monkeypatch.setattr("backfill.bench.offline.ServerApi", Api)
    asked, may_answer = asyncio.Event(), asyncio.Event()
    asyncio.run(run())
    assert cancelled == ["/v1/batches/b1/cancel"]
