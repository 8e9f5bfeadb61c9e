"""A request's outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural-log probability of one token, from the logits before any shaping.

    Attributes:
        rank: of the most likely tokens returned their place, of any other 1 plus the number of tokens that
            are more likely.
    """

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One of a prompt's ``n`` outputs.

    Attributes:
        token_ids: includes the end token or the stop string's tokens, which the text does not contain.
        logprobs: for each token, the sampled and the most likely tokens by token id; None if not requested.
        cumulative_logprob: sum over the tokens; None if not requested.
        finish_reason: "stop", "length" or "abort"; None while the output grows.
        stop_reason: the stop token or stop string that ended it; None for the model's end token.
        message: of a chat, once the output is finished: the text as a message of OpenAI's, with
            ``tool_calls`` and ``reasoning`` apart, which a conversation may go on with. Of deltas it has
            the last one's text alone.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    message: dict[str, Any] | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True, kw_only=True)
class RequestMetrics:
    """When a request's tokens arrived in this process. Instants are ``time.monotonic()``, in seconds.

    Attributes:
        arrival_time: when the request was given to the engine.
        first_token_time, last_token_time: over all outputs; None before the first token.
        max_token_gap: the longest time between two tokens of one output; None before a second token.
    """

    arrival_time: float
    first_token_time: float | None = None
    last_token_time: float | None = None
    max_token_gap: float | None = None

    @property
    def first_token_latency(self) -> float | None:
        """Seconds from arrival to the first token (TTFT)."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A prompt and its outputs.

    Attributes:
        prompt: the prompt's text; None if token ids were given.
        finished: this is the request's last output.
        num_cached_tokens: prompt tokens that were found in the prefix cache; None before the first token.
        prompt_logprobs: for each prompt token, it and the most likely ones by token id; None for the first
            one. None if not requested, and before the first output token.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
