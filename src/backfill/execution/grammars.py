"""Grammars of structured outputs: compiled for a model's tokenizer by llguidance, and cached."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backfill.core.errors import RequestError
from backfill.core.structured import GrammarKind, StructuredOutputsParams
from backfill.execution.structural_tags import structural_tag_grammar

if TYPE_CHECKING:  # imported at the first grammar: most servers need none of it
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_MAX_CACHED = 256
_MAX_CACHED_CHARS = 2 << 20  # of their texts: one of 64 Ki takes up to 10 MB
_MAX_COMPILE_S = 5.0  # more than the largest that is allowed takes, so that only a machine in need is slower
# A line and ten levels of indentation: some models would otherwise write whitespace without end.
_WHITESPACE = r"[ \t\n\r]{0,41}"
_MAX_PLACES = 256  # of a schema, that are looked at for an error's
_MAX_REASON_CHARS = 400
_RECURSION = re.compile("recursion (limit|depth) exceeded")  # what the library says, and Python
_TOO_DEEP = "it has more than 128 levels of objects and arrays"  # the limit of the library's JSON parser
_NAMES: dict[GrammarKind, str] = {
    "json": "The JSON schema",
    "regex": "The regular expression",
    "choice": "The list of choices",
    "grammar": "The grammar",
    "json_object": "The grammar of JSON objects",
    "structural_tag": "The structural tag",
}
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SCHEMAS = ("items", "additionalProperties", "not")
_WRONG = (ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError, OverflowError)
# Without u: the library does not read \u0061 as a, and would take it for another key than those of a schema.
_ESCAPES = r"nrbtf\""
_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")  # without \u
_OLD_DRAFT = re.compile(r"/draft-0[0-3]\b")  # their keywords are others
# The library's formats allow February 29 of any year, and 61 seconds in any minute.
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = f"(?:[0-9]{{4}}-(?:0[13-9]|1[0-2]|02-[01]|02-2[0-8])|{_LEAP_YEAR}-02-29)"
_PATTERNS = {"date": f"^{_DATE}", "date-time": f"^{_DATE}[^:]*:[0-9]{{2}}:[0-5]", "time": "^.{6}[0-5]"}
_MAX_EXACT = 1 << 53  # integers above it are rounded,
_MAX_INTEGER = (1 << 63) - 1  # and bounds above this one to it


class GrammarCompiler:
    """Compiles grammars for one tokenizer, which is loaded with the first one. All threads may call it.

    Bounded are a grammar's text (``core/structured.py``), the nesting of JSON (128, by the library), the size
    and the lexer of the compiled grammar, the time that compiling takes, and how many are cached.

    Args:
        folder: the model's.
        vocab_size: of its logits.
        end_token_ids: allowed where an output is complete.
    """

    def __init__(self, folder: Path, vocab_size: int, end_token_ids: tuple[int, ...]) -> None:
        self.vocab_size = vocab_size
        self._folder = folder
        self._end_token_ids = end_token_ids
        self._tokenizer: LLTokenizer | None = None
        self._loading = threading.Lock()
        self._caching = threading.Lock()
        self._compiled: dict[StructuredOutputsParams, LLMatcher | RequestError] = {}

    @property
    def num_tokens(self) -> int:
        """Of the tokenizer, which may have more or fewer than the model; at least those of the model."""
        tokenizer = self._tokenizer
        return self.vocab_size if tokenizer is None else tokenizer.vocab_size

    def has(self, params: StructuredOutputsParams) -> bool:
        """Whether ``matcher`` need not compile."""
        return params in self._compiled

    def matcher(self, params: StructuredOutputsParams) -> LLMatcher:
        """A new one, at the start of an output. Raises: RequestError if the grammar cannot be used."""
        with self._caching:
            found = self._compiled.pop(params, None)
            if found is not None:
                self._compiled[params] = found  # now the last to be dropped
        if found is None:
            try:
                found = self._compile(params)
            except RequestError as error:
                found = error
            with self._caching:
                self._compiled[params] = found
                num_chars = sum(len(each.text) for each in self._compiled)
                while len(self._compiled) > _MAX_CACHED or num_chars > _MAX_CACHED_CHARS:
                    oldest = next(iter(self._compiled))
                    num_chars -= len(oldest.text)
                    del self._compiled[oldest]
        if isinstance(found, RequestError):
            raise RequestError(str(found), param=found.param)
        return found.deep_copy()

    def _compile(self, params: StructuredOutputsParams) -> LLMatcher:
        from llguidance import LLMatcher

        tokenizer = self._loaded_tokenizer()
        began_s = time.monotonic()
        try:
            source = _source(params, tokenizer)
        except KeyError as error:
            raise _unusable(params, f"it has no {error}") from None
        except _WRONG as error:
            raise _unusable(params, f"{error}" or type(error).__name__) from None
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first takes longest, and finds grammars that have no output
        if matcher.is_error():
            reason = matcher.get_error()
            if reason.startswith("NoExtension"):
                reason = "nothing satisfies it"
            place = _place_of(params, reason) if params.kind == "json" else ""
            raise _unusable(params, reason, place)
        if time.monotonic() - began_s > _MAX_COMPILE_S:
            raise _unusable(params, f"it takes over {_MAX_COMPILE_S:g} s to compile")
        return matcher

    def _loaded_tokenizer(self) -> LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                try:
                    self._tokenizer = _load_tokenizer(self._folder, self.vocab_size, self._end_token_ids)
                except Exception as error:  # libraries raise many kinds
                    message = f"This model's tokenizer cannot be used for structured outputs: {error}"
                    raise RequestError(message, param="structured_outputs") from error
            return self._tokenizer


def _load_tokenizer(folder: Path, vocab_size: int, end_token_ids: tuple[int, ...]) -> LLTokenizer:
    from llguidance import LLTokenizer
    from tokenizers import Tokenizer

    if (folder / "tokenizer.json").is_file():
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    else:
        from transformers import AutoTokenizer

        backend = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    num_tokens = 1 + max(backend.get_vocab(with_added_tokens=True).values())
    return LLTokenizer(
        backend.to_str(), n_vocab=max(vocab_size, num_tokens), eos_token=list(end_token_ids) or None
    )


def _limits() -> LLParserLimits:
    """Half of the library's for a step, which the other requests of the step wait for."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        step_lexer_fuel=100_000, step_max_items=25_000, max_lexer_states=50_000, verbose_errors=False
    )


def _source(params: StructuredOutputsParams, tokenizer: LLTokenizer | None) -> str:
    """The grammar as the library's matcher takes it. Raises: ``_WRONG``."""
    from llguidance import LLMatcher, grammar_from

    def json_grammar(schema: str) -> str:
        root = json.loads(schema)
        _check_schema(root)
        _narrow_formats(root)
        # Over what the schema itself asks for: its sender must not have keywords ignored.
        return LLMatcher.grammar_from_json_schema(
            root,
            overrides={
                "lenient": False,
                "coerce_one_of": False,
                "whitespace_pattern": "" if params.disable_any_whitespace else _WHITESPACE,
                "whitespace_flexible": not params.disable_any_whitespace,
                "json_allowed_escapes": _ESCAPES,
            },
        )

    match params.kind:
        case "json" | "json_object":
            return json_grammar(params.text)
        case "structural_tag":
            assert tokenizer is not None
            return structural_tag_grammar(json.loads(params.text), tokenizer, json_grammar)
        case kind:
            return grammar_from(kind, params.text)


def _check_schema(root: object) -> None:
    """Raise ValueError for what the library would take, and get wrong: its output might not be valid."""
    waiting = [("#", root)]
    while waiting:
        place, part = waiting.pop()
        if isinstance(part, dict):
            if reason := _misread(part):
                raise ValueError(f"{reason} ({place})")
            waiting += [(f"{place}/{name}", each) for name, each in part.items()]
        elif isinstance(part, list):
            waiting += [(f"{place}/{index}", each) for index, each in enumerate(part)]


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


def _narrow_formats(root: object) -> None:
    for _, part in _parts(root, "#") if isinstance(root, dict) else ():
        if (form := part.get("format")) in _PATTERNS:
            part["allOf"] = [*part.get("allOf", ()), {"pattern": _PATTERNS[form]}]


def _leaves(value: object) -> Iterator[object]:
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict | list):
            waiting += each.values() if isinstance(each, dict) else each
        else:
            yield each


def _unusable(params: StructuredOutputsParams, reason: str, place: str = "") -> RequestError:
    if _RECURSION.search(reason):
        reason, place = _TOO_DEEP, ""
    shown = " ".join(reason.split())[:_MAX_REASON_CHARS]
    return RequestError(f"{_NAMES[params.kind]} cannot be used{place}: {shown}.", param="structured_outputs")


def _place_of(params: StructuredOutputsParams, reason: str) -> str:
    """Where in a JSON schema the error is: the innermost part that alone has it; empty if none has."""
    from llguidance import LLMatcher

    try:
        root = json.loads(params.text)
        parts = list(islice(_parts(root, "#"), _MAX_PLACES))
    except _WRONG:
        return ""
    found, defs = "", {name: root[name] for name in ("$defs", "definitions") if name in root}
    for place, part in parts[1:]:
        source = LLMatcher.grammar_from_json_schema({**defs, **part}, overrides={"lenient": False})
        if LLMatcher.validate_grammar(source, limits=_limits()) == reason:
            found = place
    return f" ({found})" if found else ""


def _parts(root: dict[str, Any], place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Places and schemas within a schema, each before its own parts."""
    waiting = [(place, root)]
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
