"""JSON schemas as llguidance is given them: what it would get wrong is refused, or written otherwise."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SCHEMAS = ("items", "additionalItems", "additionalProperties", "not")
_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")  # without \u
_OLD_DRAFT = re.compile(r"/draft-0[0-3]\b")  # their keywords are others
# The library's formats allow February 29 of any year, and 61 seconds in any minute.
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = f"(?:[0-9]{{4}}-(?:0[13-9]|1[0-2]|02-[01]|02-2[0-8])|{_LEAP_YEAR}-02-29)"
_FORMATS = {"date": f"^{_DATE}", "date-time": f"^{_DATE}[^:]*:[0-9]{{2}}:[0-5]", "time": "^.{6}[0-5]"}
_MAX_EXACT = 1 << 53  # integers above it are rounded,
_MAX_INTEGER = (1 << 63) - 1  # and bounds above this one to it
_PATTERN_TOKENS = re.compile(r"\\.|\[\^?|\]|&&|--|~~|.", re.DOTALL)

_NEGATED = r"[^\x00"


def adapted_schema(text: str) -> Any:
    """The schema that the library allows valid outputs of, and no others.

    Raises: ValueError naming what the library would take, and get wrong; ValueError, RecursionError,
        TypeError and OverflowError for what is no schema.
    """
    root = json.loads(text)
    _check(root)
    for _, part in schema_parts(root) if isinstance(root, dict) else ():
        if (form := part.get("format")) in _FORMATS:
            part["allOf"] = [*part.get("allOf", ()), {"pattern": _FORMATS[form]}]
        if isinstance(pattern := part.get("pattern"), str):
            part["pattern"] = _adapted_pattern(pattern)
        if isinstance(by_pattern := part.get("patternProperties"), dict):
            part["patternProperties"] = {_adapted_pattern(name): each for name, each in by_pattern.items()}
    return root


def schema_parts(root: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Places and schemas within a schema, each before its own parts."""
    waiting = [("#", root)]
    while waiting:
        place, schema = waiting.pop()
        yield place, schema
        inner: list[tuple[str, Any]] = []
        for key in _SCHEMAS_BY_NAME:
            if isinstance(schema.get(key), dict):
                inner += [(f"{key}/{name}", each) for name, each in schema[key].items()]
        for key in _SCHEMA_LISTS:
            if isinstance(schema.get(key), list):
                inner += [(f"{key}/{index}", each) for index, each in enumerate(schema[key])]
        inner += [(key, schema.get(key)) for key in _SCHEMAS]
        waiting += [(f"{place}/{name}", each) for name, each in reversed(inner) if isinstance(each, dict)]


def _check(root: object) -> None:
    waiting, multiples = [("#", root)], set[Decimal]()
    while waiting:
        place, part = waiting.pop()
        if isinstance(part, dict):
            if isinstance(value := part.get("multipleOf"), int | float):
                multiples.add(Decimal(str(value)))
            if reason := _misread(part):
                raise ValueError(f"{reason} ({place})")
            waiting += [(f"{place}/{name}", each) for name, each in part.items()]
        elif isinstance(part, list):
            waiting += [(f"{place}/{index}", each) for index, each in enumerate(part)]
    if len(multiples) > 1:  # which the library multiplies in 32 bits where they meet
        num_digits = max(0, *(-int(value.as_tuple().exponent) for value in multiples))
        factors = [int(value.scaleb(num_digits)) for value in multiples]
        if math.lcm(*factors) * max(factors) >= 1 << 32:
            raise ValueError("its values of multipleOf have too large a common multiple")


def _misread(schema: Mapping[str, Any]) -> str:
    """Why this part of a schema would be got wrong, without the parts in it; empty if it would not be."""
    if _OLD_DRAFT.search(str(schema.get("$schema"))):
        return "its draft is older than 4"
    required = schema.get("required")
    num_required = len(set(map(str, required))) if isinstance(required, list) else 0
    at_least = schema.get("minProperties")
    if isinstance(at_least, int) and at_least > num_required + 1:  # a key that is written twice would count
        return "minProperties needs more than one property that is not in required"
    for value in _leaves([schema.get("const"), schema.get("enum")]):
        if isinstance(value, int) and abs(value) > _MAX_EXACT:
            return f"an integer of const and enum may be 2**53 at most, got {value}"
        if isinstance(value, str) and _UNWRITABLE.search(value):
            return "const and enum cannot have control characters other than \\b, \\t, \\n, \\f and \\r"
    return _misread_bounds(schema)


def _misread_bounds(schema: Mapping[str, Any]) -> str:
    bounds: dict[str, float] = {}
    for side in ("Minimum", "Maximum"):
        for name in (side.lower(), f"exclusive{side}"):
            value = schema.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                bounds[name] = value
                if isinstance(value, int) and _MAX_EXACT < abs(value) < _MAX_INTEGER:
                    return f"{name} may be 2**53 at most, got {value}"
        if schema.get(f"exclusive{side}") is True and side.lower() in bounds:  # as in draft 4
            bounds[f"exclusive{side}"] = bounds[side.lower()]
    for name, value in bounds.items():
        is_near = any(0 < abs(value - other) < 1 for other in bounds.values())
        if name.startswith("exclusive") and float(value).is_integer() and is_near:
            return f"{name} is an integer, and the other bound is less than 1 from it"
    return ""


def _leaves(value: object) -> Iterator[object]:
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict | list):
            waiting += each.values() if isinstance(each, dict) else each
        else:
            yield each


def _adapted_pattern(pattern: str) -> str:
    """As Rust reads what ECMA does, and with NUL, which is not written anyway, in each negated class.

    In a JSON string the library takes a class of all control characters for one that also has " and \\.

    Raises: ValueError for a class that cannot be written so.
    """
    adapted: list[str] = []
    is_in_class = False
    for token in _PATTERN_TOKENS.findall(pattern):
        if is_in_class and (token == "--" or (token == "]" and adapted[-1] in ("[", _NEGATED))):
            raise ValueError(f"{token} must be escaped in a class of characters, in {pattern!r:.80}")
        if is_in_class and token in ("[", "[^", "&&", "~~"):
            adapted.append("".join(f"\\{letter}" for letter in token))
            continue
        is_in_class = token != "]" and (is_in_class or token[0] == "[")
        adapted.append(_NEGATED if token == "[^" else token)
    return "".join(adapted)
