"""A request's outputs, and how they grow token by token."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from backfill.core.plan import TokenLogprobs
from backfill.generation.generator import GenerationRequest, TextDelta
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


@dataclass(slots=True, kw_only=True)
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


@dataclass(slots=True, kw_only=True)
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


class OutputsSoFar:
    """A request's outputs as they grow."""

    def __init__(
        self, request_id: str, prompt: str | None, generation: GenerationRequest, arrived_at_s: float
    ) -> None:
        self._request_id = request_id
        self._prompt = prompt
        self._prompt_token_ids = generation.prompts[0]
        self._outputs = [
            CompletionOutput(
                index=index,
                text="",
                token_ids=[],
                cumulative_logprob=None if sampling.logprobs is None else 0.0,
                logprobs=None if sampling.logprobs is None else [],
            )
            for index, sampling in enumerate(generation.samplings)
        ]
        self._metrics = RequestMetrics(arrival_time=arrived_at_s)
        self._num_cached_tokens: dict[int, int] = {}  # by index, of outputs that have a token

    def add(self, index: int, delta: TextDelta, tokenizer: Tokenizer) -> None:
        output, metrics = self._outputs[index], self._metrics
        output.text += delta.text
        output.token_ids.append(delta.token_id)
        if output.logprobs is not None and delta.logprobs is not None:
            output.logprobs.append(_logprobs_by_token(delta.token_id, delta.logprobs, tokenizer))
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + delta.logprobs.logprob
        if delta.finish_reason is not None:
            output.finish_reason, output.stop_reason = delta.finish_reason.value, delta.stop_reason
        metrics.last_token_time = time.monotonic()
        if metrics.first_token_time is None:
            metrics.first_token_time = metrics.arrival_time + delta.waited_s
        if index in self._num_cached_tokens:
            metrics.max_token_gap = max(metrics.max_token_gap or 0.0, delta.waited_s)
        self._num_cached_tokens[index] = delta.num_cached_tokens

    def abort(self) -> None:
        for output in self._outputs:
            output.finish_reason = output.finish_reason or "abort"

    def all(self) -> RequestOutput:
        return self._with(self._outputs)

    def take_delta(self, index: int) -> RequestOutput:
        """What one output has gained since the previous call for it."""
        output = self._outputs[index]
        taken = self._with([output])
        output.text, output.token_ids = "", []
        if output.logprobs is not None:
            output.logprobs = []
        return taken

    def _with(self, outputs: list[CompletionOutput]) -> RequestOutput:
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[
                replace(
                    each,
                    token_ids=list(each.token_ids),
                    logprobs=None if each.logprobs is None else list(each.logprobs),
                )
                for each in outputs
            ],
            finished=all(each.finished for each in self._outputs),
            # The least of all outputs: others may find what one of them computed.
            num_cached_tokens=min(self._num_cached_tokens.values(), default=None),
            metrics=replace(self._metrics),
        )


def _logprobs_by_token(token_id: int, logprobs: TokenLogprobs, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """Log probabilities by token id: the sampled token, then the most likely ones."""
    ranks = {other: rank for rank, (other, _) in enumerate(logprobs.top, start=1)}
    entries = [(token_id, logprobs.logprob), *logprobs.top]
    return {each: Logprob(logprob, ranks.get(each), tokenizer.token_text(each)) for each, logprob in entries}
