from __future__ import annotations

import asyncio
import json
from typing import Any

from backfill.core.sampling import SamplingParams
from backfill.generation.generator import TextGenerator
from backfill.generation.timeline import Observer
from backfill.jobs.lines import ServiceRunner, completed, of_a_choice
from backfill.jobs.records import TokenUsage
from backfill.preparation.lines import BatchLine
from backfill.protocol.encoding import EncodedList
from backfill.protocol.service import CompletionService, TokenCount
from tests.api.in_process import ScriptedEngine
from tests.api.servers import TIMEOUT_S
from tests.api.test_fields import make_tokenizer
from tests.jobs.feeder_doubles import until
from tests.protocol.builders import make_generation


def test_a_result_line_holds_a_body_whose_lists_are_encoded() -> None:
    content = EncodedList()
    for token in ("a", "b"):
        content.extend([{"token": token}])
    body = {
        "choices": [{"index": 0, "logprobs": {"content": content}}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}},
    }
    result = completed(BatchLine(number=1, custom_id="c"), body)
    assert result.usage == TokenUsage(3, 1, 2)
    encoded = result.encode("id")
    assert encoded.endswith(b"}\n")
    assert json.loads(encoded)["response"]["body"] == {
        **body,
        "choices": [{"index": 0, "logprobs": {"content": [{"token": "a"}, {"token": "b"}]}}],
    }


def test_a_line_that_could_not_be_prepared_has_an_internal_error() -> None:
    result = asyncio.run(ServiceRunner(lambda: None).run(BatchLine(number=1, custom_id="c")))
    assert result.error is not None and result.error["code"] == "internal_error"


def test_the_tokens_of_a_running_line_are_counted_over_its_choices() -> None:
    async def run() -> None:
        engine, tokenizer, count = ScriptedEngine(), make_tokenizer(), TokenCount()
        client: Any = engine
        service = CompletionService(tokenizer, TextGenerator(client, tokenizer, Observer()))
        generation = make_generation(num_choices=2)
        generation.request.samplings[:] = [SamplingParams(max_tokens=5)] * 2
        line = BatchLine(number=1, custom_id="c", generation=generation)
        engine.may_end.set()
        engine.num_allowed = 3
        running = asyncio.create_task(ServiceRunner(lambda: service).run(line, count))
        await until(lambda: count.num_tokens == 6)
        assert of_a_choice(line, count.num_tokens) == 3
        engine.num_allowed = 1 << 30
        result = await asyncio.wait_for(running, TIMEOUT_S)
        assert result.usage.output_tokens == count.num_tokens == 10

    asyncio.run(run())
