"""OpenAI's response bodies and stream chunks, made from text deltas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from backfill.core.errors import BackfillError, EngineDead, NotReady, RequestError
from backfill.core.request import FinishReason
from backfill.core.slo import SLO
from backfill.generation.generator import TextDelta
from backfill.generation.message_parser import MessageParser
from backfill.generation.timeline import Wait
from backfill.protocol.encoding import EncodedList
from backfill.protocol.generation import Generation
from backfill.protocol.shapes import CompletionShape, Json, ResponseShape

_MAX_ECHOED_CHARS = 500


def error_body(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> Json:
    """OpenAI's error object. A long message, which may echo the input, is cut."""
    return {"error": {"message": shortened(message), "type": kind, "param": param, "code": code}}


def shortened(message: str) -> str:
    return message if len(message) <= _MAX_ECHOED_CHARS else message[:_MAX_ECHOED_CHARS] + "..."


class ErrorAnswer(NamedTuple):
    """HTTP status and body."""

    status: int
    body: Json


def error_of(error: BackfillError) -> ErrorAnswer:
    """The answer to a generation request with this error."""
    if isinstance(error, RequestError):
        status = 404 if error.code == "model_not_found" else 400
        body = error_body(str(error), "invalid_request_error", param=error.param, code=error.code)
        return ErrorAnswer(status, body)
    if isinstance(error, EngineDead | NotReady):
        return ErrorAnswer(
            503, error_body(str(error), "service_unavailable_error", code="server_is_overloaded")
        )
    return ErrorAnswer(500, error_body(str(error), "server_error"))


@dataclass(slots=True)
class Usage:
    """Token counts of one API request over all its prompts and choices.

    Attributes:
        num_prompt_tokens: of every prompt once, however many choices continue it.
        num_cached_tokens: those among them that were found in the prefix cache.
    """

    num_prompt_tokens: int
    num_output_tokens: int = 0
    num_cached_tokens: int = 0

    def as_json(self) -> Json:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


@dataclass(slots=True)
class Attainment:
    """Whether an API request met its objectives: the worst waits of its choices, in seconds."""

    slo: SLO
    ttft_s: float = 0.0
    max_itl_s: float | None = None  # None before any output has a second token

    def add(self, wait: Wait) -> None:
        """Count the wait for a token of a choice."""
        if wait.is_first:
            self.ttft_s = max(self.ttft_s, wait.seconds)
        else:
            self.max_itl_s = max(self.max_itl_s or 0.0, wait.seconds)

    def as_json(self) -> Json:
        return {
            "ttft": round(self.ttft_s, 6),
            "max_itl": None if self.max_itl_s is None else round(self.max_itl_s, 6),
            "ttft_slo": round(self.slo.ttft_s, 6),
            "tpot_slo": round(self.slo.tpot_s, 6),
            "ttft_slo_met": self.ttft_s <= self.slo.ttft_s,
            "tpot_slo_met": self.max_itl_s is None or self.max_itl_s <= self.slo.tpot_s,
        }


@dataclass(slots=True)
class _Choice:
    """One choice's output so far. ``parser``: None where all of it is content."""

    parser: MessageParser | None = None
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[str, EncodedList] = field(default_factory=dict)
    prompt_logprobs: EncodedList | None = None
    num_chars: int = 0  # with what is echoed
    sum_of_logprobs: float = 0.0
    num_cached_tokens: int | None = None  # None before the first token
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class Response:
    """The response to one API request, as its tokens arrive: in chunks, or whole."""

    def __init__(self, generation: Generation, shape: ResponseShape) -> None:
        self._generation = generation
        self._shape = shape
        self._choices = [
            _Choice(shape.parser(generation.parsing), num_chars=len(generation.echo_of(index)))
            for index in range(generation.request.num_choices)
        ]
        self._num_open = len(self._choices)
        self._usage = Usage(generation.request.num_prompt_tokens)
        slo = generation.reported_slo
        self._attainment = None if slo is None else Attainment(slo)

    def add(self, index: int, delta: TextDelta) -> None:
        """Add a choice's next token to the whole body."""
        choice = self._choices[index]
        is_first = choice.num_cached_tokens is None
        self.count_wait(Wait(delta.waited_s, is_first))
        echoed = self._echoed_logprobs(index, delta) if is_first else None
        delta = self._shown(delta)
        for logprobs in (echoed, self._logprobs(choice, delta)):
            for name, entries in (logprobs or {}).items():
                choice.logprobs.setdefault(name, EncodedList()).extend(entries)
        if is_first and self._generation.returns_prompt_logprobs:
            prompt = self._generation.request.prompt_of(index)
            choice.prompt_logprobs = EncodedList()
            choice.prompt_logprobs.extend(self._shape.prompt_logprobs(prompt, delta.prompt_logprobs or ()))
        choice.text.append(delta.text)
        choice.finish_reason = delta.finish_reason
        choice.stop_reason = delta.stop_reason
        self._count(choice, delta)

    def whole(self) -> Json:
        """The whole body, for ``EncodedBody``, once every choice has ended."""
        choices = []
        for position, index in enumerate(self._best()):
            state = self._choices[index]
            assert state.finish_reason is not None
            text = self._generation.echo_of(index) + "".join(state.text)
            message = None if state.parser is None else state.parser.push(text, is_last=True)
            choice = self._choice(
                position,
                self._shape.whole(text if message is None else message),
                state.logprobs or None,
                token_ids=state.token_ids,
                prompt_token_ids=self._generation.request.prompt_of(index),
            )
            choice = _ended(choice, state.finish_reason, state.stop_reason, state.parser)
            if state.prompt_logprobs is not None and not self._shape.has_one_prompt:
                choice["prompt_logprobs"] = state.prompt_logprobs
            choices.append(choice)
        body = self._body(self._shape.object, choices, self._usage, self._attainment)
        body["system_fingerprint"] = None
        if self._shape.has_one_prompt and self._choices[0].prompt_logprobs is not None:
            body["prompt_logprobs"] = self._choices[0].prompt_logprobs
        return body

    def chunks(self, index: int, delta: TextDelta) -> list[Json]:
        """The chunks of a choice's next token, whose text may be withheld: then there may be none.

        A choice's first token is preceded by its opening.
        """
        kind = self._shape.chunk_object
        choice = self._choices[index]
        opening = self._opening(index, delta) if choice.num_cached_tokens is None else None
        delta = self._shown(delta)
        part = self._part(index, delta, self._logprobs(choice, delta))
        self._count(choice, delta)
        self._num_open -= delta.finish_reason is not None
        is_last = self._num_open == 0 and not self._generation.includes_usage
        usage = self._usage if self._generation.usage_on_every_chunk else None
        chunks = [] if opening is None else [self._body(kind, [opening], usage)]
        if part.get("delta") == {} and delta.finish_reason is None and not self._tells_tokens:
            return chunks
        return [*chunks, self._body(kind, [part], usage, self._attainment if is_last else None)]

    def usage_chunk(self) -> Json:
        """The last chunk of a stream that includes usage."""
        return self._body(self._shape.chunk_object, [], self._usage, self._attainment)

    def count_wait(self, wait: Wait) -> None:
        """Count the wait for a token of a stream; it may grow until the token is written."""
        if self._attainment is not None:
            self._attainment.add(wait)

    def _count(self, choice: _Choice, delta: TextDelta) -> None:
        choice.num_chars += len(delta.text)
        choice.sum_of_logprobs += 0.0 if delta.logprobs is None else delta.logprobs.logprob
        if not self._generation.echoes_only:
            choice.token_ids.append(delta.token_id)
            self._usage.num_output_tokens += 1
        if choice.num_cached_tokens != delta.num_cached_tokens:
            choice.num_cached_tokens = delta.num_cached_tokens
            self._usage.num_cached_tokens = self._num_cached_tokens()

    def _num_cached_tokens(self) -> int:
        """Of each prompt, the least of its choices: the others may find what one of them computed."""
        least: dict[int, int] = {}
        for index, choice in enumerate(self._choices):
            if choice.num_cached_tokens is not None:
                prompt = self._generation.request.prompt_index(index)
                least[prompt] = min(choice.num_cached_tokens, least.get(prompt, choice.num_cached_tokens))
        return sum(least.values())

    def _best(self) -> Sequence[int]:
        """The choices that the response has: of each prompt the best ones, the best first."""
        num_best, num_choices = self._generation.num_best, len(self._choices)
        if num_best is None:
            return range(num_choices)

        def mean(index: int) -> float:
            choice = self._choices[index]
            return choice.sum_of_logprobs / max(1, len(choice.token_ids))

        each = num_choices // len(self._generation.request.prompts)
        groups = (range(first, first + each) for first in range(0, num_choices, each))
        return [index for group in groups for index in sorted(group, key=mean, reverse=True)[:num_best]]

    def _logprobs(self, choice: _Choice, delta: TextDelta) -> Json | None:
        """None if the request wants none."""
        if delta.logprobs is None or not self._generation.returns_logprobs:
            return None
        return self._shape.logprobs(delta.token_id, delta.logprobs, choice.num_chars)

    def _part(self, index: int, delta: TextDelta, logprobs: Json | None) -> Json:
        """A choice's part of a chunk."""
        token_ids = [] if self._generation.echoes_only else [delta.token_id]
        parser, reason = self._choices[index].parser, delta.finish_reason
        message = None if parser is None else parser.push(delta.text, is_last=reason is not None)
        content = self._shape.delta(delta.text if message is None else message)
        part = self._choice(index, content, logprobs, token_ids=token_ids)
        return part if reason is None else _ended(part, reason, delta.stop_reason, parser)

    @property
    def _tells_tokens(self) -> bool:
        """Every chunk has more than the text of its token."""
        return self._generation.returns_logprobs or self._generation.returns_token_ids

    def _shown(self, delta: TextDelta) -> TextDelta:
        """What the response has of it."""
        if not self._generation.echoes_only:
            return delta
        return replace(delta, text="", logprobs=None, finish_reason=FinishReason.LENGTH, stop_reason=None)

    def _echoed_logprobs(self, index: int, delta: TextDelta) -> Json | None:
        """Of a choice's prompt, with its first token; None if the request wants none."""
        generation = self._generation
        if not generation.echoes_logprobs:
            return None
        assert isinstance(self._shape, CompletionShape), "a chat echoes nothing"
        num_top = generation.request.samplings[index].logprobs or 0
        return self._shape.echoed_logprobs(
            generation.echo_of(index),
            generation.request.prompt_of(index),
            delta.prompt_logprobs or (),
            num_top,
        )

    def _opening(self, index: int, delta: TextDelta) -> Json | None:
        """What precedes a choice's first token: the chat role, or the echoed prompt."""
        opening = self._shape.opening(self._generation.echo_of(index))
        if opening is None:
            return None
        prompt = self._generation.request.prompt_of(index)
        logprobs = self._echoed_logprobs(index, delta)
        return self._choice(index, opening, logprobs, prompt_token_ids=prompt)

    def _choice(self, index: int, content: Json, logprobs: Json | None, **token_ids: list[int]) -> Json:
        choice: Json = {"index": index, **content, "logprobs": logprobs, "finish_reason": None}
        return choice | token_ids if self._generation.returns_token_ids else choice

    def _body(
        self, kind: str, choices: list[Json], usage: Usage | None, attainment: Attainment | None = None
    ) -> Json:
        body: Json = {
            "id": self._generation.response_id,
            "object": kind,
            "created": self._generation.created,
            "model": self._generation.model,
            "choices": choices,
            "service_tier": self._generation.service_tier,
        }
        if usage is not None:
            body["usage"] = usage.as_json()
        if attainment is not None:
            body["metrics"] = attainment.as_json()
        return body


def _ended(
    choice: Json, finish_reason: FinishReason, stop_reason: int | str | None, parser: MessageParser | None
) -> Json:
    has_calls = finish_reason is FinishReason.STOP and parser is not None and parser.num_calls > 0
    if finish_reason is FinishReason.LENGTH and parser is not None:
        has_calls = parser.has_whole_calls  # all but what ends the message was written
    if has_calls and isinstance(stop_reason, str) and parser is not None and parser.is_cut:
        has_calls = False  # a stop string of the client's within arguments
    reason = "tool_calls" if has_calls else finish_reason.value
    return {**choice, "finish_reason": reason, "stop_reason": stop_reason}
