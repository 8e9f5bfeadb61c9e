"""JSON schemas as llguidance is given them: what it would get wrong is refused, or written otherwise."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SCHEMAS = ("items", "additionalItems", "additionalProperties", "not")
_WITH_PARTS = frozenset((*_SCHEMAS_BY_NAME, *_SCHEMA_LISTS, *_SCHEMAS, "$ref"))
_INNER_POINTER = re.compile(r"#(?!(?:/(?:\$defs|definitions)/[^/%]*)+$)/")
_INDEX = re.compile(r"\+?[0-9]+")  # as the library reads it
_TOO_LARGE = "values of multipleOf that meet have too large a common multiple"
_MAX_MEETING = 100_000  # parts that are looked at for them
_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")  # without \u
_OLD_DRAFT = re.compile(r"/draft-0[0-3]\b")  # their keywords are others
# The library's formats allow February 29 of any year, and 61 seconds in any minute.
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = f"(?:[0-9]{{4}}-(?:0[13-9]|1[0-2]|02-[01]|02-2[0-8])|{_LEAP_YEAR}-02-29)"
_FORMATS = {"date": f"^{_DATE}", "date-time": f"^{_DATE}[^:]*:[0-9]{{2}}:[0-5]", "time": "^.{6}[0-5]"}
_MAX_EXACT = 1 << 53  # integers above it are rounded,
_MAX_INTEGER = (1 << 63) - 1  # and bounds above this one to it
_PATTERN_TOKENS = re.compile(
    r"\(\?(?!P?<)[a-zA-Z]*(?:-[a-zA-Z]+)?"
    r"|\\[pP](?:\{[^}]*\}|.)|\\x00|\\u0000|\\U00000000|\\[xuU]\{0+\}|\\.|\[\^?|\]|&&|--|~~|.",
    re.DOTALL,
)
_FLAGS = re.compile(r"\(\?[ims]*(?:-[ims]+)?")
_NUL = re.compile(r"\0|\\(?:x00|u0000|U00000000|[xuU]\{0+\})")

_NEGATED = r"[^\x00"
# Of drafts 4 to 2020-12, and those of OpenAPI that describe. Others mean nothing, and are allowed.
_KEYWORDS_TEXT = """
    $anchor $comment $defs $dynamicAnchor $dynamicRef $id $recursiveAnchor $recursiveRef $ref $schema
    $vocabulary additionalItems additionalProperties allOf anyOf const contains contentEncoding
    contentMediaType contentSchema default definitions dependencies dependentRequired dependentSchemas
    deprecated description discriminator else enum example examples exclusiveMaximum exclusiveMinimum
    externalDocs format id if items maxContains maxItems maxLength maxProperties maximum minContains
    minItems minLength minProperties minimum multipleOf not oneOf pattern patternProperties
    prefixItems properties propertyNames readOnly required then title type unevaluatedItems
    unevaluatedProperties uniqueItems writeOnly xml
"""
KEYWORDS = frozenset(_KEYWORDS_TEXT.split())


def unknown_keywords(schema: object) -> Iterator[tuple[str, str]]:
    """Places and names of keywords that JSON Schema does not have, but for ``x-`` and what ``$ref`` leads to.

    ``schema``: also as text; what is no schema has none.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):  # refused where it is compiled
            return
    parts = [*schema_parts(schema)] if isinstance(schema, dict) else []
    if all(part.keys() <= KEYWORDS for _, part in parts):
        return
    referred = {place.split("/")[1] for place, _ in parts if "/" in place}
    for place, part in parts:
        for name in part:
            if name not in KEYWORDS and not name.startswith("x-") and not (place == "#" and name in referred):
                yield place, name


def num_patterns(grammar: str) -> int:
    """Different patterns and formats in the JSON schemas of a grammar of the library, which is JSON."""
    found: set[str] = set()
    waiting = [json.loads(grammar)]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            found.update(text for key in ("pattern", "format") if isinstance(text := each.get(key), str))
            by_pattern = each.get("patternProperties")
            found.update(by_pattern if isinstance(by_pattern, dict) else ())
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
    return len(found)


def adapted_schema(text: str) -> Any:
    """The schema that the library allows valid outputs of, and no others.

    Raises: ValueError naming what the library would take, and get wrong; ValueError, RecursionError,
        TypeError and ArithmeticError for what is no schema.
    """
    try:
        root = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not valid JSON: {error}") from None
    if not isinstance(root, dict):
        raise TypeError(f"it must be an object, got {text:.40}{'...' if len(text) > 40 else ''}")
    parts: list[dict[str, Any]] = []
    for place, part in schema_parts(root):
        if reason := _misread(part):
            raise ValueError(f"{reason} ({place})")
        parts.append(part)
        if isinstance(form := part.get("format"), str) and form in _FORMATS:
            part["allOf"] = [*part.get("allOf", ()), {"pattern": _FORMATS[form]}]
        try:
            _adapt_patterns(part)
        except ValueError as error:
            raise ValueError(f"{error} ({place})") from None
    has_inner_id = any(isinstance(part.get(key), str) for part in parts[1:] for key in ("$id", "id"))
    if has_inner_id and any(_INNER_POINTER.search(str(part.get("$ref"))) for part in parts):
        raise ValueError("beside an inner $id, a JSON pointer of $ref may only be of $defs or definitions")
    if _overflows(parts):  # or would if all of them met
        for place, met in [("#", parts)] if has_inner_id else _meeting(root):
            if _overflows(met):
                raise ValueError(f"{_TOO_LARGE} ({place})")
    return root


def schema_parts(root: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Places and schemas within a schema, each once and before its own parts, with what ``$ref`` leads to."""
    seen: dict[int, dict[str, Any]] = {}
    waiting = [("#", root)]
    while waiting:
        place, schema = waiting.pop()
        if id(schema) in seen:
            continue
        seen[id(schema)] = schema
        yield place, schema
        if _WITH_PARTS.isdisjoint(schema):  # most are: a batch's lines are all walked
            continue
        inner: list[tuple[str, Any]] = []
        for key in _SCHEMAS_BY_NAME:
            if isinstance(schema.get(key), dict):
                inner += [(f"{key}/{name}", each) for name, each in schema[key].items()]
        for key in _SCHEMA_LISTS:
            if isinstance(schema.get(key), list):
                inner += [(f"{key}/{index}", each) for index, each in enumerate(schema[key])]
        inner += [(key, schema.get(key)) for key in _SCHEMAS]
        if "$ref" in schema and isinstance(target := _target(root, schema), dict):
            waiting.insert(0, (f"#{schema['$ref'].partition('#')[2]}", target))
        waiting += [(f"{place}/{name}", each) for name, each in reversed(inner) if isinstance(each, dict)]


def _target(root: object, schema: Mapping[str, Any]) -> object:
    """What ``$ref`` of a schema leads to by a JSON pointer from the root; None if it does not."""
    ref = schema.get("$ref")
    uri, _, pointer = (ref if isinstance(ref, str) else "none").partition("#")
    if pointer[:1] != "/" and (uri or pointer):
        return None
    for step in unquote(pointer).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(root, list) and _INDEX.fullmatch(name):
            root = root[int(name)] if int(name) < len(root) else None
        else:
            root = root.get(name) if isinstance(root, dict) else None
    return root


def _meeting(root: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Schemas that may apply to one place of an instance together, by place.

    Raises: ValueError if that cannot be told.
    """
    waiting: list[tuple[str, list[Any]]] = [("#", [root])]
    seen: set[frozenset[int]] = set()
    num_met = 0
    while waiting:
        place, applied = waiting.pop()
        schemas = _applied(root, applied)
        num_met += len(schemas)
        if num_met > _MAX_MEETING:
            raise ValueError(_TOO_LARGE)
        if (key := frozenset(map(id, schemas))) in seen:
            continue
        seen.add(key)
        yield place, schemas
        for kind in (_of_properties, _of_items):
            inner = [kind(each) for each in schemas]
            for name in dict.fromkeys([*(name for named, _, _ in inner for name in named), None]):
                applied = [each for named, rest, any_of in inner for each in (named.get(name, rest), *any_of)]
                waiting.append((f"{place}/{'*' if name is None else name}", applied))
                num_met += len(inner)


def _applied(root: object, schemas: Iterable[object]) -> list[dict[str, Any]]:
    """Schemas, and what they apply to the same place of an instance."""
    found: dict[int, dict[str, Any]] = {}
    waiting = [*schemas]
    while waiting:
        schema = waiting.pop()
        if isinstance(schema, dict) and id(schema) not in found:
            found[id(schema)] = schema
            for key in ("allOf", "anyOf", "oneOf"):
                waiting += schema[key] if isinstance(schema.get(key), list) else ()
            if "$ref" in schema:
                if (target := _target(root, schema)) is None:
                    raise ValueError(_TOO_LARGE)
                waiting.append(target)
    return [*found.values()]


def _of_properties(schema: Mapping[str, Any]) -> tuple[dict[Any, Any], Any, Iterable[Any]]:
    """The schemas of properties by name, the one of others, and those that may be of any."""
    named, by_pattern = (
        each if isinstance(each := schema.get(key), dict) else {}
        for key in ("properties", "patternProperties")
    )
    return named, schema.get("additionalProperties"), by_pattern.values()


def _of_items(schema: Mapping[str, Any]) -> tuple[dict[Any, Any], Any, Iterable[Any]]:
    """The schemas of items by index, the one of others, and those that may be of any."""
    for first, rest in (("prefixItems", "items"), ("items", "additionalItems")):
        if isinstance(schema.get(first), list):
            return dict(enumerate(schema[first])), schema.get(rest), ()
    return {}, schema.get("items"), ()


def _overflows(schemas: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the library, which multiplies values of multipleOf in 32 bits where they meet, cannot here."""
    given = (schema.get("multipleOf") for schema in schemas)
    multiples = {Decimal(str(value)) for value in given if isinstance(value, int | float)}
    if len(multiples) < 2:
        return False
    num_digits = max(0, *(-int(value.as_tuple().exponent) for value in multiples))
    factors = [int(value.scaleb(num_digits)) for value in multiples]
    return math.lcm(*factors) * max(factors) >= 1 << 32


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text:.40} is not a finite number")
    return value


def _misread(schema: Mapping[str, Any]) -> str:
    """Why this part of a schema would be got wrong, without the parts in it; empty if it would not be."""
    if _OLD_DRAFT.search(str(schema.get("$schema"))):
        return "its draft is older than 4"
    multiple = schema.get("multipleOf", 1)
    if isinstance(multiple, bool) or (isinstance(multiple, int | float) and multiple <= 0):
        return f"multipleOf must be a number above 0, got {json.dumps(multiple):.40}"
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


def _adapt_patterns(schema: dict[str, Any]) -> None:
    if isinstance(pattern := schema.get("pattern"), str):
        schema["pattern"] = _adapted_pattern(pattern)
    if isinstance(by_pattern := schema.get("patternProperties"), dict):
        schema["patternProperties"] = {_adapted_pattern(name): each for name, each in by_pattern.items()}


def _adapted_pattern(pattern: str) -> str:
    """As Rust reads what ECMA does, and so that no class has NUL, which is not written anyway.

    In a JSON string the library takes a class of all control characters for one that also has " and \\.

    Raises: ValueError for a class that cannot be written so, and for flags that ECMA does not have: with x
        the library takes spaces and comments of the pattern for a string's.
    """
    adapted: list[str] = []
    is_in_class = False
    for token in _PATTERN_TOKENS.findall(pattern):
        if is_in_class and (token == "--" or (token == "]" and adapted[-1] in ("[", _NEGATED))):
            raise ValueError(f"{token} must be escaped in a class of characters, in {pattern!r:.80}")
        if not is_in_class and token[:2] == "(?" and not _FLAGS.fullmatch(token):
            raise ValueError(f"the flags of {token}) are not ECMA's, in {pattern!r:.80}")
        if is_in_class and token in ("[", "[^", "&&", "~~"):
            adapted.append("".join(f"\\{letter}" for letter in token))
            continue
        if _NUL.fullmatch(token) or token[:2] in (r"\p", r"\P"):  # \x01 is not written either
            adapted.append(rf"[{token}&&[^\x00]]" if token[1:2] in ("p", "P") else r"\x01")
            continue
        is_in_class = token != "]" and (is_in_class or token[0] == "[")
        adapted.append(_NEGATED if token == "[^" else token)
    return "".join(adapted)
