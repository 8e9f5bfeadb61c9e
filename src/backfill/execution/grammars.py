"""Grammars of structured outputs: compiled for a model's tokenizer by llguidance, and cached."""

from __future__ import annotations

import json
import re
import threading
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from backfill.core.errors import RequestError
from backfill.core.structured import GrammarKind, StructuredOutputsParams
from backfill.execution.json_schemas import adapted_schema, schema_parts
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
_WRONG = (ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError, ArithmeticError)
# Without u: the library does not read \u0061 as a, and would take it for another key than those of a schema.
_ESCAPES = r"nrbtf\""


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


def _unusable(params: StructuredOutputsParams, reason: str, place: str = "") -> RequestError:
    if _RECURSION.search(reason):
        reason, place = _TOO_DEEP, ""
    shown = " ".join(reason.split())[:_MAX_REASON_CHARS]
    return RequestError(f"{_NAMES[params.kind]} cannot be used{place}: {shown}.", param="structured_outputs")


def _place_of(params: StructuredOutputsParams, reason: str) -> str:
    """Where in a JSON schema the error is: the innermost part that alone has it; empty if none has."""
    from llguidance import LLMatcher

    try:
        root = adapted_schema(params.text)
        parts = list(islice(schema_parts(root), _MAX_PLACES))
    except _WRONG:
        return ""
    found, defs = "", {name: root[name] for name in ("$defs", "definitions") if name in root}
    for place, part in parts[1:]:
        source = LLMatcher.grammar_from_json_schema({**defs, **part}, overrides={"lenient": False})
        if LLMatcher.validate_grammar(source, limits=_limits()) == reason:
            found = place
    return f" ({found})" if found else ""
