"""The whole application over real sockets, with a scripted engine."""

from __future__ import annotations

import asyncio
import functools
import math
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import httpx
from fastapi import FastAPI

from backfill.api.app import create_app
from backfill.api.metrics.registry import Metrics
from backfill.api.replica_state import StateReporter
from backfill.api.state import Phase, ServerState
from backfill.core.clock import Clock
from backfill.core.config import EngineConfig, SchedulerConfig
from backfill.core.request import FinishReason, Request, ServiceClass
from backfill.core.slo import SLO
from backfill.engine.client import EngineClient
from backfill.engine.messages import TokenOutput
from backfill.generation.generator import TextGenerator
from backfill.generation.tokenizer import Tokenizer
from backfill.http.config import ServerConfig
from backfill.http.keys import ApiKeys
from backfill.jobs.manager import JobManager
from backfill.models.generation_config import GenerationDefaults
from backfill.preparation.client import PreparationClient
from backfill.protocol.generation import Generation, GenerationEndpoint
from backfill.protocol.preparer import EngineFacts, RequestContext, RequestPreparer, ServedModel, TextEndpoint
from backfill.protocol.service import CompletionService
from tests.api.servers import KEEP_ALIVE, TIMEOUT_S
from tests.api.sockets import limits, serving
from tests.builders import make_info


class ScriptedEngine:
    """Yields ``max_tokens`` times token 5 for each request, once ``may_end`` is set.

    Attributes:
        num_running: requests that have not ended.
        prompts: the prompts of all requests, by arrival.
        requests: all requests, by arrival.
        num_cached_tokens: what it reports of every request.
        num_allowed: tokens of each request that may come.
    """

    def __init__(self) -> None:
        self.info = make_info(num_blocks=1024, block_size=16)
        self.may_end = threading.Event()
        self.num_running = 0
        self.prompts: list[list[int]] = []
        self.requests: list[Request] = []
        self.num_cached_tokens = 0
        self.num_allowed = math.inf

    async def generate(
        self,
        request: Request,
        *,
        on_first_token: Callable[[], None] | None = None,
        on_end: Callable[[], None] | None = None,
        **_: object,
    ) -> AsyncGenerator[TokenOutput, None]:
        self.prompts.append(list(request.prompt_token_ids))
        self.requests.append(request)
        self.num_running += 1
        try:
            while not self.may_end.is_set():
                await asyncio.sleep(0.005)
            if on_first_token is not None:
                on_first_token()
        finally:
            self.num_running -= 1
            if on_end is not None:
                on_end()
        max_tokens = request.sampling.max_tokens
        for number in range(1, max_tokens + 1):
            while number > self.num_allowed:
                await asyncio.sleep(0.005)
            reason = FinishReason.LENGTH if number == max_tokens else None
            num_cached = self.num_cached_tokens if number in (1, max_tokens) else 0
            yield TokenOutput(request.request_id, 5, finish_reason=reason, num_cached_tokens=num_cached)


class InlinePreparation:
    """Prepares large bodies in the server process.

    Attributes:
        held: a body that contains these bytes is never prepared; None prepares all.
        num_held: bodies that wait.
    """

    def __init__(self, preparer: RequestPreparer) -> None:
        self._preparer = preparer
        self.held: bytes | None = None
        self.num_held = 0

    is_up, num_deaths = True, 0

    async def prepare(
        self, endpoint: GenerationEndpoint, body: bytes, context: RequestContext, service_class: ServiceClass
    ) -> Generation:
        await self._wait_if_held(body)
        return self._preparer.prepare(endpoint, body, context)

    async def answer(self, endpoint: TextEndpoint, body: bytes, owner: str) -> bytes:
        await self._wait_if_held(body)
        return self._preparer.answer(endpoint, body)

    async def _wait_if_held(self, body: bytes) -> None:
        if self.held is None or self.held not in body:
            return
        self.num_held += 1
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.num_held -= 1


@functools.cache
def _tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_folder(model)


class InProcessServer:
    """A ready state and its address."""

    def __init__(
        self, port: int, state: ServerState, engine: ScriptedEngine, preparation: InlinePreparation
    ) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.state = state
        self.engine = engine
        self.preparation = preparation
        self.http = httpx.Client(base_url=self.url, timeout=TIMEOUT_S, limits=KEEP_ALIVE, verify=False)


def unstarted_app(api_keys: ApiKeys | None = None, jobs: JobManager | None = None, **config: Any) -> FastAPI:
    """An application without an engine. ``config``: fields of ``ServerConfig``."""
    engine = cast(EngineClient, None)
    preparation = cast(PreparationClient, None)
    reporter = StateReporter((), Path())
    state = ServerState(ServerConfig(**config), EngineConfig(model_dir=""), engine, preparation, reporter)
    state.api_keys, state.jobs = api_keys, jobs
    return create_app(state)


@contextmanager
def in_process_server(
    model: Path,
    *,
    max_num_seqs: int = 2,
    connection: dict[str, float] | None = None,
    is_open: bool = True,
    tokenizer: Tokenizer | None = None,
    api_keys: Sequence[str] = (),
    clock: Clock | None = None,
    **config: Any,
) -> Iterator[InProcessServer]:
    """Serve with a scripted engine.

    Args:
        connection: fields of ``ConnectionLimits``.
        is_open: the engine answers requests from the start.
        tokenizer: None takes the model's.
        api_keys: values of ``--api-key``.
        clock: that latencies are measured by; None for the machine's.
        config: fields of ``ServerConfig``.
    """
    engine_config = EngineConfig(model_dir=str(model), scheduler=SchedulerConfig(max_num_seqs=max_num_seqs))
    engine = ScriptedEngine()
    if is_open:
        engine.may_end.set()
    client = cast(EngineClient, engine)
    served = ServedModel(names=("m",), root=str(model), folder=model, created=0)
    tokenizer = tokenizer or _tokenizer(model)
    server_config = ServerConfig(**config)
    preparer = RequestPreparer(
        served,
        tokenizer,
        GenerationDefaults(),
        max_response_tokens=server_config.max_response_tokens,
        is_strict=server_config.strict,
    )
    preparer.facts = EngineFacts(
        info=engine.info, default_slo=SLO(1.0, 0.15), profile=None, scheduler=engine_config.scheduler
    )
    preparation = InlinePreparation(preparer)
    state = ServerState(
        server_config,
        engine_config,
        client,
        cast(PreparationClient, preparation),
        StateReporter(served.names, model),
        preparer,
        Phase.READY,
    )
    state.clock = clock or state.clock
    if api_keys:
        state.api_keys = ApiKeys(api_keys, server_config.api_key_file)
    state.metrics = Metrics("m", engine.info, slo=SLO(1.0, 0.15))
    generator = TextGenerator(client, tokenizer, state.metrics.requests, state.clock)
    state.service = CompletionService(tokenizer, generator)
    with serving(
        create_app(state), limits(**(connection or {})), send_buffer_bytes=8192, clock=state.clock
    ) as port:
        server = InProcessServer(port, state, engine, preparation)
        with server.http:
            yield server
