"""The results of lines: how a line runs on the engine, and OpenAI's Batch API format of its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from backfill.core.errors import EngineDead, RequestError
from backfill.jobs.records import LineOutcome, TokenUsage
from backfill.preparation.lines import BatchLine
from backfill.protocol.encoding import EncodedBody
from backfill.protocol.responses import ErrorAnswer, error_of
from backfill.protocol.service import CompletionService, TokenCount

_UNANSWERED_MESSAGES = {
    "batch_expired": "This request could not be executed before the completion window expired.",
    "batch_cancelled": "This request was cancelled with its batch before it was executed.",
    "engine_error": "The engine failed several times while it ran this request.",
    "internal_error": "The server had an error while it ran this request.",
}


def of_a_choice(line: BatchLine, num_tokens: int) -> int:
    """Tokens of all choices of a line, as the mean of one."""
    return num_tokens // (1 if line.generation is None else line.generation.request.num_choices)


@dataclass(frozen=True, slots=True)
class LineResult:
    """The result of one line, before it has an id. ``warning``: fields of its body that had no effect."""

    line: BatchLine
    outcome: LineOutcome
    response: dict[str, Any] | None
    error: dict[str, Any] | None
    usage: TokenUsage = field(default_factory=TokenUsage)
    warning: str | None = None

    @property
    def num_output_tokens(self) -> int | None:
        """Mean of the choices; None without an answer."""
        if self.outcome is not LineOutcome.COMPLETED:
            return None
        return of_a_choice(self.line, self.usage.output_tokens)

    def encode(self, line_id: str) -> bytes:
        record = {
            "id": line_id,
            "custom_id": self.line.custom_id,
            "response": self.response,
            "error": self.error,
        }
        if self.warning is not None:
            record["warning"] = self.warning
        return bytes(EncodedBody(record)) + b"\n"


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """The token counts of a response body."""

    prompt_tokens_details: _Details | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def tokens(self) -> TokenUsage:
        details = self.prompt_tokens_details
        cached = details.cached_tokens if details is not None else None
        return TokenUsage(self.prompt_tokens, cached or 0, self.completion_tokens)


@dataclass(frozen=True, slots=True)
class ServiceRunner:
    """A ``LineRunner`` on the current service: runs a line as the online API would."""

    service: Callable[[], CompletionService | None]  # None while no engine is ready

    async def run(
        self, line: BatchLine, count: TokenCount | None = None, *, is_alone: bool = False
    ) -> LineResult:
        """Raises: RequestLost."""
        if line.refusal is not None:
            return refused(line, line.refusal)
        if line.generation is None:
            return unanswered(line, "internal_error")
        service = self.service()
        if service is None:
            raise EngineDead("The engine is not running.")
        try:
            body = await service.run_whole(line.generation, count=count)
        except RequestError as error:  # it cannot go on as it stands
            return refused(line, error_of(error))
        return completed(line, body, line.generation.warning)


def completed(line: BatchLine, body: dict[str, Any], warning: str | None = None) -> LineResult:
    response = {"status_code": 200, "request_id": line.request_id, "body": body}
    usage = msgspec.convert(body.get("usage") or {}, Usage).tokens()
    return LineResult(line, LineOutcome.COMPLETED, response, None, usage, warning)


def refused(line: BatchLine, answer: ErrorAnswer) -> LineResult:
    """A line whose request was refused."""
    response = {"status_code": answer.status, "request_id": line.request_id, "body": answer.body}
    return LineResult(line, LineOutcome.FAILED, response, None)


def unanswered(line: BatchLine, code: str, outcome: LineOutcome = LineOutcome.FAILED) -> LineResult:
    """A line that has no answer, and why."""
    return LineResult(line, outcome, None, {"code": code, "message": _UNANSWERED_MESSAGES[code]})
