"""Sampling parameters of the library, with vLLM's names and defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from numbers import Integral, Real

from backfill.core import sampling
from backfill.core.errors import RequestError
from backfill.llm.errors import InvalidRequest
from backfill.models.generation_config import GenerationDefaults

_MAX_INT32 = 2**31 - 1
_ANY_VOCABULARY = _MAX_INT32
_INTEGERS = ("n", "max_tokens", "min_tokens", "top_k", "seed", "logprobs")
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_SWITCHES = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")
_OPTIONAL = frozenset({"max_tokens", "seed", "logprobs"})


class RequestOutputKind(Enum):
    """What each ``RequestOutput`` of a stream contains."""

    CUMULATIVE = 0  # the whole output so far of every choice
    DELTA = 1  # what is new since the previous output
    FINAL_ONLY = 2  # one output, at the end


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling of one prompt, checked by the constructor.

    Attributes:
        n: outputs for each prompt.
        max_tokens: most tokens of one output; fewer if the context ends. None: as many as the context holds.
        min_tokens: neither end tokens nor stop strings end an output before it has this many.
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the most likely tokens whose probabilities sum to at least this, in (0, 1].
        min_p: drop tokens less likely than this fraction of the most likely one, in [0, 1].
        repetition_penalty: above 0; more than 1 makes tokens of prompt and output less likely.
        presence_penalty, frequency_penalty: in [-2, 2]; for tokens of the output.
        seed: the same seed gives the same output. None: derived from the ``seed`` of the ``LLM``.
        stop: strings that end the output, which does not contain them.
        stop_token_ids: tokens that end the output, besides the model's own.
        include_stop_str_in_output: the output's text contains the stop string or the end token's text.
        ignore_eos: the model's end tokens do not end the output.
        logit_bias: added to the logits of these token ids, in [-100, 100].
        logprobs: return the log probability of each token and of this many most likely ones, 0 to 20.
        skip_special_tokens: leave special tokens out of the text.
        output_kind: what a stream yields; ``LLM`` ignores it and returns final outputs.
    Raises: InvalidRequest, a ValueError, naming the first field that is wrong.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    skip_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        for name in _INTEGERS:
            self._check_type(name, Integral, "an integer")
        for name in _NUMBERS:
            self._check_type(name, Real, "a number")
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, "True or False", getattr(self, name))
        if not isinstance(self.output_kind, RequestOutputKind):
            raise _wrong("output_kind", "a RequestOutputKind", self.output_kind)
        self._check_collections()
        if self.n < 1:
            raise _wrong("n", "at least 1", self.n)
        if self.logprobs is not None and not 0 <= self.logprobs <= sampling.MAX_LOGPROBS:
            raise _wrong("logprobs", f"between 0 and {sampling.MAX_LOGPROBS}", self.logprobs)
        try:
            most_tokens = _MAX_INT32 if self.max_tokens is None else int(self.max_tokens)
            self._choice(most_tokens, self.seed or 0).validate(_ANY_VOCABULARY)
        except RequestError as error:
            raise InvalidRequest(str(error), param=error.param) from None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @classmethod
    def recommended(cls, defaults: GenerationDefaults) -> SamplingParams:
        """The model's recommended sampling, with this class's defaults for other fields."""
        named = {field.name: getattr(defaults, field.name, None) for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in named.items() if value is not None})

    def choices(self, most_tokens: int, seed: int) -> list[sampling.SamplingParams]:
        """The engine's sampling parameters, one for each of the ``n`` outputs.

        Args:
            most_tokens: tokens that the context leaves for an output, at least 1.
            seed: used if this sets none.
        """
        max_tokens = most_tokens if self.max_tokens is None else min(int(self.max_tokens), most_tokens)
        seed = seed if self.seed is None else int(self.seed)
        return [self._choice(max_tokens, sampling.choice_seed(seed, index)) for index in range(self.n)]

    def _choice(self, max_tokens: int, seed: int) -> sampling.SamplingParams:
        return sampling.SamplingParams(
            max_tokens=max_tokens,
            min_tokens=int(self.min_tokens),
            temperature=float(self.temperature),
            top_k=0 if self.top_k == -1 else int(self.top_k),
            top_p=float(self.top_p),
            min_p=float(self.min_p),
            repetition_penalty=float(self.repetition_penalty),
            presence_penalty=float(self.presence_penalty),
            frequency_penalty=float(self.frequency_penalty),
            seed=seed,
            stop_token_ids=tuple(map(int, self.stop_token_ids or ())),
            ignore_eos=self.ignore_eos,
            logit_bias=tuple((int(token), float(bias)) for token, bias in (self.logit_bias or {}).items()),
            num_logprobs=None if self.logprobs is None else int(self.logprobs),
        )

    def _check_type(self, name: str, kind: type, description: str) -> None:
        value = getattr(self, name)
        if value is None and name in _OPTIONAL:
            return
        if not isinstance(value, kind) or isinstance(value, bool):
            raise _wrong(name, f"{description}{' or None' if name in _OPTIONAL else ''}", value)

    def _check_collections(self) -> None:
        stop, tokens, biases = self.stop, self.stop_token_ids, self.logit_bias
        if stop is not None and not _is_sequence_of(str, [stop] if isinstance(stop, str) else stop):
            raise _wrong("stop", "a string or a list of strings", stop)
        if "" in self.stop_strings:
            raise InvalidRequest("stop must not hold an empty string.", param="stop")
        if tokens is not None and not _is_sequence_of(Integral, tokens):
            raise _wrong("stop_token_ids", "a list of token ids", tokens)
        if biases is not None and not (
            isinstance(biases, Mapping)
            and _is_sequence_of(Integral, list(biases))
            and _is_sequence_of(Real, list(biases.values()))
        ):
            raise _wrong("logit_bias", "a dict of numbers by token id", biases)


def _is_sequence_of(kind: type, values: object) -> bool:
    return (
        isinstance(values, Sequence)
        and not isinstance(values, str | bytes)
        and all(isinstance(value, kind) and not isinstance(value, bool) for value in values)
    )


def _wrong(name: str, allowed: str, value: object) -> InvalidRequest:
    return InvalidRequest(f"{name} must be {allowed}, got {value!r:.80}.", param=name)
