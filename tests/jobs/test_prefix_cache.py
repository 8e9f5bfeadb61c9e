"""Owner, salt and cached tokens of a batch's lines, from its file to its results. The engine is scripted."""

from __future__ import annotations

from typing import Any

import pytest

from backfill.generation.generator import TextGenerator
from backfill.generation.timeline import Observer
from backfill.jobs.lines import ServiceRunner
from backfill.jobs.records import BatchStatus
from backfill.protocol.service import CompletionService
from tests.api.in_process import ScriptedEngine
from tests.api.test_fields import make_tokenizer
from tests.jobs.doubles import (
    InThreadReader,
    Start,
    ended,
    input_line,
    ready,
    results_of,
    run_batch,
    submit,
)
from tests.protocol.test_preparer import make_preparer

pytestmark = pytest.mark.anyio


@pytest.fixture
def engine() -> ScriptedEngine:
    engine = ScriptedEngine()
    engine.may_end.set()
    return engine


def doubles(engine: ScriptedEngine) -> dict[str, Any]:
    """A runner on the engine, and the reader of its lines."""
    client: Any = engine
    tokenizer = make_tokenizer()
    service = CompletionService(tokenizer, TextGenerator(client, tokenizer, Observer()))
    return {"runner": ServiceRunner(lambda: service), "reader": InThreadReader(make_preparer().prepare)}


def line(index: int, **fields: Any) -> bytes:
    return input_line(index, body={"prompt": [3] * 40, "max_tokens": 2, **fields})


async def test_lines_have_the_owner_of_their_batch_and_their_own_salts(
    start: Start, engine: ScriptedEngine
) -> None:
    manager = await start(**doubles(engine))
    ready(manager)
    found = {}
    for owner in ("alice", "bob", ""):
        engine.requests.clear()
        content = line(0) + line(1, cache_salt="salt") + line(2, cache_salt=None)
        batch = await submit(manager, content, owner=owner)
        assert (await ended(manager, batch.id, owner)).status is BatchStatus.COMPLETED
        found[owner] = [(request.owner, request.cache_salt) for request in engine.requests]
    assert {owner: sorted(pairs) for owner, pairs in found.items()} == {
        owner: [(owner, ""), (owner, ""), (owner, "salt")] for owner in found
    }


async def test_cached_tokens_of_lines_add_up_to_the_batchs(start: Start, engine: ScriptedEngine) -> None:
    engine.num_cached_tokens = 32
    manager = await start(**doubles(engine))
    ready(manager)
    batch = await run_batch(manager, line(0) + line(1) + line(2))
    output, _ = await results_of(manager, batch)
    usages = [each["response"]["body"]["usage"] for each in output]
    assert [usage["prompt_tokens_details"] for usage in usages] == [{"cached_tokens": 32}] * 3
    assert (batch.usage.input_tokens, batch.usage.cached_tokens, batch.usage.output_tokens) == (120, 96, 6)
