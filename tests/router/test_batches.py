from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from backfill.router.engines import EngineRefused
from tests.router.stubs import StubEngine, routing


def test_a_router_without_a_store_says_what_batches_need() -> None:
    async def run() -> None:
        async with routing([StubEngine()]) as router:
            for path in ("/v1/files", "/v1/batches/batch_1"):
                async with router.http.get(path) as response:
                    assert response.status == 501
                    assert "--batch-database-url" in (await response.json())["error"]["message"]

    asyncio.run(run())


def test_an_engine_that_does_not_share_the_store_is_refused(tmp_path: Path) -> None:
    async def run() -> None:
        with pytest.raises(EngineRefused, match="does not share the router's files and batches"):
            async with routing([StubEngine()], tmp_path):
                raise AssertionError("the router has started")

    asyncio.run(run())
