"""How the tokens of an output are chosen, and when it ends: vLLM's names and defaults."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import inf, nextafter
from numbers import Integral, Real
from operator import attrgetter
from types import NoneType
from typing import Any

from backfill.core.errors import InvalidRequest
from backfill.core.options import Bounds, Option, alternatives, bounded, options_of
from backfill.core.structured import StructuredOutputsParams

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 100
_LEAST_TEMPERATURE = 1e-5  # below it, scaled logits overflow, and the draw would be greedy anyway
_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1


class RequestOutputKind(Enum):
    """What each ``RequestOutput`` of a stream contains."""

    CUMULATIVE = 0  # the whole output so far of every choice
    DELTA = 1  # what is new since the previous output
    FINAL_ONLY = 2  # one output, at the end


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling of one prompt, checked by the constructor.

    Applied in this order: logit bias, penalties, exclusions (``allowed_token_ids``, ``bad_words``, end tokens
    before ``min_tokens``), temperature, top-k, top-p over what top-k left, min-p relative to the most likely
    token. Where the exclusions leave no token, the next one is the model's end token.

    Attributes:
        n: outputs for each prompt.
        max_tokens: most tokens of one output; fewer if the context ends. None: as many as the context holds.
        min_tokens: neither end tokens nor stop strings end an output before it has this many.
        temperature: 0 (or below 1e-5) is greedy: the other shaping parameters but bias and penalties then
            have no effect.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the fewest most likely tokens whose probabilities sum to at least this, in (0, 1].
        min_p: drop tokens less likely than this fraction of the most likely one, in [0, 1].
        repetition_penalty: above 0; divides positive and multiplies negative logits of tokens of prompt and
            output (CTRL, arXiv 1909.05858), so more than 1 makes them less likely.
        presence_penalty, frequency_penalty: in [-2, 2]; subtracted from the logits of output tokens once,
            and once for each occurrence.
        seed: the same seed gives the same output: token i depends on the seed and i alone, also in a request
            that is preempted, or batched with others. None: of the ``seed`` of the ``LLM``, or random.
        stop: strings that end the output, which does not contain them.
        stop_token_ids: tokens that end the output, besides the model's own.
        include_stop_str_in_output: the output's text contains the stop string or the end token's text.
        ignore_eos: the model's end tokens do not end the output.
        logit_bias: added to the logits of these token ids, in [-100, 100].
        allowed_token_ids: no other token is in the output; at least one.
        bad_words: strings that are not in the output, at a word's start or within: the last token of each
            way in which the tokenizer writes one never follows the others.
        bad_words_token_ids: so for these sequences of tokens. An engine gets ``bad_words`` in this form.
        logprobs: return the log probability of each token and of this many most likely ones, 0 to 20, from
            the logits before any shaping.
        prompt_logprobs: return them of each prompt token but the first, and of this many most likely ones, 0
            to 20. The whole prompt is computed for it, whatever the prefix cache has.
        skip_special_tokens: leave special tokens out of the text.
        output_kind: what a stream of ``AsyncLLM`` yields.
        structured_outputs: what the text of an output must be. Tokens that would break it are taken out
            before all else, so log probabilities are those among the others. Where the exclusions leave
            none of these, it alone decides. An output that ``max_tokens`` or a stop string ends is
            incomplete.
    Raises: InvalidRequest, a ValueError, naming the first field that is wrong.
    """

    n: int = bounded(1, least=1)
    max_tokens: int | None = bounded(16, least=1)
    min_tokens: int = bounded(0, least=0, most=_INT32_MAX)
    temperature: float = bounded(1.0, least=0, most=2)
    top_k: int = bounded(0, least=-1, most=_INT32_MAX)
    top_p: float = bounded(1.0, above=0, most=1)
    min_p: float = bounded(0.0, least=0, most=1)
    repetition_penalty: float = bounded(1.0, above=0, most=100)
    presence_penalty: float = bounded(0.0, least=-2, most=2)
    frequency_penalty: float = bounded(0.0, least=-2, most=2)
    seed: int | None = bounded(None, least=-_INT64_MAX - 1, most=_INT64_MAX)
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    bad_words_token_ids: Sequence[Sequence[int]] | None = None
    logprobs: int | None = bounded(None, least=0, most=MAX_LOGPROBS)
    prompt_logprobs: int | None = bounded(None, least=0, most=MAX_LOGPROBS)
    skip_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        if self.top_k == -1:
            self._set("top_k", 0)
        for number, value in zip(_NUMBERS, _numbers_of(self), strict=True):
            is_usual = type(value) is number.kind and number.low <= value <= number.high
            if not is_usual and value is not number.default:
                self._set(number.name, number.checked(value))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _wrong("min_tokens", f"between 0 and {self.max_tokens}", self.min_tokens)
        for (name, kind, allowed), value in zip(_KINDS, _kinds_of(self), strict=True):
            if not isinstance(value, kind):
                raise _wrong(name, allowed, value)
        self._check_lists()
        self.check_token_ids(_INT32_MAX)  # of any vocabulary

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop or ())

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _LEAST_TEMPERATURE

    @property
    def shapes_logits(self) -> bool:
        """Something changes logits before the temperature does."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.min_tokens
            or self.allowed_token_ids
            or self.bad_words_token_ids
        )

    def check_token_ids(self, vocab_size: int) -> None:
        """Raises: InvalidRequest for a token outside the vocabulary."""
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            token_ids = getattr(self, name)
            if token_ids:
                _check_vocabulary(name, token_ids, vocab_size)
        for each in self.bad_words_token_ids or ():
            _check_vocabulary("bad_words_token_ids", each, vocab_size)

    def choices(
        self, max_tokens: int, seed: int, bad_words: Sequence[Sequence[int]] = ()
    ) -> list[SamplingParams]:
        """The sampling of each of the ``n`` outputs, complete: an engine gets no other.

        Choices differ in their seeds, and the same seed gives them again.

        Args:
            max_tokens: of each output.
            seed: where this sets none.
            bad_words: how the tokenizer writes ``bad_words``.
        """
        seed = seed if self.seed is None else self.seed
        seeds = ((seed + choice + 2**63) % 2**64 - 2**63 for choice in range(self.n))
        words = (*(self.bad_words_token_ids or ()), *bad_words) or None
        complete = replace(self, n=1, max_tokens=max_tokens, bad_words=None, bad_words_token_ids=words)
        return [replace(complete, seed=each) for each in seeds]

    def _check_lists(self) -> None:
        if self.stop is not None:
            strings = (self.stop,) if isinstance(self.stop, str) else self.stop
            self._set("stop", _checked_strings("stop", strings))
        if self.stop_token_ids is not None:
            self._set("stop_token_ids", _checked_tokens("stop_token_ids", self.stop_token_ids) or None)
        if self.allowed_token_ids is not None:
            allowed = _checked_tokens("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise InvalidRequest("allowed_token_ids must not be empty.", param="allowed_token_ids")
            self._set("allowed_token_ids", allowed)
        if self.logit_bias is not None:
            self._set("logit_bias", _checked_biases(self.logit_bias))
        if self.bad_words is not None:
            self._set("bad_words", _checked_strings("bad_words", self.bad_words))
        if self.bad_words_token_ids is not None:
            name, words = "bad_words_token_ids", self.bad_words_token_ids
            if not _is_list(words) or not all(map(_is_list, words)) or not all(map(len, words)):
                raise _wrong(name, "a list of lists of token ids", words)
            self._set(name, tuple(_checked_tokens(name, each) for each in words) or None)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True)
class _Number:
    """What a field may be; numbers of numpy become Python's."""

    name: str
    default: object
    kind: type[Any]  # int or float
    is_optional: bool
    bounds: Bounds
    low: float  # of the bounds
    high: float

    def checked(self, value: Any) -> float | None:
        """Raises: InvalidRequest."""
        if value is None and self.is_optional:
            return None
        if isinstance(value, bool) or not isinstance(value, Integral if self.kind is int else Real):
            allowed = "an integer" if self.kind is int else "a number"
            raise _wrong(self.name, f"{allowed} or None" if self.is_optional else allowed, value)
        number: float = self.kind(value)
        if number not in self.bounds:
            raise _wrong(self.name, str(self.bounds), value)
        return number


def _number(option: Option, bounds: Bounds) -> _Number:
    kinds = alternatives(option.kind)
    kind = int if int in kinds else float
    low = max(bounds.least, nextafter(bounds.above, inf))
    high = min(bounds.most, nextafter(bounds.below, -inf))
    return _Number(option.name, option.default, kind, NoneType in kinds, bounds, low, high)


_OPTIONS = options_of(SamplingParams)
_NUMBERS = [_number(option, option.bounds) for option in _OPTIONS.values() if option.bounds is not None]
_KINDS: list[tuple[str, type[Any] | tuple[type[Any], ...], str]] = [
    *((option.name, bool, "True or False") for option in _OPTIONS.values() if option.kind is bool),
    ("output_kind", RequestOutputKind, "a RequestOutputKind"),
    ("structured_outputs", (StructuredOutputsParams, NoneType), "StructuredOutputsParams or None"),
]
# The constructor runs several times for each request, here and in other processes.
_numbers_of = attrgetter(*(number.name for number in _NUMBERS))
_kinds_of = attrgetter(*(name for name, _, _ in _KINDS))


def _checked_strings(name: str, strings: Sequence[str]) -> tuple[str, ...] | None:
    if not _is_list(strings) or not all(isinstance(each, str) for each in strings):
        raise _wrong(
            name, "a string or a list of strings" if name == "stop" else "a list of strings", strings
        )
    if "" in strings:
        empty = strings.index("")
        raise InvalidRequest(f"{name} must not hold an empty string: entry {empty} is empty.", param=name)
    return tuple(strings) or None


def _checked_tokens(name: str, token_ids: Sequence[int]) -> tuple[int, ...]:
    if not _is_list(token_ids) or not are_integers(token_ids):
        raise _wrong(name, "a list of token ids", token_ids)
    return tuple(map(int, token_ids))


def _check_vocabulary(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Raises: InvalidRequest."""
    for worst in (min(token_ids), max(token_ids)):
        if not 0 <= worst < vocab_size:
            allowed = f"must name tokens between 0 and {vocab_size - 1}, got {worst}."
            raise InvalidRequest(f"{name} {allowed}", param=name)


def _checked_biases(biases: Mapping[int, float]) -> dict[int, float]:
    if not isinstance(biases, Mapping) or not are_integers(biases):
        raise _wrong("logit_bias", "a dict of numbers by token id", biases)
    checked: dict[int, float] = {}
    for token_id, bias in biases.items():
        if isinstance(bias, bool) or not isinstance(bias, Real):
            raise _wrong("logit_bias", "a number for each token", bias)
        if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            raise _wrong("logit_bias", f"between {-MAX_LOGIT_BIAS} and {MAX_LOGIT_BIAS}", bias)
        checked[int(token_id)] = float(bias)
    return checked


def are_integers(values: Iterable[object]) -> bool:
    """Whether all are whole numbers, numpy's too."""
    return all(isinstance(value, Integral) and not isinstance(value, bool) for value in values)


def _is_list(values: object) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, str | bytes)


def _wrong(name: str, allowed: str, value: object) -> InvalidRequest:
    return InvalidRequest(f"{name} must be {allowed}, got {value!r:.80}.", param=name)
