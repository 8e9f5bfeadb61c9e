"""Bodies of generation requests, by endpoint."""

from __future__ import annotations

from typing import Literal

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
