"""Grammars of structured outputs: compiled for a model's tokenizer by llguidance, and cached."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from backfill.core.errors import RequestError
from backfill.core.structured import GrammarKind, StructuredOutputsParams
from backfill.execution.json_schemas import adapted_schema, num_patterns, schema_parts
from backfill.execution.structural_tags import structural_tag_grammar

if TYPE_CHECKING:  # imported at the first grammar: most servers need none of it
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_MAX_CACHED = 256
_MAX_CACHED_CHARS = 2 << 20  # of their texts: one of 64 Ki takes up to 10 MB
_MAX_COMPILE_S = 5.0  # more than the largest that is allowed takes, so that only a machine in need is slower
# Where n patterns of a schema meet, the library takes up to 2 ** n, and cannot be stopped: what has more than
# these is compiled first in a process that may use this much of a processor.
_MAX_QUICK_PATTERNS = 8
_MAX_TRIAL_S = 2  # of a processor's time
_MAX_WAIT_S = 30.0  # until a busy machine has given that process its time
_TRIAL = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({_MAX_TRIAL_S}, {_MAX_TRIAL_S}))
from llguidance import LLMatcher
LLMatcher.validate_grammar(sys.stdin.read())
"""
# A line and ten levels of indentation: some models would otherwise write whitespace without end.
_WHITESPACE = r"[ \t\n\r]{0,41}"
_MAX_PLACES = 256  # of a schema, that are looked at for an error's
_MAX_REASON_CHARS = 400
_RECURSION = re.compile("recursion (limit|depth) exceeded")  # what the library says, and Python
_TOO_DEEP = "it has more than 128 levels of objects and arrays"  # the limit of the library's JSON parser
# What the library says, in the words of the API. The first that matches.
_NONE = "nothing satisfies it"
_REASONS = (
    (r"^(NoExtension|Unsatisfiable schema: (any|one)Of is empty).*", _NONE),
    (
        r"^Unsatisfiable schema: Regex is empty.*",
        f"{_NONE}: pattern, format and lengths exclude each other",
    ),
    (r"^Unsatisfiable schema: incompatible types", f"{_NONE}: its types, const and enum exclude each other"),
    (r"^Unsatisfiable schema: range .* (does not contain a multiple of .*)", rf"{_NONE}: its range \1"),
    (r"^Unsatisfiable schema", _NONE),
    (
        r"^oneOf constraints are not supported.*",
        "the branches of oneOf must be known to exclude each other: by type, or by const or enum, also of a "
        "property that is required in each. anyOf allows any branches",
    ),
    (r".*regex parse error: (.*) \^+ error: (.*?)( \d+ \| start: .*)?$", r"\2, in '\1'"),
    (
        r".*lookarounds not supported.* in regex /(.*?)/( \d+ \| .*)?$",
        r"\\b, \\B and look-around are not supported, in '\1'",
    ),
    (r"^(?:at )?(\d+)\((\d+)\): (.*?) \d+ \| .*", r"line \1, column \2: \3"),
    (r"^Unimplemented keys: \[(.*)\]", r"it has keywords that are not supported: \1"),
    (r"^Pointer '(.*)' does not exist", r"$ref leads to '#\1', which does not exist"),
    (r"^Resource '(.*)' is not present.*", r"$ref leads to '\1', and only this schema is read"),
)
_REQUIRED = re.compile("required property '(.*)' is unsatisfiable")
_NAMES: dict[GrammarKind, str] = {
    "json": "The JSON schema",
    "regex": "The regular expression",
    "choice": "The list of choices",
    "grammar": "The grammar",
    "json_object": "The grammar of JSON objects",
    "structural_tag": "The structural tag",
}
_WRONG = (ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError, ArithmeticError)
# Without u: the library does not read \u0061 as a, and would take it for another key than those of a schema.
_ESCAPES = r"nrbtf\""


class GrammarCompiler:
    """Compiles grammars for one tokenizer, which is loaded with the first one. All threads may call it.

    Bounded are a grammar's text (``core/structured.py``), the nesting of JSON (128, by the library), the size
    and the lexer of the compiled grammar, the time that compiling takes (of many patterns before it is done),
    and how many are cached. What only a busy machine is why of is not cached.

    Args:
        folder: the model's.
        vocab_size: of its logits.
        end_token_ids: allowed where an output is complete.
        bounds_time: False where another compiler has compiled each grammar before, within that time.
    """

    def __init__(
        self, folder: Path, vocab_size: int, end_token_ids: tuple[int, ...], *, bounds_time: bool = True
    ) -> None:
        self.vocab_size = vocab_size
        self._bounds_time = bounds_time
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
            except _TooBusyError:
                raise
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
        try:
            source = _source(params, tokenizer)
        except KeyError as error:
            raise _unusable(params, f"it has no {error}") from None
        except _WRONG as error:
            raise _unusable(params, f"{error}" or type(error).__name__) from None
        if self._bounds_time:
            _check_patterns(params, source)
        began_s = time.monotonic()
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first takes longest, and finds grammars that have no output
        if matcher.is_error():
            reason, place = matcher.get_error(), ""
            if params.kind == "json":
                reason, place = _innermost(params, reason)
            raise _unusable(params, reason, place)
        if self._bounds_time and time.monotonic() - began_s > _MAX_COMPILE_S:
            raise _TooBusyError(params, f"it takes over {_MAX_COMPILE_S:g} s to compile")
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


class _TooBusyError(RequestError):
    """The machine has not compiled a grammar in time, and may another time."""

    def __init__(self, params: StructuredOutputsParams, reason: str) -> None:
        super().__init__(str(_unusable(params, reason)), param="structured_outputs")


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
        # Over what the schema itself asks for: its sender must not have keywords ignored.
        return LLMatcher.grammar_from_json_schema(
            adapted_schema(schema),
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


def _check_patterns(params: StructuredOutputsParams, source: str) -> None:
    """Compile a grammar of many patterns in a process that can be ended.

    Raises: RequestError if it takes too long; ``_TooBusyError`` if that cannot be told.
    """
    if "%json" not in source and not _has_many_patterns(source):
        return  # Lark may have schemas too
    command = [sys.executable, "-P", "-c", _TRIAL]
    try:
        trial = subprocess.run(
            command, input=source.encode(), stderr=subprocess.DEVNULL, timeout=_MAX_WAIT_S, check=False
        )
    except (subprocess.TimeoutExpired, OSError):  # the latter without memory for a process
        raise _TooBusyError(params, "this machine is too busy to try its patterns") from None
    if trial.returncode < 0:  # a signal ended it
        raise _unusable(params, f"its patterns take over {_MAX_TRIAL_S} s to compile")


def _has_many_patterns(source: str) -> bool:
    if not source.startswith("{"):  # Lark
        return False
    try:
        return num_patterns(source) > _MAX_QUICK_PATTERNS
    except (ValueError, RecursionError):  # Lark that begins so, or too deep: the matcher says what is wrong
        return False


def _unusable(params: StructuredOutputsParams, reason: str, place: str = "") -> RequestError:
    shown = " ".join(reason.split())
    for pattern, words in _REASONS:
        shown, num_found = re.subn(pattern, words, shown)
        if num_found:
            break
    if _RECURSION.search(reason):
        shown, place = _TOO_DEEP, ""
    if len(shown) > _MAX_REASON_CHARS:
        shown = f"{shown[:_MAX_REASON_CHARS]}..."
    where = f" ({place})" if place else ""
    return RequestError(f"{_NAMES[params.kind]} cannot be used{where}: {shown}.", param="structured_outputs")


def _innermost(params: StructuredOutputsParams, reason: str) -> tuple[str, str]:
    """The reason and the place of the innermost part of a JSON schema that alone has the error."""
    from llguidance import LLMatcher

    try:
        root = adapted_schema(params.text)
        parts = dict(islice(schema_parts(root), _MAX_PLACES))
    except _WRONG:
        return reason, ""
    found, defs = "", {name: root[name] for name in ("$defs", "definitions") if name in root}
    is_unsatisfied = reason.startswith("Unsatisfiable")
    for place, part in parts.items():
        if place == "#" or (is_unsatisfied and not place.startswith(_within(found or "#", reason))):
            continue
        source = LLMatcher.grammar_from_json_schema({**defs, **part}, overrides={"lenient": False})
        if num_patterns(source) > _MAX_QUICK_PATTERNS:
            continue
        alone = LLMatcher.validate_grammar(source, limits=_limits())
        if alone == reason or (is_unsatisfied and alone.startswith("Unsatisfiable")):
            found, reason = place, alone
    return reason, found


def _within(place: str, reason: str) -> str:
    """How places begin that can be why there is no value at a place."""
    required = _REQUIRED.search(reason)
    return f"{place}/properties/{required[1]}" if required else f"{place}/"
