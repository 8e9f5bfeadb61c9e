"""An output's text as the parts of a message, as it arrives. ``transformers`` finds their regions."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from typing import Literal

from backfill.generation.message_format import MAX_CALLS, CallSource, MessageFormat

MAX_HEAD_CHARS = 384  # above all that ``_HEAD`` matches
_GAP = r"\s{0,8}"  # bounded: runs of whitespace would take quadratic time
_LEAD = re.compile(rf"{_GAP}(?:\[{_GAP})?")
_HEAD = re.compile(
    rf"{_GAP}(?P<list>\[{_GAP})?"
    rf'(?:(?P<object>\{{){_GAP}(?:"type"{_GAP}:{_GAP}"function"{_GAP},{_GAP})?'
    rf'"name"{_GAP}:{_GAP}"(?P<key>[^"\\\x00-\x1f]{{1,128}})"{_GAP},{_GAP}'
    rf'"(?:arguments|parameters)"{_GAP}:{_GAP}'
    rf"|(?P<word>[\w.-]{{1,128}}){_GAP}(?:\[CALL_ID\]{_GAP}\w{{1,32}}{_GAP})?\[ARGS\]{_GAP})(?=\{{)"
)
_IN_WORD = re.compile(r"[\w.-]")
_AFTER_CALLS = "."  # a parser that begins after calls finds nothing that only begins a message
_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageParsing:
    """How a request's outputs are parsed.

    Attributes:
        begun: the part of the message that the prompt ends with.
        is_parallel: whether up to ``MAX_CALLS`` calls are kept, or one.
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
    """Splits one output. Text in a region of calls that is no call becomes content, unless calls are forced.

    ``transformers`` finds where a region of calls begins; where it ends, the JSON of its calls tells.
    """

    def __init__(self, message_format: MessageFormat, parsing: MessageParsing) -> None:
        self._message_format = message_format
        self._format = message_format.forced_calls
        self._parsing = parsing
        self._begin_regions(parsing.calls, parsing.begun)
        self._calls: _CallRegion | None = None  # while one is being written
        self._num_regions = 0  # of calls
        self._ends_torn = False  # within what precedes a call's arguments
        self.num_calls = 0

    def push(self, text: str, *, is_last: bool = False) -> MessageDelta:
        """Add text. ``is_last``: nothing follows."""
        delta = MessageDelta()
        rest: str | None = text
        while rest is not None:
            if self._calls is None:
                rest = self._find_calls(rest, delta, is_last=is_last)
            if self._calls is not None and rest is not None:
                rest = self._add_calls(self._calls, rest, delta, is_last=is_last)
        return delta

    @property
    def is_cut(self) -> bool:
        """The last call has begun, and its arguments have not ended."""
        return self._calls is not None and self._calls.is_in_arguments

    @property
    def has_whole_calls(self) -> bool:
        """The output is calls that a grammar forced, and ends in none."""
        is_forced = self._parsing.calls == "forced" and self.num_calls > 0
        return is_forced and not self.is_cut and not self._ends_torn

    def _begin_regions(self, calls: CallSource, prefix: str) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        self._regions = ResponseParser(self._message_format.template(calls), prefix)

    def _find_calls(self, text: str, delta: MessageDelta, *, is_last: bool) -> str | None:
        """Add what precedes the next region of calls. Returns: what follows its mark; None without one."""
        events = self._regions.feed(text)
        if is_last or any(event["field"] == "tool_calls" for event in events):
            events += self._regions.finalize()[1]
        for event in events:
            match event["field"], event["type"]:
                case "content", "region_chunk":
                    self._add_content(event["text"], delta)
                case "reasoning", "region_chunk" if self._parsing.returns_reasoning:
                    delta.reasoning += event["text"]
                case "tool_calls", "region_close":
                    self._calls = _CallRegion(event["value"]["mark"], self._format.end_mark)
                    following: str = event["value"]["text"]
                    return following
        return None

    def _add_calls(self, calls: _CallRegion, text: str, delta: MessageDelta, *, is_last: bool) -> str | None:
        """Returns: what follows the region of calls; None if it has not ended."""
        for part, value in calls.push(text, is_last=is_last):
            match part:
                case "name":
                    self._begin(value, delta)
                case "arguments" if self._is_wanted:
                    delta.add_arguments(self.num_calls - 1, value)
                case "content":
                    self._add_content(value, delta)
                case "rest":
                    self._ends_torn |= is_last and calls.is_in_head
                    self._calls = None
                    self._num_regions += 1
                    # Finding a region takes longer than its text, and a model may write marks alone.
                    is_full = self._num_regions == MAX_CALLS
                    self._begin_regions("none" if is_full else self._parsing.calls, _AFTER_CALLS)
                    return value
        return None

    def _add_content(self, text: str, delta: MessageDelta) -> None:
        if self._parsing.calls != "forced":
            delta.content += text
        elif text.strip():  # markup that has been cut
            self._ends_torn = True

    def _begin(self, name: str, delta: MessageDelta) -> None:
        self.num_calls += 1
        self._ends_torn = False
        if self._is_wanted:
            delta.tool_calls.append(ToolCallDelta(self.num_calls - 1, id=self._new_id(), name=name))

    @property
    def _is_wanted(self) -> bool:
        """The current call."""
        return self.num_calls <= (MAX_CALLS if self._parsing.is_parallel else 1)

    def _new_id(self) -> str:
        if self._format.has_short_ids:
            return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


_Part = Literal["name", "arguments", "content", "rest"]


class _CallRegion:
    """Calls as they are written: one, or a JSON list of them, and then ``end_mark``.

    ``mark`` is what the region began with.
    """

    def __init__(self, mark: str, end_mark: str) -> None:
        self._end_mark = end_mark
        self._stop = end_mark or mark.strip()  # ends a call whose JSON is broken
        self._text = ""  # what is not decided
        self._lead = mark  # precedes it, and is content like it if it is no call
        self._num_tried = 0  # characters of it, with which a head was looked for
        self._json = _JsonObject(self._stop)
        self._num_followed = 0  # characters of it, by ``_json``
        self._has_call = False
        self._is_list = False
        self._tail: list[str] = []  # marks that may follow, in this order
        self._read: Callable[[bool], Iterator[tuple[_Part, str]]] = self._read_head

    @property
    def is_in_arguments(self) -> bool:
        return self._read == self._read_arguments

    @property
    def is_in_head(self) -> bool:
        """A call has begun, and not its arguments."""
        return self._read == self._read_head

    def push(self, text: str, *, is_last: bool) -> Iterator[tuple[_Part, str]]:
        """Add text. Yields: parts of calls; last "rest", what follows the region, once it has ended."""
        self._text += text
        read = None
        while read != self._read:
            read = self._read
            yield from read(is_last)

    def _read_head(self, is_last: bool) -> Iterator[tuple[_Part, str]]:
        """A call from its start to its arguments; all of one whose keys are in another order."""
        text = self._text
        # Tried again and again, a long text would take quadratic time.
        head = _HEAD.match(text) if self._num_tried <= MAX_HEAD_CHARS else None
        self._num_tried = len(text)
        lead = _LEAD.match(text)
        assert lead is not None, "it may be empty"
        first = text[lead.end() : lead.end() + 1]
        if head is not None:
            self._is_list |= head["list"] is not None
            yield "name", head["key"] or head["word"]
            self._json = _JsonObject(self._stop)
            self._text = text[head.end() :]
            self._tail = ["}"] if head["object"] else []
            self._read = self._read_arguments
        elif first == "{":
            self._num_followed = self._json.follow(text, max(lead.end(), self._num_followed))
            if self._json.has_ended:
                yield from self._read_object(text[lead.end() : self._num_followed], "[" in lead[0])
            elif self._json.is_broken:
                yield from self._fail(self._num_followed)
            elif is_last:
                yield from self._cut()
        elif first and (is_last or len(text) > MAX_HEAD_CHARS or not _IN_WORD.match(first)):
            yield from self._fail(0)
        elif is_last:
            yield from self._cut()

    def _read_object(self, written: str, opens_list: bool) -> Iterator[tuple[_Part, str]]:
        call = _call_of(written)
        if call is None:
            yield from self._fail(self._num_followed)
            return
        self._is_list |= opens_list
        yield "name", call[0]
        yield "arguments", call[1]
        self._end_call(self._num_followed, [])

    def _fail(self, end: int) -> Iterator[tuple[_Part, str]]:
        """What is not decided is no call up to ``end``."""
        yield "content", self._lead + self._text[:end]
        yield "rest", self._text[end:]

    def _cut(self) -> Iterator[tuple[_Part, str]]:
        """The output ends before it is known whether a call has begun: after another call one has."""
        if not self._has_call:
            yield "content", self._lead + self._text
        yield "rest", ""

    def _read_arguments(self, is_last: bool) -> Iterator[tuple[_Part, str]]:
        end = self._json.follow(self._text, 0)
        has_ended = self._json.has_ended or self._json.is_broken
        if is_last and not has_ended:
            end = len(self._text)
        yield "arguments", self._text[:end]
        if has_ended:
            self._end_call(end, self._tail)
        else:
            self._text = self._text[end:]

    def _end_call(self, end: int, tail: list[str]) -> None:
        self._has_call = True
        self._text = self._text[end:]
        self._tail = [*tail, *([",", "]"] if self._is_list else []), self._end_mark]
        self._read = self._read_tail

    def _read_tail(self, is_last: bool) -> Iterator[tuple[_Part, str]]:
        """What ends a call, and the region; or a comma before another call."""
        while True:
            text = self._text = self._text.lstrip()
            if not self._tail:
                break
            mark = self._tail[0]
            if not text.startswith(mark):
                if not mark.startswith(text):
                    del self._tail[0]
                elif is_last:
                    text = ""  # the mark is cut
                    break
                else:
                    return
                continue
            del self._tail[0]
            self._text = text.removeprefix(mark)
            if mark == ",":
                self._lead, self._num_tried, self._num_followed = mark, 0, 0
                self._json = _JsonObject(self._stop)
                self._read = self._read_head
                return
        if text or is_last:
            yield "rest", text


class _JsonObject:
    """Follows a JSON object that is being written. ``stop`` ends it where it cannot be JSON's."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._depth = 0
        self._is_in_string = False
        self._is_torn = False  # by a line break in a string
        self.has_ended = False
        self.is_broken = False

    def follow(self, text: str, begin: int) -> int:
        """Follow ``text`` from ``begin``. Returns: where the object ends, or what is known of it."""
        for found in _syntax(self._stop).finditer(text, begin):
            match found[0]:
                case "\\":  # what it escapes is not known yet
                    return found.start()
                case '"':
                    self._is_in_string = not self._is_in_string
                case "\n":
                    self._is_torn |= self._is_in_string
                case "{" if not self._is_in_string:
                    self._depth += 1
                case "}" if not self._is_in_string:
                    self._depth -= 1
                    if self._depth == 0:
                        self.has_ended = True
                        return found.end()
                case self._stop if self._can_stop:
                    self.is_broken = True
                    return found.start()
        return len(text) - (self._num_of_stop(text) if self._can_stop else 0)

    @property
    def _can_stop(self) -> bool:
        return self._is_torn or not self._is_in_string

    def _num_of_stop(self, text: str) -> int:
        """Characters at the end of ``text`` that may begin ``stop``."""
        lens = range(min(len(text), len(self._stop) - 1), 0, -1)
        return next((num for num in lens if text.endswith(self._stop[:num])), 0)


@cache
def _syntax(stop: str) -> re.Pattern[str]:
    return re.compile(r'[{}"\n]|\\.?' + (f"|{re.escape(stop)}" if stop else ""), re.DOTALL)


def _call_of(written: str) -> tuple[str, str] | None:
    """Name and arguments of a call that is a JSON object; None if it is no call."""
    try:
        return _named_arguments(json.loads(written))
    except (ValueError, RecursionError):
        return None


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
