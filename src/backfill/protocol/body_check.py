"""Checks of a body that need no tokens: unknown fields, and errors of batch lines."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from backfill.core.errors import RequestError
from backfill.core.sampling import SamplingParams
from backfill.execution.executor import ExecutorInfo
from backfill.execution.json_schemas import KEYWORDS, unknown_keywords
from backfill.protocol.generation import GenerationBody
from backfill.protocol.generation_fields import GenerationFields
from backfill.protocol.options import MAX_RESPONSE_TOKENS

# A warning becomes a header, so its length is bounded.
_MAX_NAMED_FIELDS = 5
_MAX_NAME_CHARS = 40
_LEAST_SIMILARITY = 0.75
_MAX_PLACE_CHARS = 60
_EMPTY_SLO = "slo has neither ttft nor tpot, so it has no effect"


def has_warning(body: GenerationFields) -> bool:
    """Whether ``warning_of`` is not None, without looking for the names that its text suggests."""
    return bool(body.unknown_fields) or _has_empty_slo(body) or any(_unknown_keywords(body))


def warning_of(body: GenerationFields) -> str | None:
    """What of the body has no effect, as short printable ASCII; None if all has.

    That is unknown fields, unknown keywords of its JSON schemas, ``nullable``, and an empty ``slo``.
    """
    parts = []
    if unknown := body.unknown_fields:
        parts.append(unknown_fields_warning(unknown, body.known_fields()))
    if keywords := [*_unknown_keywords(body)]:
        named = [_named_keyword(place, name) for _, place, name in keywords[:_MAX_NAMED_FIELDS]]
        parts.append("unknown keywords in schemas: " + _listed(named, len(keywords)))
    if _has_empty_slo(body):
        parts.append(_EMPTY_SLO)
    return "; ".join(parts) or None


def unknown_fields_warning(unknown: Sequence[str], known: Collection[str]) -> str:
    """Names unknown fields, as short printable ASCII, with the known ones like them."""
    named = [_named(name, known) for name in unknown[:_MAX_NAMED_FIELDS]]
    return "unknown fields: " + _listed(named, len(unknown))


def refuse_unknown_fields(body: GenerationFields) -> None:
    """Raise RequestError for the first unknown field or keyword of a JSON schema, or an empty ``slo``.

    Not for ``nullable``, which generators of OpenAPI 3.0 write.
    """
    unknown = body.unknown_fields
    if unknown:
        name = _named(unknown[0], body.known_fields())
        raise RequestError(
            f"Unknown parameter: {name}.", param=_printable(unknown[0]), code="unknown_parameter"
        )
    for field, place, name in _unknown_keywords(body):
        if name == "nullable":
            continue
        message = f"Unknown keyword in a schema: {_named_keyword(place, name)}."
        raise RequestError(message, param=field, code="unknown_parameter")
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


def check_prompt_logprobs(body: GenerationBody, sampling: SamplingParams, num_tokens: int, most: int) -> None:
    """Raise RequestError for more log probabilities of ``num_tokens`` of prompts than a response may hold."""
    if sampling.prompt_logprobs is None:
        return
    if num_tokens * sampling.n * (1 + sampling.prompt_logprobs) > most:
        name = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        raise RequestError(
            f"The response would be too large: prompt tokens x n x (1 + {name}) may be at most {most}, "
            f"got {num_tokens} prompt tokens, n {sampling.n} and {name} {sampling.prompt_logprobs}.",
            param=name,
        )


def _has_empty_slo(body: GenerationFields) -> bool:
    return body.slo is not None and not body.slo.as_dict()


def _unknown_keywords(body: GenerationFields) -> Iterator[tuple[str, str, str]]:
    """Field, place in its schema, and name."""
    for field, schema in body.json_schemas:
        for place, name in unknown_keywords(schema):
            yield field, place, name


def _listed(named: Sequence[str], num_all: int) -> str:
    num_others = num_all - len(named)
    return ", ".join(named) + (f" and {num_others} more" if num_others else "")


def _named(name: str, known: Collection[str]) -> str:
    """A field as a warning names it, with the one among its neighbours that may be meant."""
    shown, (path, dot, last) = _printable(name), name.rpartition(".")
    beside = [each.rpartition(".")[2] for each in known if each.rpartition(".")[0] == path]
    similar = _similar(last, beside)
    return f"{shown} (did you mean {path}{dot}{similar}?)" if similar else shown


def _named_keyword(place: str, name: str) -> str:
    if name == "nullable":
        return f"nullable at {_printable(place, _MAX_PLACE_CHARS)} (without effect: add null to type)"
    similar = _similar(name, KEYWORDS)
    meant = f" (did you mean {similar}?)" if similar else ""
    return f"{_printable(name)} at {_printable(place, _MAX_PLACE_CHARS)}{meant}"


def _similar(name: str, known: Collection[str]) -> str | None:
    found = difflib.get_close_matches(name[:_MAX_NAME_CHARS], sorted(known), n=1, cutoff=_LEAST_SIMILARITY)
    return found[0] if found else None


def _printable(name: str, most: int = _MAX_NAME_CHARS) -> str:
    """The start of a client's field name, with ``?`` for characters that no header may hold."""
    shown = "".join(c if c.isascii() and c.isprintable() else "?" for c in name[:most])
    return (shown + "..." if len(name) > most else shown) or "''"
