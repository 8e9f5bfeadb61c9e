"""JSON bodies to pydantic models: errors name the first field that is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from backfill.core.errors import RequestError

Item = TypeVar("Item")
Body = TypeVar("Body", bound=BaseModel)

StrictModel = ConfigDict(strict=True, extra="ignore")

# Limits on the number of values in a body, as parsing one takes up to 1 KB and 3 us.
MAX_CONTAINERS = 16_384
MAX_KEYS = 65_536
MAX_ITEMS = 524_288

_MAX_SHOWN_CHARS = 80  # of a wrong value
MAX_LEVELS = 200  # of pydantic's parser
# Name, the marks that are counted, and how many of them are allowed outside strings.
_LIMITS = (
    ("objects and arrays", (b"{", b"["), MAX_CONTAINERS),
    ("keys", (b":",), MAX_KEYS),
    ("items", (b",",), MAX_ITEMS),
)
# A string, up to the end of the body if it is not closed; possessive, so that no input is read twice.
_STRING = rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)'
_STRINGS = re.compile(_STRING, re.DOTALL)
# In blocks, as one call of ``re`` keeps all other threads waiting.
_BLOCKS = re.compile(rb'(?:[^"]++|' + _STRING + rb"){1,4096}+", re.DOTALL)

# Stops at the first wrong item: a list of a million wrong ones would otherwise be a million errors.
FailFastList = Annotated[list[Item], Field(fail_fast=True)]


def told(**schema: Any) -> Any:
    """What the OpenAPI document says of a value. It is checked elsewhere, with a message of its own."""
    return Field(json_schema_extra=schema)


def parse_body(kind: type[Body], raw: bytes) -> Body:
    """Parse a JSON body. Raises: RequestError naming the first field that is wrong."""
    check_shape(raw)
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise _request_error(error) from None


def check_shape(raw: bytes) -> None:
    """Raise RequestError for too many objects and arrays, keys, or items. The body may be invalid JSON."""
    if all(_num_marks(raw, marks) <= most for _, marks, most in _LIMITS):  # strings included
        return
    counts = dict.fromkeys(_LIMITS, 0)
    for block in _without_strings(raw):
        for limit in _LIMITS:
            name, marks, most = limit
            counts[limit] += _num_marks(block, marks)
            if counts[limit] > most:
                raise RequestError(f"The body may hold at most {most} {name}.")


def _without_strings(raw: bytes) -> Iterator[bytes]:
    for block in _BLOCKS.finditer(raw):
        yield _STRINGS.sub(b"", block[0])


def _num_marks(raw: bytes, marks: tuple[bytes, ...]) -> int:
    return sum(map(raw.count, marks))


def _request_error(error: ValidationError) -> RequestError:
    errors = error.errors(include_url=False)
    # Each member of a union has an error; the one that found a list too long, or got the farthest, is meant.
    place = errors[0]["loc"]
    union = next((at for at, part in enumerate(place) if _is_type_name(part)), None)
    first = max(
        (each for each in errors if each["loc"][:union] == place[:union]),
        key=lambda each: (each["type"] == "too_long", [at for at in each["loc"] if isinstance(at, int)]),
    )
    if first["type"] == "json_invalid":
        if "recursion limit" in first["msg"]:
            return RequestError(f"The body may have at most {MAX_LEVELS} levels of objects and arrays.")
        return RequestError(f"The body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}.")
    path = first["loc"]
    name = str(path[0]) if path else None
    if first["type"] == "missing":
        where = ".".join(map(str, path))
        return RequestError(
            f"Missing required parameter: '{where}'.", param=name, code="missing_required_parameter"
        )
    where = ".".join(str(part) for part in path if not _is_type_name(part))
    if first["type"] == "extra_forbidden":
        message = f"Unknown parameter: '{where}'. '{name}' takes ttft and tpot."
        return RequestError(message, param=where, code="unknown_parameter")
    if first["type"] == "too_long":
        most, got = first["ctx"]["max_length"], first["ctx"]["actual_length"]
        return RequestError(f"'{where}' may have at most {most} items, got {got}.", param=name)
    if name is None:
        return RequestError(f"The body must be a JSON object: {first['msg']}.")
    got, fault = json.dumps(first["input"], default=repr), first["msg"].removeprefix("Value error, ")
    if len(got) > _MAX_SHOWN_CHARS:
        got = f"{got[:_MAX_SHOWN_CHARS]}..."
    param = where if name == "slo" else name
    return RequestError(f"Invalid value for '{where}': {fault}, got {got}.", param=param)


def _is_type_name(part: int | str) -> bool:
    """Pydantic puts the union member it tried into the path; users know only fields and indices."""
    return isinstance(part, str) and (part in {"str", "int"} or "[" in part)
