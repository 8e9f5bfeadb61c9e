"""Requests of the HTTP API that generate: their bodies by endpoint, and what a checked body becomes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, cast

import msgspec

from backfill.core.errors import RequestError
from backfill.core.slo import SLO
from backfill.generation.generator import GenerationRequest
from backfill.generation.message_parser import MessageParsing
from backfill.protocol.chat import ChatCompletionRequest
from backfill.protocol.generation_fields import MAX_CHOICES, GenerationFields
from backfill.protocol.parsing import FailFastList, parse_body, told
from backfill.protocol.request_headers import Objective

DEFAULT_MAX_TOKENS = 16  # OpenAI's, of text completions

GenerationEndpoint = Literal["/v1/chat/completions", "/v1/completions"]


class CompletionRequest(GenerationFields):
    """Body of ``POST /v1/completions``."""

    prompt: Annotated[
        str | FailFastList[str] | FailFastList[int] | FailFastList[FailFastList[int]],
        told(minLength=1, minItems=1, items={"minLength": 1, "minItems": 1, "minimum": 0}),
    ]
    max_tokens: Annotated[int, told(minimum=0)] | None = None
    has_best_of: ClassVar[bool] = True
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool = True

    @property
    def echoes_only(self) -> bool:
        """The prompt is all that is asked for. The engine makes a token nevertheless."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def echoes_logprobs(self) -> bool:
        return bool(self.echo) and self.logprobs is not None

    @property
    def requested_max_tokens(self) -> int:
        if self.echoes_only:
            return 1
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return 0 if self.logprobs is None and self.num_candidates > self.num_choices else self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        if not self.echoes_logprobs or self.logprobs is None:
            return self.prompt_logprobs
        return max(self.logprobs, self.prompt_logprobs or 0)

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """One entry for each prompt, text or token ids."""
        match self.prompt:
            case str() as text:
                return [text]
            case [int(), *_]:
                return [cast(list[int], self.prompt)]
            case several:
                return cast(Sequence[str | list[int]], several)

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    @property
    def token_prompts(self) -> list[list[int]]:
        """The prompts given as token ids, truncated to ``truncate_prompt_tokens``."""
        return [self.truncated(prompt) for prompt in self.prompts if not isinstance(prompt, str)]

    def check(self) -> None:
        super().check()
        if not self.prompts or any(len(prompt) == 0 for prompt in self.prompts):
            raise RequestError("prompt must not be empty.", param="prompt")
        name = "n" if self.num_candidates == self.num_choices else "best_of"
        if len(self.prompts) * self.num_candidates > MAX_CHOICES:
            raise RequestError(
                f"Prompts times {name} must be at most {MAX_CHOICES}, got {len(self.prompts)} times "
                f"{self.num_candidates}.",
                param="prompt",
            )
        if self.best_of is not None and not (self.best_of == 1 or self.best_of >= self.num_choices):
            raise RequestError(
                f"best_of must be at least n ({self.num_choices}), got {self.best_of}.", param="best_of"
            )
        if self.stream and self.num_candidates > self.num_choices:
            raise RequestError("best_of above n is not available in a stream.", param="best_of")
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens must be at least 1 without echo, got 0.", param="max_tokens")


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
        echoes_only: the output's one token is not part of the response.
        echoes_logprobs: the prompt's log probabilities precede the output's.
        num_best: outputs of each prompt that the response has: those whose tokens are most likely in the
            mean. None: all.
        returns_logprobs: the response has those of output tokens, if the engine gives them.
        returns_prompt_logprobs: the response has them in a field of their own.
        parsing: how a chat's outputs are; None: all of them is content.
        objectives: those that the client set, by field of ``slo``, as it named them.
        warning: fields of the body that have no effect, in printable ASCII; None if there are none.
    """

    request: GenerationRequest
    endpoint: GenerationEndpoint
    response_id: str
    created: int
    model: str
    service_tier: str
    echoed: list[str]
    echoes_only: bool = False
    echoes_logprobs: bool = False
    num_best: int | None = None
    returns_logprobs: bool = True
    returns_prompt_logprobs: bool = False
    returns_token_ids: bool = False
    streams: bool = False
    includes_usage: bool = False
    usage_on_every_chunk: bool = False
    parsing: MessageParsing | None = None
    objectives: dict[str, Objective] = {}
    warning: str | None = None

    @property
    def reported_slo(self) -> SLO | None:
        """Objectives whose attainment the response reports; None where the client set none."""
        return self.request.slo if self.objectives else None

    def echo_of(self, choice: int) -> str:
        """Text that precedes a choice's output."""
        return self.echoed[self.request.prompt_index(choice)]
