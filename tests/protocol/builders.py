"""Builds generations as the preparer does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from backfill.core.sampling import SamplingParams
from backfill.generation.generator import GenerationRequest
from backfill.protocol.generation import Generation


def make_generation(
    *,
    num_choices: int = 1,
    response_id: str = "cmpl-1",
    prompts: Sequence[list[int]] = ([5, 6],),
    **request: Any,
) -> Generation:
    """A generation of ``num_choices`` choices. ``request``: fields of its GenerationRequest."""
    return Generation(
        request=GenerationRequest(
            prompts=list(prompts), samplings=[SamplingParams(max_tokens=1)] * num_choices, **request
        ),
        endpoint="/v1/completions",
        response_id=response_id,
        created=0,
        model="m",
        service_tier="default",
        echoed=[""] * len(prompts),
    )
