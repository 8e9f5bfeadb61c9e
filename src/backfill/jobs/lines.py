"""The result lines of a batch (OpenAI's Batch API formats)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from backfill.jobs.records import LineOutcome, TokenUsage
from backfill.preparation.lines import BatchLine
from backfill.protocol.encoding import EncodedBody

_UNANSWERED_MESSAGES = {
    "batch_expired": "This request could not be executed before the completion window expired.",
    "batch_cancelled": "This request was cancelled with its batch before it was executed.",
    "engine_error": "The engine failed several times while it ran this request.",
    "internal_error": "The server had an error while it ran this request.",
}


@dataclass(frozen=True, slots=True)
class LineResult:
    """The result of one line, before it has an id."""

    line: BatchLine
    outcome: LineOutcome
    response: dict[str, Any] | None
    error: dict[str, Any] | None
    usage: TokenUsage = field(default_factory=TokenUsage)

    def encode(self, line_id: str) -> bytes:
        record = {
            "id": line_id,
            "custom_id": self.line.custom_id,
            "response": self.response,
            "error": self.error,
        }
        return bytes(EncodedBody(record)) + b"\n"


def completed(line: BatchLine, body: dict[str, Any]) -> LineResult:
    usage = body.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    return LineResult(
        line,
        LineOutcome.COMPLETED,
        {"status_code": 200, "request_id": line.request_id, "body": body},
        None,
        TokenUsage(
            usage.get("prompt_tokens", 0),
            details.get("cached_tokens") or 0,
            usage.get("completion_tokens", 0),
        ),
    )


def refused(line: BatchLine) -> LineResult:
    """A line whose request was refused, with the error body of the online API."""
    assert line.refusal is not None
    response = {
        "status_code": line.refusal.status,
        "request_id": line.request_id,
        "body": line.refusal.body,
    }
    return LineResult(line, LineOutcome.FAILED, response, None)


def unanswered(line: BatchLine, code: str, outcome: LineOutcome = LineOutcome.FAILED) -> LineResult:
    """A line that has no answer, and why."""
    return LineResult(line, outcome, None, {"code": code, "message": _UNANSWERED_MESSAGES[code]})
