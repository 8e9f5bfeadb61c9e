"""An engine process whose ranks end, as its client sees it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from backfill.core.config import EngineConfig
from backfill.core.errors import EngineDead
from backfill.engine.client import EngineClient
from tests.builders import make_request
from tests.parallel.fake_ranks import load_fake_engine
from tests.parallel.processes import TIMEOUT_S, children, wait_ended
from tests.patience import with_more_time

pytestmark = pytest.mark.anyio
TWO = EngineConfig(tensor_parallel_size=2)


@asynccontextmanager
async def started(config: EngineConfig = TWO) -> AsyncIterator[tuple[EngineClient, list[int]]]:
    """A client and its ranks, which must have ended after it."""
    client = EngineClient(config, load=load_fake_engine)
    try:
        await client.start()
        assert client.pid is not None
        ranks = children(client.pid)
        assert len(ranks) == 2
        async with asyncio.timeout(TIMEOUT_S):
            yield client, ranks
    finally:
        await client.stop()
    wait_ended(ranks)


async def generate(client: EngineClient, name: str, max_tokens: int = 4) -> int:
    request = make_request(2, max_tokens, request_id=name, ignore_eos=True)
    return len([output async for output in client.generate(request)])


@pytest.mark.slow  # its executor alone: test_executor.py
async def test_an_idle_engine_ends_with_a_rank_and_says_which() -> None:
    async with started() as (client, ranks):
        assert await generate(client, "a") == 4
        os.kill(ranks[1], signal.SIGKILL)
        await client.wait_dead()
        with pytest.raises(EngineDead):
            await generate(client, "b")


async def test_requests_learn_which_rank_has_ended() -> None:
    async with started() as (client, _):
        with pytest.raises(EngineDead, match=r"engine process ended: .*rank 1 of 2 was killed by signal 9"):
            await generate(client, "r1:kill")


def test_an_engine_whose_rank_hangs_is_killed_with_its_ranks() -> None:
    async def run(factor: float) -> None:
        async with started(replace(TWO, engine_hang_timeout=0.5 * factor)) as (client, ranks):
            match = r"stood still for .* rank 0 stands still before its first layer"
            with pytest.raises(EngineDead, match=match):
                await generate(client, "r0:hang")
            wait_ended(ranks)

    with_more_time(lambda factor: asyncio.run(run(factor)))
