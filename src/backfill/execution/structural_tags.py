"""Structural tags as grammars of llguidance: vLLM's structures and triggers, or xgrammar's ``format``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_ANY_TEXT = r"/(.|\n)*/"


def structural_tag_grammar(
    tag: Mapping[str, Any], tokenizer: LLTokenizer, json_grammar: Callable[[str], str]
) -> str:
    """The grammar of a structural tag.

    Args:
        json_grammar: llguidance's grammar of a JSON schema's text.
    Raises: KeyError for what is missing, ValueError and TypeError for what is wrong.
    """
    if "format" in tag:
        return _FormatGrammar(tokenizer, json_grammar).of(tag["format"])
    return _triggered(tag, tokenizer, json_grammar)


class _FormatGrammar:
    """The subset of xgrammar's formats that ``_expression`` lists, as one grammar with named parts.

    ``tags_with_separator`` may also have ``at_most``, a number of tags.
    """

    def __init__(self, tokenizer: LLTokenizer, json_grammar: Callable[[str], str]) -> None:
        self._tokenizer = tokenizer
        self._json_grammar = json_grammar
        self._lines = ["%llguidance {}"]
        self._grammars: list[dict[str, Any]] = []

    def of(self, form: Mapping[str, Any]) -> str:
        start = self._expression(form)
        main = {"name": "start", "lark_grammar": "\n".join([*self._lines, f"start: {start}"])}
        return json.dumps({"grammars": [main, *self._grammars]})

    def _expression(self, form: Mapping[str, Any]) -> str:
        """The Lark of a format, whose rules and grammars are added."""
        match form["type"]:
            case "const_string":
                return self._text(form["value"])
            case "json_schema":
                return self._nested(self._json_grammar(json.dumps(form["json_schema"])))
            case "sequence":
                return self._rule(" ".join(map(self._expression, form["elements"])))
            case "or":
                return self._rule(" | ".join(map(self._expression, form["elements"])))
            case "tag":
                return self._tag(form)
            case "tags_with_separator":
                return self._tags(form)
            case other:
                known = "const_string, json_schema, sequence, or, tag and tags_with_separator"
                raise ValueError(f"the types of format are {known}, got {other!r:.40}")

    def _tag(self, form: Mapping[str, Any]) -> str:
        begin, content, end = form["begin"], form["content"], form["end"]
        if content["type"] != "any_text":
            inner = self._expression(content)
            return self._rule(f"{self._text(begin)} {inner} {self._text(end)}")
        if not end:
            raise ValueError("a tag with any_text must have an end")
        ending = self._text(end)
        if "<[" in ending:  # a special token, which no text contains
            return self._rule(f"{self._text(begin)} {self._terminal(_ANY_TEXT)} {ending}")
        return self._rule(f"{self._text(begin)} {self._rule(f'{_ANY_TEXT} {ending}', lazy=True)}")

    def _tags(self, form: Mapping[str, Any]) -> str:
        if not form["tags"]:
            raise ValueError("tags must not be empty")
        one = self._rule(" | ".join(self._tag(each) for each in form["tags"]))
        at_most = form.get("at_most")
        if at_most is not None and (type(at_most) is not int or at_most < 1):
            raise ValueError(f"at_most must be a whole number of 1 or more, got {json.dumps(at_most):.40}")
        times = "*" if at_most is None else f"{{0,{at_most - 1}}}"
        is_one = at_most == 1 or form.get("stop_after_first")
        more = "" if is_one else f"({self._text(form['separator'])} {one}){times}"
        some = f"{one} {more}"
        return self._rule(some if form.get("at_least_one") else f"({some})?")

    def _text(self, text: str) -> str:
        """A text, whose special tokens are these tokens and not their spelling."""
        token_ids = self._tokenizer.tokenize_str(text, parse_special=True)
        special = {
            self._tokenizer.decode_str([each]): each
            for each in token_ids
            if self._tokenizer.is_special_token(each)
        }
        if not special:
            return json.dumps(text, ensure_ascii=False)
        parts = re.split("(" + "|".join(map(re.escape, special)) + ")", text)
        shown = [f"<[{special[part]}]>" if part in special else json.dumps(part) for part in parts if part]
        return " ".join(shown)

    def _rule(self, body: str, *, lazy: bool = False) -> str:
        name = f"part_{len(self._lines)}"
        self._lines.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def _terminal(self, pattern: str) -> str:
        name = f"PART_{len(self._lines)}"
        self._lines.append(f"{name}: {pattern}")
        return name

    def _nested(self, grammar: str) -> str:
        """Raises: ValueError for a grammar of several parts."""
        (only,) = json.loads(grammar)["grammars"]
        name = f"grammar_{len(self._grammars)}"
        self._grammars.append({**only, "name": name})
        return f"@{name}"


def _triggered(tag: Mapping[str, Any], tokenizer: LLTokenizer, json_grammar: Callable[[str], str]) -> str:
    from llguidance import StructTag

    triggers: Sequence[str] = tag["triggers"]
    tags, are_tokens = [], set()
    for structure in tag["structures"]:
        begin = structure["begin"]
        trigger = next((each for each in triggers if begin.startswith(each)), None)
        if trigger is None:
            raise ValueError(f"no trigger begins {begin!r:.80}")
        schema = structure["schema"]
        if isinstance(schema, str) and schema.lstrip().startswith("{"):  # another text is Lark
            schema = json.loads(schema)
        if isinstance(schema, dict):
            (grammar,) = json.loads(json_grammar(json.dumps(schema)))["grammars"]
            schema = grammar["json_schema"]  # with the options of ``json_grammar``
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=schema, end=structure["end"]))
        token_ids = tokenizer.tokenize_str(trigger, parse_special=True)
        are_tokens.add(len(token_ids) == 1 and tokenizer.is_special_token(token_ids[0]))
    if not tags:
        raise ValueError("structures must not be empty")
    if len(are_tokens) > 1:
        raise ValueError("all triggers or none must be special tokens of the model")
    return StructTag.to_grammar(tags, assume_special=are_tokens.pop())
