"""``backfill router`` and ``backfill serve --data-parallel-size``, as a user runs them."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import ssl
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import trustme
from aiohttp import web

from backfill.cli.startup import bind
from backfill.core.clock import WallClock
from backfill.core.errors import ConfigError
from backfill.router.looks import EngineRefused
from backfill.router.metrics import RouterMetrics
from backfill.router.replicas import ReplicaFailed, ReplicaProcess, Replicas
from tests.api.batch_inputs import as_jsonl, completion_line, submit, wait_ended
from tests.api.servers import launch_small, wait_until
from tests.cli.running import assert_refused, run_cli_here
from tests.patience import with_more_time
from tests.router.processes import wait_for_a_signal
from tests.router.stubs import COMPLETIONS, TIMEOUT_S, StubEngine, routing
from tests.test_docs import ROOT

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ((), "--engines is needed"),
        (("--engines", "10.0.0.1:8000"), "--engines must be the URL of a Backfill server, such as http://"),
        (("--engines", "http://host/path"), "--engines must be a URL without a path"),
        (("--engines", "http://host:port"), "--engines must be the URL"),
        (("--engines", "http://host", "--policy", "best"), "--policy must be slo, round-robin"),
        (("--engines", "http://me:secret@host"), "--engines must be a URL without a user, got one of 'host'"),
        (("--engines", "http://me:secret@host:port"), "--engines must be a URL without a user, got one of"),
        (("--engines", "http://host", "--admin-key", "sec ret"), "--admin-key must be printable ASCII"),
        (
            ("--engines", "http://host", "--engine-api-key", "secret", "--host", "0.0.0.0"),
            "--engine-api-key needs --api-key or --api-key-file where the router listens on 0.0.0.0",
        ),
        (("--engines", "http://host", "--engine-timeout", "inf"), "--engine-timeout must be finite"),
        (("--engines", "http://host", "--poll-interval", "0"), "--poll-interval must be above 0"),
        (("--engines", "http://host", "--retry-timeout", "-1"), "--retry-timeout must be at least 0"),
        (
            ("--engines", "http://host", "--batch-database-url", "mysql://a/b"),
            "--batch-database-url must be a URL of SQLite or PostgreSQL, got one of mysql",
        ),
    ],
)
def test_bad_options_of_the_router_are_refused(tmp_path: Path, arguments: tuple[str, ...], part: str) -> None:
    options = ("--port", "0", "--data-dir", str(tmp_path))
    refused = run_cli_here("router", *arguments, *options)
    assert_refused(refused, part)
    assert "secret" not in refused.stderr


@pytest.mark.parametrize("size", ["0", "65", "-1"])
def test_a_bad_number_of_replicas_is_refused(size: str) -> None:
    part = "--data-parallel-size must be between 1 and 64"
    assert_refused(run_cli_here("serve", "--data-parallel-size", size), part)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--tensor-parallel-size", "5"), "--tensor-parallel-size 5: the model has 4 attention heads"),
        (("--pipeline-parallel-size", "99"), "--pipeline-parallel-size 99: the model has 4 layers; use 1 to"),
        (("--threads", "100000"), "--threads must be at most"),
        (("--profile", "/no/such/profile"), "/no/such/profile cannot be read"),
        (("--chat-template", "/no/such/template"), "/no/such/template"),
        (
            ("--batch-database-url", "postgresql://user:secret@127.0.0.1:1/jobs"),
            "the database postgresql://user:***@127.0.0.1:1/jobs cannot be opened",
        ),
        (
            ("--batch-database-url", "postgresql://u:secret@host:port/x"),
            "--batch-database-url is no database URL that can be used: its port is no number",
        ),
        (
            ("--batch-database-url", "postgresql://u:p@secret:word@host/x"),
            "--batch-database-url is no database URL that can be used: its port is no number",
        ),
        (
            ("--batch-database-url", "postgresql://u:p@secret@host/x"),
            "--batch-database-url is no database URL that can be used: it has more than one @",
        ),
        (("--batch-file-store", "ftp://a/b"), "--batch-file-store must be a folder or s3://"),
        (("--model", "/no/such/model"), "no model '/no/such/model'"),
    ],
)
def test_what_is_wrong_for_all_replicas_is_refused_before_one_starts(
    small_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    part: str,
) -> None:
    def start(self: object) -> None:
        raise AssertionError("a replica was started")

    monkeypatch.setattr(ReplicaProcess, "start", start)
    options = ("--data-parallel-size", "2", "--port", "0", "--data-dir", str(tmp_path))
    refused = run_cli_here("serve", "--model", str(small_model), *options, *arguments)
    assert_refused(refused, part)
    assert "secret" not in refused.stderr


def refusal_of(*engines: StubEngine, **options: float) -> str:
    """Why no router starts in front of these engines."""

    async def run() -> str:
        with pytest.raises(EngineRefused) as error:
            async with routing(engines, **options):
                raise AssertionError("the router has started")
        return str(error.value)

    return asyncio.run(run())


def test_engines_that_cannot_join_are_named_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    first, other = StubEngine(), StubEngine(models=("another",))
    message = refusal_of(first, other)
    assert f"{first.url} has m" in message and f"{other.url} has another" in message
    assert "another configuration or other weights" in refusal_of(StubEngine(), StubEngine(digest="e"))
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        dead = StubEngine(port=nobody.getsockname()[1])
        caplog.set_level("INFO")

        def check(factor: float) -> None:
            assert f"{dead.url} cannot be reached" in refusal_of(dead, engine_timeout=0.1 * factor)
            told = f" s for {dead.url} to start: "
            assert any(told in line for line in caplog.messages)
            caplog.clear()
            refusal_of(dead, join_timeout=0.1 * factor)
            assert not any(told in line for line in caplog.messages), "whoever starts it knows"

        with_more_time(check)


def test_an_engine_that_speaks_no_tls_is_named_with_that_reason() -> None:
    class Plain(StubEngine):
        @property
        def url(self) -> str:
            return super().url.replace("http:", "https:")

    def check(factor: float) -> None:
        assert re.search("cannot be reached: .*SSL", refusal_of(Plain(), engine_timeout=0.5 * factor))

    with_more_time(check)


def test_an_engine_that_speaks_tls_alone_is_named_with_its_https_url() -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)

    async def run(engine_timeout: float) -> tuple[str, str]:
        async with await asyncio.start_server(lambda *_: None, "127.0.0.1", ssl=context) as server:
            engine = StubEngine(port=server.sockets[0].getsockname()[1])
            with pytest.raises(EngineRefused) as error:
                async with routing([engine], engine_timeout=engine_timeout):
                    raise AssertionError("the router has started")
            return str(error.value), engine.url

    def check(factor: float) -> None:
        message, url = asyncio.run(run(0.5 * factor))
        assert f"if it speaks TLS, its URL is {url.replace('http:', 'https:')}." in message

    with_more_time(check)


def test_a_server_that_is_no_engine_is_refused() -> None:
    async def answer(status: int, engine_timeout: float) -> str:
        async def handle(request: web.Request) -> web.Response:
            return web.Response(status=status, text="hello")

        app = web.Application()
        app.router.add_get("/state", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            with pytest.raises(EngineRefused) as error:
                async with routing([StubEngine(port=runner.addresses[0][1])], engine_timeout=engine_timeout):
                    raise AssertionError("the router has started")
            return str(error.value)
        finally:
            await runner.cleanup()

    def check(factor: float) -> None:
        for status, part in (
            (404, "is not a Backfill server"),
            (
                200,
                "is not a Backfill server, or one of another version: its /state is not understood: JSON is ",
            ),
            (401, "asks for an API key: give the router --engine-api-key"),
            (502, "cannot be reached: it answers with status 502"),
        ):
            assert part in asyncio.run(answer(status, 0.1 * factor))

    with_more_time(check)


async def pid_in(path: Path, other_than: int = 0) -> int:
    async with asyncio.timeout(TIMEOUT_S):
        while not (path.exists() and (text := path.read_text()) and int(text) != other_than):
            await asyncio.sleep(0.01)
    return int(text)


def replicas_writing(path: Path, fails: str = "") -> Replicas:
    return Replicas([ReplicaProcess(0, partial(wait_for_a_signal, str(path), fails))])


def test_the_port_of_a_replica_is_its_own(tmp_path: Path) -> None:
    replica = ReplicaProcess(0, partial(wait_for_a_signal, str(tmp_path), ""))
    for _ in range(2):  # of two of its processes
        with pytest.raises(ConfigError, match="in use"):
            bind("127.0.0.1", replica.port)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", replica.port))
        with bind("127.0.0.1", replica.port, shares_port=True) as listener:
            socket.create_connection(("127.0.0.1", replica.port)).close()
            listener.accept()[0].close()


async def test_a_replica_that_ends_is_started_again_and_ends_with_the_others(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    replicas = replicas_writing(path)
    replicas.start()
    keeping = asyncio.create_task(replicas.run())
    replicas.has_served()
    first = await pid_in(path)
    os.kill(first, signal.SIGKILL)
    second = await pid_in(path, other_than=first)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    await replicas.end()
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)


@pytest.mark.parametrize(
    ("fails", "reason"), [("", "Its process ended with exit code 7."), ("No memory.", "No memory.")]
)
async def test_a_replica_that_cannot_start_ends_the_command_with_its_reason(
    tmp_path: Path, fails: str, reason: str
) -> None:
    replicas = replicas_writing(tmp_path / "pid", fails or "silently")
    replicas.start()
    with pytest.raises(ReplicaFailed, match=f"^Replica 0: {re.escape(reason)}$"):
        await replicas.run()
    await replicas.end()


@pytest.mark.slow
def test_one_command_serves_with_two_engines_and_outlives_one(small_model: Path, tmp_path: Path) -> None:
    options = ("--data-parallel-size", "2", "--api-key", "alice=first", "--policy", "fcfs")
    server = launch_small(small_model, *options, data_dir=tmp_path)
    try:
        server.logged("server: starting on http://127.0.0.1:", " with 2 replicas; /health answers 503 until")
        server.logged(" with 2 replicas  (ready in ")
        server.logged("curl http://127.0.0.1:", "Authorization: Bearer $KEY")
        for number, process in product((0, 1), ("server", "engine")):
            server.logged(f" INFO replica {number} {process}: ")
        headers = {"authorization": "Bearer first"}
        body = {"prompt": "Why?", "max_tokens": 3, "ignore_eos": True}
        answer = server.http.post(COMPLETIONS, json=body, headers=headers)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 3
        assert server.metric("backfill:router_engine_up") == 2
        client = server.client("first")
        lines = [completion_line(f"c{number}", f"Line {number}", max_tokens=8) for number in range(40)]
        batch = submit(client, as_jsonl(lines), COMPLETIONS)
        os.kill(children_of(server.process.pid)[0], signal.SIGKILL)
        counts = wait_ended(client, batch.id).request_counts
        assert counts is not None and (counts.total, counts.completed, counts.failed) == (40, 40, 0)
        children = children_of(server.process.pid)
        assert server.stop() == 0
        for pid in children:
            wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), f"the end of {pid}")
    finally:
        server.kill()


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_the_metrics_of_the_router_are_those_documented() -> None:
    async def exposed() -> dict[str, str]:
        engine = StubEngine()
        async with routing([engine]) as router:
            metrics = RouterMetrics(router.engines, WallClock())
            return {
                family.name.removeprefix("backfill:") + "_total" * (family.type == "counter"): family.type
                for family in metrics.collect()
            }

    text = (ROOT / "docs" / "router.md").read_text()
    rows = re.findall(r"`(router_\w+)(?:\{[\w,]+\})?` \((gauge|counter|histogram)\)", text)
    assert dict(rows) == asyncio.run(exposed())
