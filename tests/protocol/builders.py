"""Builds generations as the preparer does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from backfill.core.sampling import SamplingParams
from backfill.core.slo import SLO
from backfill.generation.generator import GenerationRequest
from backfill.protocol.generation import Generation
from backfill.protocol.request_headers import Objective


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
        objectives=_objectives(request.get("slo")),
    )


def _objectives(slo: SLO | None) -> dict[str, Objective]:
    """As of a request whose body asks for these."""
    if slo is None:
        return {}
    return {"ttft": Objective(slo.ttft_s, "slo.ttft"), "tpot": Objective(slo.tpot_s, "slo.tpot")}
