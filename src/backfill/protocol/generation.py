"""Requests of the HTTP API that generate: their bodies by endpoint, and what a checked body becomes."""

from __future__ import annotations

from typing import Literal

import msgspec

from backfill.core.slo import SLO
from backfill.generation.generator import GenerationRequest
from backfill.protocol.chat import ChatCompletionRequest
from backfill.protocol.completion import CompletionRequest
from backfill.protocol.parsing import parse_body

GenerationEndpoint = Literal["/v1/chat/completions", "/v1/completions"]
GenerationBody = ChatCompletionRequest | CompletionRequest


def parse_generation(endpoint: GenerationEndpoint, raw: bytes) -> GenerationBody:
    """Parse a body of the endpoint. Raises: RequestError naming the first field that is wrong."""
    if endpoint == "/v1/chat/completions":
        return parse_body(ChatCompletionRequest, raw)
    return parse_body(CompletionRequest, raw)


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
