"""OpenAI's response bodies and stream chunks, made from text deltas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from backfill.core.errors import BackfillError, EngineDead, NotReady, RequestError
from backfill.core.plan import TokenLogprobs
from backfill.core.request import FinishReason
from backfill.core.slo import SLO
from backfill.generation.generator import TextDelta
from backfill.generation.tokenizer import Tokenizer
from backfill.protocol.encoding import EncodedList
from backfill.protocol.generation import Generation

Json = dict[str, Any]

_MAX_ECHOED_CHARS = 500


def error_body(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> Json:
    """OpenAI's error object. A long message, which may echo the input, is cut."""
    return {"error": {"message": shortened(message), "type": kind, "param": param, "code": code}}


def shortened(message: str) -> str:
    return message if len(message) <= _MAX_ECHOED_CHARS else message[:_MAX_ECHOED_CHARS] + "..."


def error_of(error: BackfillError) -> tuple[int, Json]:
    """HTTP status and body for an error of a generation request."""
    if isinstance(error, RequestError):
        status = 404 if error.code == "model_not_found" else 400
        return status, error_body(str(error), "invalid_request_error", param=error.param, code=error.code)
    if isinstance(error, EngineDead | NotReady):
        return 503, error_body(str(error), "service_unavailable_error", code="server_is_overloaded")
    return 500, error_body(str(error), "server_error")


@dataclass(slots=True)
class Usage:
    """Token counts of one API request over all its prompts and choices."""

    num_prompt_tokens: int
    num_output_tokens: int = 0

    def as_json(self) -> Json:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
        }


@dataclass(slots=True)
class Attainment:
    """Whether an API request met its objectives: the worst of its choices, in seconds, measured here."""

    slo: SLO
    ttft_s: float = 0.0
    max_itl_s: float | None = None  # None before any output has a second token

    def add(self, waited_s: float, *, is_first: bool) -> None:
        """Count a token of a choice."""
        if is_first:
            self.ttft_s = max(self.ttft_s, waited_s)
        else:
            self.max_itl_s = max(self.max_itl_s or 0.0, waited_s)

    def as_json(self) -> Json:
        return {
            "ttft": round(self.ttft_s, 6),
            "max_itl": None if self.max_itl_s is None else round(self.max_itl_s, 6),
            "ttft_slo_met": self.ttft_s <= self.slo.ttft_s,
            "tpot_slo_met": self.max_itl_s is None or self.max_itl_s <= self.slo.tpot_s,
        }


@dataclass(slots=True)
class ChoiceState:
    """One choice's output so far."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[str, EncodedList] = field(default_factory=dict)
    num_chars: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def add(self, delta: TextDelta) -> None:
        self.text.append(delta.text)
        self.num_chars += len(delta.text)
        self.token_ids.append(delta.token_id)
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason

    def add_logprobs(self, logprobs: Json | None) -> None:
        """Add one delta's: lists, by name."""
        for name, entries in (logprobs or {}).items():
            self.logprobs.setdefault(name, EncodedList()).extend(entries)


class ResponseShape:
    """What the two endpoints' bodies differ in."""

    object: str
    chunk_object: str

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def logprobs(self, delta: TextDelta, num_chars: int) -> Json | None:
        """The delta's log probabilities; None if the request wants none.

        Args:
            num_chars: length of the choice's output before the delta, which is the token's text offset.
        """
        return None if delta.logprobs is None else self._logprobs(delta.token_id, delta.logprobs, num_chars)

    def delta(self, text: str) -> Json:
        """Text in a chunk."""
        raise NotImplementedError

    def opening(self, echoed: str) -> Json | None:
        """What a choice's first chunk holds; None if nothing precedes the output."""
        raise NotImplementedError

    def whole(self, text: str) -> Json:
        """Text in a whole body."""
        raise NotImplementedError

    def _logprobs(self, token_id: int, logprobs: TokenLogprobs, num_chars: int) -> Json:
        raise NotImplementedError


class ChatShape(ResponseShape):
    """Bodies of ``/v1/chat/completions``."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def delta(self, text: str) -> Json:
        return {"delta": {"content": text}}

    def opening(self, echoed: str) -> Json | None:
        return {"delta": {"role": "assistant", "content": echoed}}

    def whole(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text}}

    def _logprobs(self, token_id: int, logprobs: TokenLogprobs, num_chars: int) -> Json:
        top = [self._entry(other, logprob) for other, logprob in logprobs.top]
        return {"content": [{**self._entry(token_id, logprobs.logprob), "top_logprobs": top}]}

    def _entry(self, token_id: int, logprob: float) -> Json:
        text = self._tokenizer.token_text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(self._tokenizer.token_bytes(token_id))}


class CompletionShape(ResponseShape):
    """Bodies of ``/v1/completions``."""

    object = "text_completion"
    chunk_object = "text_completion"

    def delta(self, text: str) -> Json:
        return {"text": text}

    def opening(self, echoed: str) -> Json | None:
        return {"text": echoed} if echoed else None

    def whole(self, text: str) -> Json:
        return {"text": text}

    def _logprobs(self, token_id: int, logprobs: TokenLogprobs, num_chars: int) -> Json:
        text = self._tokenizer.token_text
        return {
            "tokens": [text(token_id)],
            "token_logprobs": [logprobs.logprob],
            "top_logprobs": [{text(other): logprob for other, logprob in logprobs.top}],
            "text_offset": [num_chars],
        }


def chunk(
    generation: Generation,
    shape: ResponseShape,
    choices: list[Json],
    usage: Usage | None = None,
    attainment: Attainment | None = None,
) -> Json:
    """One chunk of a stream."""
    return _body(generation, shape.chunk_object, choices, usage, attainment)


def chunk_choice(
    generation: Generation, shape: ResponseShape, index: int, delta: TextDelta, logprobs: Json | None
) -> Json:
    """A choice's part of a chunk."""
    choice: Json = {
        "index": index,
        **shape.delta(delta.text),
        "logprobs": logprobs,
        "finish_reason": None if delta.finish_reason is None else delta.finish_reason.value,
    }
    if delta.finish_reason is not None:
        choice["stop_reason"] = delta.stop_reason
    if generation.returns_token_ids:
        choice["token_ids"] = [delta.token_id]
    return choice


def opening_choice(generation: Generation, shape: ResponseShape, index: int) -> Json | None:
    """A choice's first chunk, sent with its first token: the chat role, or the echoed prompt."""
    opening = shape.opening(generation.echo_of(index))
    if opening is None:
        return None
    choice: Json = {"index": index, **opening, "logprobs": None, "finish_reason": None}
    if generation.returns_token_ids:
        choice["prompt_token_ids"] = generation.request.prompt_of(index)
    return choice


def whole_body(
    generation: Generation,
    shape: ResponseShape,
    states: Sequence[ChoiceState],
    usage: Usage,
    attainment: Attainment | None = None,
) -> Json:
    """A body for ``EncodedBody``."""
    choices = []
    for index, state in enumerate(states):
        assert state.finish_reason is not None
        choice: Json = {
            "index": index,
            **shape.whole(generation.echo_of(index) + "".join(state.text)),
            "logprobs": state.logprobs or None,
            "finish_reason": state.finish_reason.value,
            "stop_reason": state.stop_reason,
        }
        if generation.returns_token_ids:
            choice["token_ids"] = state.token_ids
            choice["prompt_token_ids"] = generation.request.prompt_of(index)
        choices.append(choice)
    return {**_body(generation, shape.object, choices, usage, attainment), "system_fingerprint": None}


def _body(
    generation: Generation,
    kind: str,
    choices: list[Json],
    usage: Usage | None,
    attainment: Attainment | None,
) -> Json:
    body: Json = {
        "id": generation.response_id,
        "object": kind,
        "created": generation.created,
        "model": generation.model,
        "choices": choices,
        "service_tier": generation.service_tier,
    }
    if usage is not None:
        body["usage"] = usage.as_json()
    if attainment is not None:
        body["metrics"] = attainment.as_json()
    return body
