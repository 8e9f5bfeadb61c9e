"""What comes of a request, and how it grows token by token."""

from __future__ import annotations

from dataclasses import dataclass, field

from backfill.core.plan import TokenLogprobs
from backfill.generation.generator import TextDelta
from backfill.generation.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural-log probability of one token, of the logits before any shaping.

    Attributes:
        rank: 1 for the most likely token; None for a sampled token that is not among those returned.
    """

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One of a prompt's ``n`` outputs.

    Attributes:
        token_ids: with the end token or those of the stop string, which the text does not hold.
        logprobs: for each token, those of the sampled and of the most likely ones by token id; None where
            none were asked for.
        cumulative_logprob: sum over the tokens; None likewise.
        finish_reason: "stop", "length" or "abort"; None while it goes on.
        stop_reason: the stop token or stop string that ended it; None for the model's own end.
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
    """When a request's tokens came, as this process saw it. Instants are ``time.monotonic()``, in seconds.

    Attributes:
        arrival_time: when it was made.
        first_token_time, last_token_time: of all its outputs; None before there was one.
        max_token_gap: the longest time between two tokens of one output; None before there was one.
    """

    arrival_time: float
    first_token_time: float | None = None
    last_token_time: float | None = None
    max_token_gap: float | None = None

    @property
    def first_token_latency(self) -> float | None:
        """Seconds from its arrival to its first token (TTFT)."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A prompt and its outputs.

    Attributes:
        prompt: its text; None where token ids were given.
        finished: this is the last one of the request.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics


@dataclass(slots=True)
class OutputSoFar:
    """One output while it grows."""

    index: int
    logprobs: list[dict[int, Logprob]] | None  # None where none were asked for
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, delta: TextDelta, tokenizer: Tokenizer) -> None:
        self.text += delta.text
        self.token_ids.append(delta.token_id)
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
        """What comes next is a difference to here."""
        self.text = ""
        self.token_ids.clear()
        if self.logprobs is not None:
            self.logprobs.clear()


def logprobs_by_token(token_id: int, logprobs: TokenLogprobs, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """The sampled token first, then the most likely ones."""
    ranks = {other: rank for rank, (other, _) in enumerate(logprobs.top, start=1)}
    entries = [(token_id, logprobs.logprob), *logprobs.top]
    return {each: Logprob(logprob, ranks.get(each), tokenizer.token_text(each)) for each, logprob in entries}
