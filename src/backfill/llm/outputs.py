"""A request's outputs, and how they grow token by token."""

from __future__ import annotations

from dataclasses import dataclass, field

from backfill.core.plan import TokenLogprobs
from backfill.generation.generator import TextDelta
from backfill.generation.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural-log probability of one token, from the logits before any shaping.

    Attributes:
        rank: 1 for the most likely token; None for a sampled token outside the most likely ones returned.
    """

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One of a prompt's ``n`` outputs.

    Attributes:
        token_ids: includes the end token or the stop string's tokens, which the text does not contain.
        logprobs: for each token, the sampled and the most likely tokens by token id; None if not requested.
        cumulative_logprob: sum over the tokens; None if not requested.
        finish_reason: "stop", "length" or "abort"; None while the output grows.
        stop_reason: the stop token or stop string that ended it; None for the model's end token.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """When a request's tokens arrived in this process. Instants are ``time.monotonic()``, in seconds.

    Attributes:
        arrival_time: when the request was made.
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
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int | None = None


@dataclass(slots=True)
class OutputSoFar:
    """One output as it grows."""

    index: int
    logprobs: list[dict[int, Logprob]] | None  # None if not requested
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    num_cached_tokens: int | None = None  # None before the first token
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, delta: TextDelta, tokenizer: Tokenizer) -> None:
        self.text += delta.text
        self.token_ids.append(delta.token_id)
        self.num_cached_tokens = delta.num_cached_tokens
        if delta.logprobs is not None and self.logprobs is not None:
            self.logprobs.append(logprobs_by_token(delta.token_id, delta.logprobs, tokenizer))
            self.cumulative_logprob += delta.logprobs.logprob
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason.value, delta.stop_reason

    def completion(self) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=list(self.token_ids),
            cumulative_logprob=None if self.logprobs is None else self.cumulative_logprob,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def forget_tokens(self) -> None:
        """Start the next delta."""
        self.text = ""
        self.token_ids.clear()
        if self.logprobs is not None:
            self.logprobs.clear()


def logprobs_by_token(token_id: int, logprobs: TokenLogprobs, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """Log probabilities by token id: the sampled token, then the most likely ones."""
    ranks = {other: rank for rank, (other, _) in enumerate(logprobs.top, start=1)}
    entries = [(token_id, logprobs.logprob), *logprobs.top]
    return {each: Logprob(logprob, ranks.get(each), tokenizer.token_text(each)) for each, logprob in entries}
