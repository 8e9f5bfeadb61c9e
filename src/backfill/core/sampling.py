"""How the next token of a request is chosen, as validated plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass

from backfill.core.errors import RequestError

MAX_LOGPROBS = 20
_LEAST_TEMPERATURE = 1e-5  # below it, scaled logits overflow, and the draw would be greedy anyway
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling of one request; every field is resolved (no "default" left to fill in).

    Applied in this order: logit bias, penalties, suppression of end tokens before ``min_tokens``,
    temperature, top-k, top-p over what top-k left, min-p relative to the most likely token.

    Attributes:
        max_tokens: tokens to generate at most, >= 1.
        min_tokens: end tokens cannot be sampled before this many tokens exist.
        temperature: 0 (or below 1e-5) is greedy: the other shaping parameters but bias and penalties
            then have no effect.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the fewest most likely tokens whose probabilities sum to at least this, in (0, 1].
        min_p: drop tokens less likely than this fraction of the most likely one, in [0, 1].
        repetition_penalty: > 0; divides positive and multiplies negative logits of tokens seen in
            prompt or output (CTRL, arXiv 1909.05858).
        presence_penalty, frequency_penalty: in [-2, 2]; subtracted from the logits of output tokens
            once, and once for each occurrence.
        seed: selects the random stream. Token i of a request depends on the seed and i alone, so a
            request preempted and resumed, or batched with others, draws the same numbers.
        stop_token_ids: tokens that end the output, besides the model's own.
        ignore_eos: the model's end tokens do not end the output.
        logit_bias: (token id, bias added to its logit) pairs, bias in [-100, 100].
        num_logprobs: return the log probability of each sampled token and of this many most likely
            ones, from the logits before any shaping; None returns none.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _LEAST_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def validate(self, vocab_size: int) -> None:
        """Raise RequestError naming the first field out of range and what it allows."""
        _check_int("max_tokens", self.max_tokens, 1, None)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_float("temperature", self.temperature, 0.0, 2.0)
        _check_int("top_k", self.top_k, 0, _INT32_MAX)
        _check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_int("seed", self.seed, -(2**63), 2**63 - 1)
        for token_id in self.stop_token_ids:
            _check_token("stop_token_ids", token_id, vocab_size)
        for token_id, bias in self.logit_bias:
            _check_token("logit_bias", token_id, vocab_size)
            _check_float("logit_bias", bias, -100.0, 100.0)
        if self.num_logprobs is not None:
            _check_int("top_logprobs", self.num_logprobs, 0, MAX_LOGPROBS)


def choice_seed(seed: int, choice: int) -> int:
    """Seed of one of a request's choices: choices differ, and the same seed reproduces them."""
    return (seed + choice + 2**63) % 2**64 - 2**63


def _check_int(param: str, value: int, low: int, high: int | None) -> None:
    if value < low or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"between {low} and {high}"
        raise RequestError(f"{param} must be {allowed}, got {value}.", param=param)


def _check_float(param: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    too_low = value <= low if open_low else value < low
    if not math.isfinite(value) or too_low or value > high:
        allowed = f"above {low:g} and at most {high:g}" if open_low else f"between {low:g} and {high:g}"
        raise RequestError(f"{param} must be {allowed}, got {value}.", param=param)


def _check_token(param: str, token_id: int, vocab_size: int) -> None:
    if not 0 <= token_id < vocab_size:
        raise RequestError(
            f"{param} must name tokens between 0 and {vocab_size - 1}, got {token_id}.", param=param
        )
