"""The lines of a batch: reading input lines, writing result lines (OpenAI's Batch API formats)."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import msgspec

from backfill.jobs.records import LineError, LineOutcome, TokenUsage
from backfill.protocol.batches import BATCH_ENDPOINTS

MAX_CUSTOM_ID_BYTES = 512

_UNRUN_MESSAGES = {
    "batch_expired": "This request could not be executed before the completion window expired.",
    "batch_cancelled": "This request was cancelled with its batch before it was executed.",
    "engine_error": "The engine ended several times while it ran this request alone.",
    "internal_error": "The server had an error while it ran this request.",
}


class _Line(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _ModelOf(msgspec.Struct):
    model: str | None = None


# Escapes in JSON strings; the group matches halves of surrogate pairs without their other half.
_ESCAPES = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\."
)
_NO_NUMBERS = re.compile(rb"NaN|-?Infinity")
_POSITION = re.compile(r"byte (\d+)")
_WRONG_FIELD = re.compile(r"at `\$\.(\w+)`$")

_line_decoder = msgspec.json.Decoder(_Line)
_model_decoder = msgspec.json.Decoder(_ModelOf)
_encoder = msgspec.json.Encoder()


@dataclass(slots=True)
class BatchLine:
    """One request. ``number`` counts lines of the file from 1, blank ones included.

    ``complete_by_s`` is the end of its batch's completion window, on the monotonic clock; None where there is
    no window. Of the engines that died with the line in flight, in ``num_lone_deaths`` no other was.
    """

    number: int
    custom_id: str
    method: str
    url: str
    body: bytes
    num_engine_deaths: int = 0
    complete_by_s: float | None = None
    num_lone_deaths: int = 0


@dataclass(frozen=True, slots=True)
class LineResult:
    """What one line came to, before it is given an id and written."""

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
        return _encoder.encode(record) + b"\n"


class BadLine(Exception):
    """A line that is no request; carries what the batch reports of it."""

    def __init__(self, code: str, message: str, line: int, param: str | None = None) -> None:
        super().__init__(message)
        self.error = LineError(code, message, line, param)


def read_lines(file: BinaryIO, max_line_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of each line that is not blank. A longer line is cut one byte over the limit."""
    number = 0
    while data := file.readline(max_line_bytes + 1):
        number += 1
        if number == 1:  # what some programs put at the start of a text file
            data = data.removeprefix(codecs.BOM_UTF8)
        rest = data
        while not rest.endswith(b"\n") and len(rest) > max_line_bytes:
            rest = file.readline(max_line_bytes + 1)
        if data.strip():
            yield number, data


def parse_line(number: int, data: bytes, max_line_bytes: int) -> BatchLine:
    """Raises: BadLine."""
    if len(data) > max_line_bytes:
        raise BadLine("invalid_value", f"This line is longer than {max_line_bytes} bytes.", number)
    try:
        line = _decode(data)
    except msgspec.ValidationError as error:
        missing = _missing_field(str(error))
        if missing is not None:
            message = f"Missing required parameter: '{missing}'."
            raise BadLine("missing_required_parameter", message, number, missing) from None
        wrong = _WRONG_FIELD.search(str(error))
        message = f"This line is no batch request: {error}."
        raise BadLine("invalid_value", message, number, wrong and wrong[1]) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"This line is not parseable as valid JSON: {_why_no_json(data, error)}."
        raise BadLine("invalid_json_line", message, number) from None
    if not line.custom_id or len(line.custom_id.encode(errors="replace")) > MAX_CUSTOM_ID_BYTES:
        message = f"custom_id must be a string of 1 to {MAX_CUSTOM_ID_BYTES} bytes."
        raise BadLine("invalid_value", message, number, "custom_id")
    if line.method != "POST":
        raise BadLine("invalid_value", "method must be POST.", number, "method")
    body = bytes(line.body)
    if not body.startswith(b"{"):
        raise BadLine("invalid_value", "body must be an object.", number, "body")
    return BatchLine(number, line.custom_id, line.method, line.url, body)


def check_target(line: BatchLine, endpoint: str | None) -> None:
    """Raise BadLine unless the line is for the batch's endpoint, or, with None, for any there is."""
    if endpoint is None:
        if line.url not in BATCH_ENDPOINTS:
            message = f"url must be {' or '.join(BATCH_ENDPOINTS)}, got {line.url[:80]!r}."
            raise BadLine("invalid_value", message, line.number, "url")
    elif line.url != endpoint:
        message = f"url must be the batch's endpoint {endpoint}, got {line.url[:80]!r}."
        raise BadLine("url_mismatch", message, line.number, "url")


def model_of(line: BatchLine) -> str | None:
    """The model the body names. Raises: BadLine."""
    try:
        return _model_decoder.decode(line.body).model
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise BadLine("invalid_value", "model must be a string.", line.number, "model") from None


def completed(line: BatchLine, body: dict[str, Any], request_id: str) -> LineResult:
    usage = body.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    return LineResult(
        line,
        LineOutcome.COMPLETED,
        {"status_code": 200, "request_id": request_id, "body": body},
        None,
        TokenUsage(
            usage.get("prompt_tokens", 0),
            details.get("cached_tokens") or 0,
            usage.get("completion_tokens", 0),
        ),
    )


def refused(line: BatchLine, status: int, body: dict[str, Any], request_id: str) -> LineResult:
    """The model's refusal of the request, with the body the online API answers."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return LineResult(line, LineOutcome.FAILED, response, None)


def unrun(line: BatchLine, code: str, outcome: LineOutcome = LineOutcome.FAILED) -> LineResult:
    """A line that has no answer, and why."""
    return LineResult(line, outcome, None, {"code": code, "message": _UNRUN_MESSAGES[code]})


def _decode(data: bytes) -> _Line:
    """The line; in its body, a half of a surrogate pair becomes the replacement character.

    Programs that cut text within a pair write such halves as escapes. No text holds them, so no model
    could be given them.
    """
    try:
        return _line_decoder.decode(data)
    except msgspec.DecodeError:
        repaired = _ESCAPES.sub(lambda found: b"\\ufffd" if found[1] else found[0], data)
        if repaired == data:
            raise
        line = _line_decoder.decode(repaired)
        if "\ufffd" in line.custom_id:  # it would not be found again by its name
            raise
        return line


def _why_no_json(data: bytes, error: Exception) -> str:
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "it is UTF-16, where UTF-8 is needed"
    reason = str(error).removeprefix("JSON is malformed: ")
    position = _POSITION.search(reason)
    if position is not None:
        at = int(position[1])
        word = _NO_NUMBERS.search(data, max(0, at - 2), at + 9)
        if word is not None:
            return f"{word[0].decode()} is no number in JSON ({position[0]})"
    return "it ends too early" if reason == "Input data was truncated" else reason


def _missing_field(message: str) -> str | None:
    prefix = "Object missing required field `"
    return message[len(prefix) :].partition("`")[0] if message.startswith(prefix) else None
