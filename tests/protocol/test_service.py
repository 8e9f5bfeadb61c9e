"""What becomes of a generation on its way to the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from backfill.core.request import FinishReason, ServiceClass
from backfill.core.sampling import SamplingParams
from backfill.generation.generator import GenerationRequest, TextDelta
from backfill.protocol.preparer import Generation, ServedModel
from backfill.protocol.service import CompletionService

NO_TOKENIZER: Any = None  # nothing here shows a token


class Recorder:
    """Ends every request at once."""

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []

    async def stream(
        self, request: GenerationRequest, on_first_token: object = None, on_engine_end: object = None
    ) -> AsyncGenerator[TextDelta, None]:
        self.requests.append(request)
        yield TextDelta("a", 7, None, FinishReason.STOP)


def generation_of(num_choices: int) -> Generation:
    return Generation(
        endpoint="/v1/completions",
        response_id="cmpl-1",
        created=0,
        service_tier="default",
        prompts=[[5, 6]],
        echoed=[""],
        samplings=[SamplingParams(max_tokens=1) for _ in range(num_choices)],
        stop=(),
        include_stop_str_in_output=False,
        skip_special_tokens=True,
        returns_token_ids=False,
        streams=False,
        includes_usage=False,
        usage_on_every_chunk=False,
        service_class=ServiceClass.OFFLINE,
        priority=0,
        slo=None,
        reported_slo=None,
        complete_by_s=None,
    )


def test_the_choices_of_one_request_are_one_group_and_no_other_request_is_in_it() -> None:
    recorder: Any = Recorder()
    service = CompletionService(
        ServedModel(names=("m",), root="", folder=Path(), created=0), NO_TOKENIZER, recorder
    )

    async def run() -> None:
        for _ in range(2):  # which a client may send with one and the same id
            await service.run_whole(generation_of(3))

    asyncio.run(run())
    first, second = ({request.group for request in recorder.requests[at : at + 3]} for at in (0, 3))
    assert len(first) == len(second) == 1
    assert None not in first
    assert first != second
