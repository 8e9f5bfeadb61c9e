"""Builds generations as the preparer does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from backfill.core.sampling import SamplingParams
from backfill.generation.generator import GenerationRequest
from backfill.protocol.generation import Generation


def make_generation(
    *,
    num_choices: int = 1,
    response_id: str = "cmpl-1",
    prompts: Sequence[list[int]] = ([5, 6],),
    sampling: Mapping[str, Any] = {},
    **request: Any,
) -> Generation:
    """A generation of ``num_choices`` choices. ``request``: other fields of its GenerationRequest."""
    choice = SamplingParams(**{"max_tokens": 1, **sampling})
    return Generation(
        request=GenerationRequest(prompts=list(prompts), samplings=[choice] * num_choices, **request),
        endpoint="/v1/completions",
        response_id=response_id,
        created=0,
        model="m",
        service_tier="default",
        echoed=[""] * len(prompts),
    )
