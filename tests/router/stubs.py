"""Engines without a model, and a router in front of them, in one event loop."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from backfill.http.config import ServerConfig
from backfill.http.keys import ApiKeys
from backfill.jobs.config import JobsConfig
from backfill.protocol.replica_state import ReplicaState
from backfill.router.config import RouterConfig
from backfill.router.engines import Engines
from backfill.router.server import RouterServer
from tests.api.sockets import ending_at_once
from tests.patience import TIMEOUT_S, until

COMPLETIONS = "/v1/completions"


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n"


@dataclass(eq=False)
class StubEngine:
    """Answers each completion with its prompt's words; a stream, word by word.

    Attributes:
        gate: no word is sent while it is cleared; the first one is sent without it if ``sends_first``.
        seen: headers and bodies of the requests that came.
        runs: requests that were answered to the end, by prompt.
        num_left: requests that their client left.
        hangs: it does not show its state; num_hanging counts who asked.
        num_failing_looks: so many times it answers 503 instead.
        status: of the answers to all requests, if it is not 200.
        store: id of the store that it says it shares.
        load: further fields of its state.
    """

    models: tuple[str, ...] = ("m",)
    digest: str = "d"
    max_num_seqs: int = 4
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    sends_first: bool = False
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    seen: list[tuple[dict[str, str], dict[str, Any]]] = field(default_factory=list)
    runs: Counter[str] = field(default_factory=Counter)
    num_left: int = 0
    hangs: bool = False
    num_hanging: int = 0
    num_failing_looks: int = 0
    load: dict[str, Any] = field(default_factory=dict)
    store: str = ""
    instance: int = 0
    port: int = 0
    _runner: web.AppRunner | None = None

    def __post_init__(self) -> None:
        self.gate.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> StubEngine:
        """Listen, on the same port as before."""
        self.instance += 1
        app = web.Application()
        app.router.add_get("/state", self._state)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/{rest:.*}", self._show_path)
        app.router.add_post(COMPLETIONS, self._complete)
        # aiohttp takes 0 for no timeout, and waits without end.
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def die(self) -> None:
        """Reset all connections, and listen no more."""
        if self._runner is None:
            return
        runner, self._runner = self._runner, None
        assert runner.server is not None
        for connection in list(runner.server.connections):
            transport = connection.transport
            if transport is not None:
                transport.abort()
        await runner.cleanup()

    async def _state(self, request: web.Request) -> web.Response:
        if self.num_failing_looks > 0:
            self.num_failing_looks -= 1
            return web.Response(status=503)
        self.num_hanging += self.hangs
        while self.hangs:
            await asyncio.sleep(0.01)
        if self._runner is None and request.transport is not None:
            request.transport.abort()  # it was accepted while the engine died
        state = ReplicaState(
            instance=str(self.instance),
            phase="ready",
            models=self.models,
            digest=self.digest,
            max_num_seqs=self.max_num_seqs,
            max_model_len=1000,
            kv_tokens=100_000,
            ttft_slo_s=1.0,
            prefill_tokens_per_s=1e5,
            store=self.store,
            **self.load,
        )
        return web.Response(body=msgspec.json.encode(state))

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.models[0]}]})

    async def _show_path(self, request: web.Request) -> web.Response:
        return web.json_response({"path": request.raw_path})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append(({name.lower(): value for name, value in request.headers.items()}, body))
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status, headers=self.headers)
        try:
            if body.get("stream"):
                return await self._stream(request, body["prompt"])
            await self.gate.wait()
        except (asyncio.CancelledError, ConnectionError):
            self.num_left += 1
            raise
        self.runs[body["prompt"]] += 1
        usage = {"prompt_tokens": 2, "completion_tokens": 1}
        answer = {"choices": [{"text": body["prompt"]}], "usage": usage}
        return web.json_response(answer, headers=self.headers)

    async def _stream(self, request: web.Request, prompt: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream", **self.headers})
        words = prompt.split()
        if self.sends_first:
            await response.prepare(request)
            await response.write(event(words.pop(0)) + b"data: half of an ev")
        await self.gate.wait()
        await response.prepare(request)
        for word in words:
            await response.write(event(word))
        await response.write(b"data: [DONE]\n\n")
        self.runs[prompt] += 1
        return response


@dataclass(frozen=True)
class RunningRouter:
    url: str
    engines: Engines
    http: aiohttp.ClientSession

    async def metric(self, name: str) -> float:
        """Sum of its samples."""
        async with self.http.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"backfill:{name}"))

    async def show(self, path: str) -> Any:
        async with self.http.get(path) as response:
            return await response.json()

    async def status_of(self, engine: StubEngine) -> str | None:
        engines = (await self.show("/router/engines"))["data"]
        return next((each["status"] for each in engines if each["url"] == engine.url), None)

    async def until_status(self, engine: StubEngine, status: str | None) -> None:
        async def has_status() -> bool:
            return await self.status_of(engine) == status

        await until(has_status)


@asynccontextmanager
async def routing(
    engines: Sequence[StubEngine],
    data_dir: Path | None = None,
    api_keys: Sequence[str] = (),
    allowed_hosts: Sequence[str] = (),
    api_key_file: Path | None = None,
    **options: Any,
) -> AsyncIterator[RunningRouter]:
    """A router in front of engines, which are started and ended.

    Args:
        data_dir: of batches; None switches them off.
        options: fields of ``RouterConfig``.
    """
    for engine in engines:
        if not engine.port:  # else it was started, or is to be found missing
            await engine.start()
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    ready: asyncio.Future[Engines] = asyncio.get_running_loop().create_future()
    values: dict[str, Any] = {"poll_interval": 0.02, "engine_timeout": TIMEOUT_S, **options}
    server = RouterServer(
        ServerConfig(shutdown_timeout=0.0, api_key=tuple(api_keys), allowed_hosts=tuple(allowed_hosts)),
        RouterConfig(engines=tuple(engine.url for engine in engines), **values),
        url=url,
        api_keys=ApiKeys(api_keys, api_key_file) if api_keys else None,
        jobs_config=None
        if data_dir is None
        else JobsConfig(data_dir=data_dir, batch_min_free_gib=0.0).for_several_servers(),
        on_ready=ready.set_result,
    )
    with ending_at_once():
        task = asyncio.create_task(server.serve(listener))
        try:
            await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
            async with aiohttp.ClientSession(url, timeout=timeout) as http:
                yield RunningRouter(url, ready.result(), http)
        finally:
            server.stop()
            try:
                await task
            finally:
                for engine in engines:
                    await engine.die()
                listener.close()
