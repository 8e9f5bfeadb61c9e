"""Checks of a body that need no tokens: unknown fields, and errors of batch lines."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import dataclass, replace

from backfill.core.errors import RequestError
from backfill.core.sampling import SamplingParams
from backfill.execution.executor import ExecutorInfo
from backfill.protocol.generation import GenerationBody
from backfill.protocol.generation_fields import GenerationFields
from backfill.protocol.options import MAX_RESPONSE_TOKENS

# A warning becomes a header, so its length is bounded.
_MAX_NAMED_FIELDS = 5
_MAX_NAME_CHARS = 40
_LEAST_SIMILARITY = 0.75
_EMPTY_SLO = "slo has neither ttft nor tpot, so it has no effect"


def has_warning(body: GenerationFields) -> bool:
    """Whether ``warning_of`` is not None; about 100 times faster."""
    return bool(body.unknown_fields) or _has_empty_slo(body)


def warning_of(body: GenerationFields) -> str | None:
    """The body's unknown fields and empty ``slo``, as short printable ASCII; None if there are none."""
    parts = []
    unknown = body.unknown_fields
    if unknown:
        known = body.known_fields()
        named = [_named(name, known) for name in unknown[:_MAX_NAMED_FIELDS]]
        num_others = len(unknown) - len(named)
        parts.append(
            "unknown fields: " + ", ".join(named) + (f" and {num_others} more" if num_others else "")
        )
    if _has_empty_slo(body):
        parts.append(_EMPTY_SLO)
    return "; ".join(parts) or None


def refuse_unknown_fields(body: GenerationFields) -> None:
    """Raise RequestError for the first unknown field, or an empty ``slo``."""
    unknown = body.unknown_fields
    if unknown:
        name = _named(unknown[0], body.known_fields())
        raise RequestError(
            f"Unknown parameter: {name}.", param=_printable(unknown[0]), code="unknown_parameter"
        )
    if _has_empty_slo(body):
        raise RequestError(f"{_EMPTY_SLO}.", param="slo")


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyCheck:
    """Checks the body of a batch line, except for what needs its tokens.

    Attributes:
        is_strict, max_response_tokens: the settings of the preparer that will prepare the line.
        info: of the running engine; None skips its limits, which are checked again when the line runs.
    """

    is_strict: bool = False
    max_response_tokens: int = MAX_RESPONSE_TOKENS
    info: ExecutorInfo | None = None

    def check(self, body: GenerationBody) -> None:
        """Turn the body into a batch line's and check it. Raises: RequestError."""
        body.become_batch_line()
        body.check()
        if self.is_strict:
            refuse_unknown_fields(body)
        self._check_sampling(body)

    def _check_sampling(self, body: GenerationBody) -> None:
        sampling, prompts, info = body.sampling({}), body.token_prompts, self.info
        left = self.max_response_tokens
        if info is not None:
            left = max(1, info.max_model_len - max(map(len, prompts), default=1))
        max_tokens = bounded_max_tokens(sampling, left, body.num_prompts, self.max_response_tokens)
        if max_tokens != sampling.max_tokens:
            sampling = replace(sampling, max_tokens=max_tokens)
        if info is None:
            return
        sampling.check_token_ids(info.vocab_size)
        if max_tokens >= info.max_model_len:
            raise RequestError(
                f"This model's maximum context length is {info.max_model_len} tokens, prompt included, and "
                f"max_tokens is {max_tokens}.",
                param="max_tokens",
                code="context_length_exceeded",
            )
        for prompt in prompts:
            info.check_request(prompt, sampling)


def bounded_max_tokens(sampling: SamplingParams, left: int, num_prompts: int, most: int) -> int:
    """``max_tokens`` of each choice, so that choices x max_tokens x (1 + logprobs) is at most ``most``.

    Args:
        left: tokens that the context has left, taken where ``sampling`` has no limit as far as is allowed.
    Raises: RequestError if more are asked for, or if not even one token is allowed.
    """
    num_choices, num_logprobs = num_prompts * sampling.n, sampling.logprobs or 0
    allowed = most // (num_choices * (1 + num_logprobs))
    requested = sampling.max_tokens
    if allowed < 1 or (requested is not None and requested > allowed):
        raise RequestError(
            f"The response would be too large: choices x max_tokens x (1 + logprobs) may be at most {most}. "
            f"With {num_choices} choices and {num_logprobs} logprobs, "
            f"max_tokens may be {allowed} at most.",
            param="max_tokens",
        )
    return min(left, allowed) if requested is None else requested


def _has_empty_slo(body: GenerationFields) -> bool:
    return body.slo is not None and not body.slo.as_dict()


def _named(name: str, known: Collection[str]) -> str:
    shown = _printable(name)
    similar = difflib.get_close_matches(shown, known, n=1, cutoff=_LEAST_SIMILARITY)
    return f"{shown} (did you mean {similar[0]}?)" if similar else shown


def _printable(name: str) -> str:
    """The start of a client's field name, with ``?`` for characters that no header may hold."""
    shown = "".join(c if c.isascii() and c.isprintable() else "?" for c in name[:_MAX_NAME_CHARS])
    return (shown + "..." if len(name) > _MAX_NAME_CHARS else shown) or "''"
