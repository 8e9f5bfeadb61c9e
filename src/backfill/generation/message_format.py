"""How a model's family writes reasoning and calls of tools around an answer's content."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # imported with the first answer that is parsed
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate

ToolCallParserName = Literal["auto", "hermes", "llama3_json", "mistral"]
ReasoningParserName = Literal["auto", "none", "deepseek_r1", "mistral", "qwen3"]
CallSource = Literal["none", "free", "forced"]
"""Whether an answer's calls are parsed, and whether its grammar forced them."""

Format = dict[str, Any]
"""A format of xgrammar's structural tags (``execution/structural_tags.py``)."""

MAX_CALLS = 128  # of a message
_SPACE = r"\s{0,4}"  # bounded: runs of whitespace would take quadratic time


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How calls are written: ``before``, one or more of ``begin`` arguments ``end``, ``after``.

    Attributes:
        begin: with ``{name}`` for the function's.
        separator: between two calls; None: a message has one call at most.
        open: regular expression of what begins a region of calls. Its JSON tells where the region ends.
        end_mark: that may follow a region's calls.
        has_short_ids: ids of calls must have nine letters and digits.
    """

    begin: str
    end: str
    before: str = ""
    after: str = ""
    separator: str | None = ""
    open: str
    end_mark: str = ""
    has_short_ids: bool = False

    def structure(self, schemas: Mapping[str, Mapping[str, Any]], *, is_parallel: bool) -> Format:
        """One to ``MAX_CALLS`` calls of these functions, by name, with arguments that their schemas allow."""
        tags = [
            {
                "type": "tag",
                "begin": self.begin.replace("{name}", name),
                "content": {"type": "json_schema", "json_schema": schema},
                "end": self.end,
            }
            for name, schema in schemas.items()
        ]
        calls = {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": self.separator or "",
            "at_least_one": True,
            "at_most": MAX_CALLS,
            "stop_after_first": not is_parallel or self.separator is None,
        }
        return {"type": "sequence", "elements": [_constant(self.before), calls, _constant(self.after)]}


_HERMES = CallFormat(
    begin='<tool_call>\n{"name": "{name}", "arguments": ',
    end="}\n</tool_call>",
    separator="\n",
    open="<tool_call>",
    end_mark="</tool_call>",
)
_LLAMA3 = CallFormat(
    begin='{"name": "{name}", "parameters": ',
    end="}",
    separator=None,
    open=(
        rf"(?<=\A{_SPACE})(?:<\|python_tag\|>)?"
        rf'(?={_SPACE}\{{{_SPACE}(?:"type"{_SPACE}:{_SPACE}"function"{_SPACE},{_SPACE})?"name"{_SPACE}:)'
    ),
)
_MISTRAL_LIST = CallFormat(
    before="[TOOL_CALLS] [",
    begin='{"name": "{name}", "arguments": ',
    end="}",
    separator=", ",
    after="]",
    open=r"\[TOOL_CALLS\]",
    has_short_ids=True,
)
_MISTRAL_ARGS = CallFormat(
    begin="[TOOL_CALLS]{name}[ARGS]",
    end="",
    open=r"\[TOOL_CALLS\]",
    has_short_ids=True,
)
_CALL_MARKS = ("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]")


@dataclass(frozen=True)
class MessageFormat:
    """How a model writes messages.

    Attributes:
        calls: of its family; None where that is not known.
        reasoning: marks around it; None for a model that does not mark any.
    """

    calls: CallFormat | None = None
    reasoning: tuple[str, str] | None = None

    @classmethod
    def of(
        cls,
        chat_template: str,
        tool_call_parser: ToolCallParserName = "auto",
        reasoning_parser: ReasoningParserName = "auto",
    ) -> MessageFormat:
        """By the names that are given, else by what the chat template writes."""
        return cls(
            _call_format(chat_template, tool_call_parser), _reasoning_marks(chat_template, reasoning_parser)
        )

    @property
    def forced_calls(self) -> CallFormat:
        """How calls are written where a grammar forces them: of an unknown family as Hermes does."""
        return self.calls or _HERMES

    @property
    def marks(self) -> list[str]:
        """All that tell the parts of a message apart. Where they are tokens, the text must have these."""
        return [*_CALL_MARKS, *(self.reasoning or ())]

    def begun(self, prompt: str, continued: str = "") -> str:
        """The part of an answer that its prompt ends with: where reasoning begins, or nothing.

        ``continued``: the message that the prompt ends with, if the answer continues it.
        """
        if self.reasoning is None:
            return ""
        begin, end = self.reasoning
        is_open = continued.lstrip().startswith(begin) and end not in continued
        return begin if is_open or prompt.rstrip().endswith(begin) else ""

    def forced(self, calls: Format, begun: str) -> Format:
        """The structural tag of an answer that has nothing but ``calls``, after any reasoning."""
        if self.reasoning is None:
            return calls
        begin, end = self.reasoning
        thought = {
            "type": "tag",
            "begin": "" if begun else begin,
            "content": {"type": "any_text"},
            "end": end,
        }
        first = thought if begun else {"type": "or", "elements": [thought, _constant("")]}
        return {"type": "sequence", "elements": [first, calls]}

    def template(self, calls: CallSource) -> ResponseTemplate:
        """What finds the regions of a message: content, reasoning and, unless ``none``, calls."""
        return self._templates[calls]

    @cached_property
    def _templates(self) -> dict[CallSource, ResponseTemplate]:
        from transformers.utils.chat_parsing.response_templates import load_response_template

        formats: dict[CallSource, CallFormat | None] = {
            "none": None,
            "free": self.calls,
            "forced": self.forced_calls,
        }
        return {
            source: load_response_template(
                {
                    "start_anchor_pattern": r"\A",
                    "fields": {"content": {}, **self._reasoning_region(), **_call_region(calls)},
                }
            )
            for source, calls in formats.items()
        }

    def _reasoning_region(self) -> dict[str, Any]:
        if self.reasoning is None:
            return {}
        begin, end = map(re.escape, self.reasoning)
        return {
            "reasoning": {
                "open_pattern": rf"\A{_SPACE}{begin}{_SPACE}",
                "close_pattern": f"{_SPACE}{end}{_SPACE}",
            }
        }


def _call_region(calls: CallFormat | None) -> dict[str, Any]:
    if calls is None:
        return {}
    return {
        "tool_calls": {
            "open_pattern": f"(?P<mark>{_SPACE}{calls.open})",
            "content_args": {"strip": False},
            "transform": {"mark": "{mark}", "text": "{content}"},
            "repeats": True,
        }
    }


def _call_format(chat_template: str, name: ToolCallParserName) -> CallFormat | None:
    mistral = _MISTRAL_ARGS if "[ARGS]" in chat_template else _MISTRAL_LIST
    match name:
        case "hermes":
            return _HERMES
        case "llama3_json":
            return _LLAMA3
        case "mistral":
            return mistral
    if "[TOOL_CALLS]" in chat_template:
        return mistral
    # Other families have XML in this tag.
    if "<tool_call>" in chat_template and not re.search("<function=|<arg_key>", chat_template):
        return _HERMES
    if "<|start_header_id|>" in chat_template and '"parameters"' in chat_template:
        return _LLAMA3
    return None


def _reasoning_marks(chat_template: str, name: ReasoningParserName) -> tuple[str, str] | None:
    think, bracketed = ("<think>", "</think>"), ("[THINK]", "[/THINK]")
    match name:
        case "none":
            return None
        case "deepseek_r1" | "qwen3":
            return think
        case "mistral":
            return bracketed
    return next((marks for marks in (think, bracketed) if marks[1] in chat_template), None)


def _constant(text: str) -> Format:
    return {"type": "const_string", "value": text}
