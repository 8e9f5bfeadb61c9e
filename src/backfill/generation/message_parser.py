"""An output's text as the parts of a message, as it arrives. ``transformers`` finds their regions."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from backfill.generation.message_format import MAX_HEAD_CHARS, CallFormat, CallSource, MessageFormat

_SYNTAX = re.compile(r'[{}"]|\\.?', re.DOTALL)
_END_OF_CALL = re.compile(r"\A\s*\}?\s*")
_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageParsing:
    """How a request's outputs are parsed.

    Attributes:
        begun: the part of the message that the prompt ends with.
        is_parallel: False drops all calls but the first.
        returns_reasoning: False drops it.
    """

    calls: CallSource = "none"
    begun: str = ""
    is_parallel: bool = True
    returns_reasoning: bool = True


@dataclass(slots=True)
class ToolCallDelta:
    """What is added to a call. The first delta of a call has its id and its name."""

    index: int
    _: KW_ONLY
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class MessageDelta:
    """What is added to a message; to each call, once."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)

    def add_arguments(self, index: int, text: str) -> None:
        if not text:
            return
        if not self.tool_calls or self.tool_calls[-1].index != index:
            self.tool_calls.append(ToolCallDelta(index))
        self.tool_calls[-1].arguments += text


class MessageParser:
    """Splits one output. Text in a region of calls that is no call becomes content."""

    def __init__(self, message_format: MessageFormat, parsing: MessageParsing) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        self._regions = ResponseParser(message_format.template(parsing.calls), parsing.begun)
        self._format = message_format.forced_calls
        self._parsing = parsing
        self._call = _CallText(self._format)  # of the last region of calls
        self.num_calls = 0

    def push(self, text: str, *, is_last: bool = False) -> MessageDelta:
        """Add text. ``is_last``: nothing follows."""
        delta = MessageDelta()
        events = self._regions.feed(text)
        if is_last:
            events += self._regions.finalize()[1]
        for event in events:
            self._apply(event, delta)
        return delta

    def _apply(self, event: Mapping[str, Any], delta: MessageDelta) -> None:
        match event["field"], event["type"]:
            case "content", "region_chunk":
                delta.content += event["text"]
            case "reasoning", "region_chunk" if self._parsing.returns_reasoning:
                delta.reasoning += event["text"]
            case "tool_calls", "region_open":
                self._call = _CallText(self._format)
            case "tool_calls", "region_chunk":
                self._write(event["text"], delta)
            case "tool_calls", "region_close":
                self._close(event["value"]["mark"], delta)

    def _write(self, text: str, delta: MessageDelta) -> None:
        """Show what is known of a call that is being written."""
        call = self._call
        was_shown = call.name is not None
        arguments = call.push(text)
        if call.name is not None and not was_shown:
            self._begin(call.name, delta)
        if self._is_wanted:
            delta.add_arguments(self.num_calls - 1, arguments)

    def _close(self, mark: str, delta: MessageDelta) -> None:
        """Show the region's calls, unless its one call has been shown as it was written.

        ``mark`` is what the region began with.
        """
        call = self._call
        if call.name is not None:
            if call.has_ended:
                delta.content += call.rest()
            elif self._is_wanted:
                delta.add_arguments(self.num_calls - 1, call.rest())
            return
        calls = list(call.calls())
        if not calls:
            delta.content += mark + call.text
        for name, arguments in calls:
            self._begin(name, delta)
            if self._is_wanted:
                delta.add_arguments(self.num_calls - 1, arguments)

    def _begin(self, name: str, delta: MessageDelta) -> None:
        self.num_calls += 1
        if self._is_wanted:
            delta.tool_calls.append(ToolCallDelta(self.num_calls - 1, id=self._new_id(), name=name))

    @property
    def is_cut(self) -> bool:
        """The last call has begun, and its arguments have not ended."""
        return self._call.name is not None and not self._call.has_ended

    @property
    def _is_wanted(self) -> bool:
        """The current call."""
        return self._parsing.is_parallel or self.num_calls == 1

    def _new_id(self) -> str:
        if self._format.has_short_ids:
            return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


class _CallText:
    """A region of calls as it is written.

    ``name`` is the function's once the region has begun in the usual form. Then its arguments are shown as
    they come.
    """

    def __init__(self, call_format: CallFormat) -> None:
        self.text = ""
        self.name: str | None = None
        self._format = call_format
        self._position = 0  # of what is not shown
        self._depth = 0
        self._is_in_string = False
        self.has_ended = False  # the arguments have

    def push(self, text: str) -> str:
        """Add text. Returns: what is added to the arguments."""
        self.text += text
        if self.name is None:
            # Tried again and again, a long text would take quadratic time.
            pattern = self._format.head if len(self.text) - len(text) <= MAX_HEAD_CHARS else None
            head = None if pattern is None else pattern.match(self.text)
            if head is None:
                return ""
            self.name, self._position = head[1], head.end()
        if self.has_ended:
            return ""
        begin, self._position = self._position, self._end_of_arguments()
        return self.text[begin : self._position]

    def rest(self) -> str:
        """What is not shown, unless it only ends the call."""
        rest = _END_OF_CALL.sub("", self.text[self._position :])
        return "" if rest.strip() == self._format.end_mark else rest

    def calls(self) -> Iterator[tuple[str, str]]:
        """Names and arguments, from the whole region; none if it is not what the format says."""
        try:
            written = json.loads(self.text.strip().removesuffix(self._format.end_mark))
        except (ValueError, RecursionError):
            return
        calls = written if isinstance(written, list) else [written]
        parsed = [_named_arguments(each) for each in calls]
        if None not in parsed:
            yield from (each for each in parsed if each is not None)

    def _end_of_arguments(self) -> int:
        """Where the arguments end, or what is known of them: their braces outside strings are balanced."""
        for mark in _SYNTAX.finditer(self.text, self._position):
            match mark[0]:
                case "\\":  # what it escapes is not known yet
                    return mark.start()
                case '"':
                    self._is_in_string = not self._is_in_string
                case "{" if not self._is_in_string:
                    self._depth += 1
                case "}" if not self._is_in_string:
                    self._depth -= 1
                    if self._depth == 0:
                        self.has_ended = True
                        return mark.end()
        return len(self.text)


def _named_arguments(call: object) -> tuple[str, str] | None:
    match call:
        case {"name": str(name), "arguments": dict(arguments)} | {
            "name": str(name),
            "parameters": dict(arguments),
        }:
            text = json.dumps(arguments, ensure_ascii=False)
            if _is_unicode(name):  # a written "\ud83d" is half a character, which no answer can hold
                return name, text if _is_unicode(text) else json.dumps(arguments)
    return None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
