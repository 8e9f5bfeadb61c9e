"""The input lines of a batch (OpenAI's Batch API format)."""

from __future__ import annotations

import codecs
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import msgspec

from backfill.protocol.batches import BATCH_ENDPOINTS
from backfill.protocol.generation import Generation
from backfill.protocol.responses import ErrorAnswer

MAX_CUSTOM_ID_BYTES = 512


class _Line(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


WARNING = "warning"  # code of a LineError
_BACKSLASH, _NO_ESCAPE = b"\\\\", b"\0\0"  # an escaped one; JSON has no zero bytes
# Escapes of lone halves of surrogate pairs, in JSON whose escaped backslashes are masked.
_LONE_HALVES = re.compile(
    rb"\\u(?:[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u)[dD][c-fC-F][0-9a-fA-F]{2})"
)
_OBJECT = "an object"
# Of JSON values, by their first byte.
_KINDS = {b"{": _OBJECT, b"[": "an array", b'"': "a string", b"t": "true", b"f": "false", b"n": "null"}
_TYPES = {"int": "a number", "float": "a number", "bool": "a boolean", "array": "an array", "object": _OBJECT}
_NOT_NUMBERS = re.compile(rb"NaN|-?Infinity")
_POSITION = re.compile(r"byte (\d+)")
# Of a field that is no string, what it is and its name.
_WRONG_FIELD = re.compile(r"got `(\w+)` - at `\$\.(\w+)`$")

_line_decoder = msgspec.json.Decoder(_Line)


class BatchLine(msgspec.Struct, kw_only=True):
    """One request of a batch, on its way from the file to the engine.

    Attributes:
        number: line number in the file, from 1; blank lines count.
        num_bytes: length of the line, for bounding memory.
        request_id: as the line's result names it.
        generation, refusal: the prepared body, or what the online API would answer where it refuses it; both
            None if only names were read or the body could not be prepared.
    """

    number: int
    custom_id: str
    num_bytes: int = 0
    request_id: str = ""
    generation: Generation | None = None
    refusal: ErrorAnswer | None = None


def as_taken(generation: Generation, num_reused_tokens: int) -> Generation:
    """A line's generation as it runs now."""
    request = generation.request.as_planned(num_reused_tokens)
    return msgspec.structs.replace(generation, request=request, created=int(time.time()))


@dataclass(frozen=True, slots=True)
class LineError:
    """Why an input file is refused, or with the code ``WARNING`` what it is warned of.

    ``line`` counts from 1, None for the whole file.
    """

    code: str
    message: str
    line: int | None = None
    param: str | None = None

    @property
    def is_warning(self) -> bool:
        return self.code == WARNING


@dataclass(frozen=True, slots=True)
class InputLine:
    """A line of the file, its body not parsed."""

    number: int
    custom_id: str
    url: str
    body: bytes


class BadLine(Exception):
    """A line that is not a batch request. ``error`` is the batch's report of it."""

    def __init__(self, code: str, message: str, line: int, param: str | None = None) -> None:
        super().__init__(message)
        self.error = LineError(code, message, line, param)


def read_lines(file: BinaryIO, max_line_bytes: int, *, after: int = 0) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of each line that is not blank. Longer lines are cut to ``max_line_bytes + 1``.

    Args:
        after: number of the last line before the file's position.
    """
    number = after
    while data := file.readline(max_line_bytes + 1):
        number += 1
        if number == 1:  # some programs start text files with a byte order mark
            data = data.removeprefix(codecs.BOM_UTF8)
        rest = data
        while not rest.endswith(b"\n") and len(rest) > max_line_bytes:
            rest = file.readline(max_line_bytes + 1)
        if data.strip():
            yield number, data


def parse_line(number: int, data: bytes, max_line_bytes: int) -> InputLine:
    """Parse a line, but not its body. Raises: BadLine."""
    if len(data) > max_line_bytes:
        raise BadLine("invalid_value", f"This line is longer than {max_line_bytes} bytes.", number)
    try:
        line = _decode(data)
    except msgspec.ValidationError as error:
        kind = _kind_of(data.lstrip())
        if kind != _OBJECT:
            raise BadLine("invalid_value", f"This line must be a JSON object, got {kind}.", number) from None
        missing = _missing_field(str(error))
        if missing is not None:
            message = f"Missing required parameter: '{missing}'."
            raise BadLine("missing_required_parameter", message, number, missing) from None
        wrong = _WRONG_FIELD.search(str(error))
        if wrong is None:
            raise BadLine("invalid_value", f"This line is not a batch request: {error}.", number) from None
        message = f"{wrong[2]} must be a string, got {_TYPES.get(wrong[1], wrong[1])}."
        raise BadLine("invalid_value", message, number, wrong[2]) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"This line is not parseable as valid JSON: {_why_not_json(data, error)}."
        raise BadLine("invalid_json_line", message, number) from None
    if not line.custom_id or len(line.custom_id.encode(errors="replace")) > MAX_CUSTOM_ID_BYTES:
        message = f"custom_id must be a string of 1 to {MAX_CUSTOM_ID_BYTES} bytes."
        raise BadLine("invalid_value", message, number, "custom_id")
    if line.method != "POST":
        raise BadLine("invalid_value", "method must be POST.", number, "method")
    body = bytes(line.body)
    if _kind_of(body) != _OBJECT:
        raise BadLine("invalid_value", f"body must be a JSON object, got {_kind_of(body)}.", number, "body")
    return InputLine(number, line.custom_id, line.url, body)


def check_target(line: InputLine, endpoint: str | None) -> None:
    """Raise BadLine unless the line's url is ``endpoint``, or any batch endpoint for None."""
    if endpoint is None:
        if line.url not in BATCH_ENDPOINTS:
            message = f"url must be {' or '.join(BATCH_ENDPOINTS)}, got {line.url[:80]!r}."
            raise BadLine("invalid_value", message, line.number, "url")
    elif line.url != endpoint:
        message = f"url must be the batch's endpoint {endpoint}, got {line.url[:80]!r}."
        raise BadLine("url_mismatch", message, line.number, "url")


def _decode(data: bytes) -> _Line:
    """Decode a line, with the replacement character for lone halves of surrogate pairs in its body.

    Programs that cut text inside a pair write such escapes. They are not valid text, so no tokenizer takes
    them.
    """
    try:
        return _line_decoder.decode(data)
    except msgspec.DecodeError:
        # A callback lets other threads run. Other escapes have none: a line may have millions.
        escaped = data.replace(_BACKSLASH, _NO_ESCAPE)
        masked, num_lone = _LONE_HALVES.subn(lambda _: rb"\ufffd", escaped)
        if not num_lone or b"\0" in data:
            raise
        repaired = masked.replace(_NO_ESCAPE, _BACKSLASH)
        line = _line_decoder.decode(repaired)
        if "\ufffd" in line.custom_id:  # the client could not match the result by this id
            raise
        return line


def _kind_of(value: bytes) -> str:
    """What kind of JSON begins here, in words."""
    return _KINDS.get(value[:1], "a number")


def _why_not_json(data: bytes, error: Exception) -> str:
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "it is UTF-16, but must be UTF-8"
    reason = str(error).removeprefix("JSON is malformed: ")
    position = _POSITION.search(reason)
    if position is not None:
        at = int(position[1])
        literal = _NOT_NUMBERS.search(data, max(0, at - 2), at + 9)
        if literal is not None:
            return f"{literal[0].decode()} is not a number in JSON ({position[0]})"
    return "it ends too early" if reason == "Input data was truncated" else reason


def _missing_field(message: str) -> str | None:
    prefix = "Object missing required field `"
    return message[len(prefix) :].partition("`")[0] if message.startswith(prefix) else None
