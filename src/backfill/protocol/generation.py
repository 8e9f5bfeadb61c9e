"""A checked request of the HTTP API, ready to run."""

from __future__ import annotations

import msgspec

from backfill.core.slo import SLO
from backfill.generation.generator import GenerationRequest
from backfill.protocol.requests import GenerationEndpoint


class Generation(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """What the engine runs, and how the response reports it.

    Attributes:
        model, service_tier: as the response names them.
        echoed: text that precedes the output, one a prompt.
        reported_slo: objectives whose attainment the response reports; None where the client set none.
        warning: fields of the body that have no effect, in printable ASCII; None if there are none.
    """

    request: GenerationRequest
    endpoint: GenerationEndpoint
    response_id: str
    created: int
    model: str
    service_tier: str
    echoed: list[str]
    returns_token_ids: bool = False
    streams: bool = False
    includes_usage: bool = False
    usage_on_every_chunk: bool = False
    reported_slo: SLO | None = None
    warning: str | None = None

    def echo_of(self, choice: int) -> str:
        """Text that precedes a choice's output."""
        return self.echoed[self.request.prompt_index(choice)]
