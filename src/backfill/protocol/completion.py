"""Bodies of text completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from backfill.core.errors import RequestError
from backfill.protocol.generation_fields import MAX_CHOICES, GenerationFields
from backfill.protocol.parsing import FailFastList

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionRequest(GenerationFields):
    """Body of ``POST /v1/completions``."""

    prompt: str | FailFastList[str] | FailFastList[int] | FailFastList[FailFastList[int]]
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool = True

    @property
    def requested_max_tokens(self) -> int:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

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
        if len(self.prompts) * self.num_choices > MAX_CHOICES:
            raise RequestError(
                f"Prompts times n must be at most {MAX_CHOICES}, got {len(self.prompts) * self.num_choices}.",
                param="prompt",
            )
        if self.echo and self.logprobs is not None:
            raise RequestError(
                "echo together with logprobs is not supported.", param="echo", code="unsupported_parameter"
            )
