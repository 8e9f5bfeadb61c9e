"""Two engines of the small model for all tests of the library: one for LLM, one for AsyncLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backfill import LLM, AsyncLLM
from backfill.core.request import Request
from tests.api.servers import SMALL_MODEL, quick_profile


@pytest.fixture(scope="package")
def llm(small_model: Path) -> Iterator[LLM]:
    sizes = {"kv_gib": 0.01, "max_model_len": 256, "max_num_seqs": 8}
    with LLM(str(small_model), dtype="float32", threads=1, **sizes) as llm:
        yield llm


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """The event loop of a module's AsyncLLM."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def async_llm(runner: asyncio.Runner, small_model: Path) -> Iterator[AsyncLLM]:
    profile = quick_profile(str(small_model), *SMALL_MODEL[:4])
    llm = AsyncLLM(str(small_model), dtype="float32", threads=1, kv_gib=0.05, profile=profile)
    runner.run(llm.start())
    yield llm
    runner.run(llm.shutdown())


def requests_to(llm: LLM | AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """The requests that reach the engine's client from now on."""
    client, requests = llm._engine.client, []
    generate = client.generate

    def note(request: Request, **options: Any) -> Any:
        requests.append(request)
        return generate(request, **options)

    monkeypatch.setattr(client, "generate", note)
    return requests
