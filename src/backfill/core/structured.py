"""What the text of an output must be: vLLM's names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

from backfill.core.errors import InvalidRequest

MAX_GRAMMAR_CHARS = 64 << 10  # compiled in a second at most

GrammarKind: TypeAlias = Literal["json", "regex", "choice", "grammar", "json_object", "structural_tag"]
_KINDS: tuple[GrammarKind, ...] = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """What an output must be. Exactly one field but the last is set. Hashable: JSON is kept as its text.

    Whether a schema or a grammar can be used is checked where it is compiled (``execution/grammars.py``).

    Attributes:
        json: a JSON schema, as a dict or as text: the output is a JSON value that it allows.
        regex: a regular expression of Rust's crate ``regex``, which the whole output matches.
        choice: the output is one of these strings.
        grammar: a context-free grammar that has the output, in Lark's syntax as llguidance reads it, or in
            llama.cpp's GBNF.
        json_object: True: the output is any JSON object.
        structural_tag: ``structures`` and ``triggers``, as a dict or as text: the output is free until a
            trigger, then it is the rest of a structure's ``begin``, what its ``schema`` allows, and ``end``.
            Or ``format``, in xgrammar's form: const_string, json_schema, sequence, or, tag (also of any_text)
            and tags_with_separator.
        disable_any_whitespace: JSON has no whitespace between its parts; else up to 41 characters.
    Raises: InvalidRequest naming the field that is wrong.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        for name in ("json", "structural_tag"):
            value = getattr(self, name)
            if isinstance(value, Mapping):
                object.__setattr__(self, name, _json_text(name, value))
        if self.choice is not None:
            object.__setattr__(self, "choice", _checked_choice(self.choice))
        for name in ("json", "regex", "grammar", "structural_tag"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise _wrong(name, "text" if name in ("regex", "grammar") else "text or a dict", value)
        if self.json_object not in (None, True) or type(self.disable_any_whitespace) is not bool:
            name = "json_object" if self.json_object not in (None, True) else "disable_any_whitespace"
            raise _wrong(name, "True, or absent", getattr(self, name))
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidRequest(
                f"structured_outputs must have exactly one of {', '.join(_KINDS)}, got "
                f"{' and '.join(given) or 'none of them'}.",
                param="structured_outputs",
            )
        if len(self.text) > MAX_GRAMMAR_CHARS:
            raise InvalidRequest(
                f"structured_outputs.{self.kind} may have at most {MAX_GRAMMAR_CHARS} characters, got "
                f"{len(self.text)}.",
                param="structured_outputs",
            )

    @property
    def kind(self) -> GrammarKind:
        """The field that is set."""
        return next(name for name in _KINDS if getattr(self, name) is not None)

    @property
    def text(self) -> str:
        """Its value; a list of choices as JSON."""
        kind = self.kind
        if kind == "json_object":
            return '{"type": "object"}'
        return json.dumps(self.choice) if kind == "choice" else cast(str, getattr(self, kind))


def _json_text(name: str, value: Mapping[str, Any]) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        message = f"structured_outputs.{name} cannot be written as JSON: {error}."
        raise InvalidRequest(message, param="structured_outputs") from None


def _checked_choice(choice: object) -> tuple[str, ...]:
    is_list = isinstance(choice, Sequence) and not isinstance(choice, str | bytes)
    if not is_list or not choice or not all(isinstance(each, str) for each in cast(Sequence[object], choice)):
        raise _wrong("choice", "a list of one or more strings", choice)
    return tuple(cast(Sequence[str], choice))


def _wrong(name: str, allowed: str, value: object) -> InvalidRequest:
    message = f"structured_outputs.{name} must be {allowed}, got {value!r:.80}."
    return InvalidRequest(message, param="structured_outputs")
