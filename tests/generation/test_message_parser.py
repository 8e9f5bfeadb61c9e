"""What models of each family write, cut anywhere, as content, reasoning and calls of tools."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_parsing import ResponseParser

from backfill.generation.message_format import MAX_CALLS, MessageFormat
from backfill.generation.message_parser import MessageParser, MessageParsing

# As their chat templates have them.
QWEN = MessageFormat.of(
    '<tool_call>\\n{"name": <function-name>, "arguments": <args>}\\n</tool_call> </think>'
)
LLAMA = MessageFormat.of('<|start_header_id|> "parameters": ')
MISTRAL_7B = MessageFormat.of("[TOOL_CALLS] [")
MAGISTRAL = MessageFormat.of("[TOOL_CALLS] [ARGS] [/THINK]")
FORMATS = {"qwen": QWEN, "llama": LLAMA, "mistral-7b": MISTRAL_7B, "magistral": MAGISTRAL}


class Message(NamedTuple):
    content: str
    reasoning: str = ""
    calls: Sequence[tuple[str, str]] = ()


def parsed(message_format: MessageFormat, text: str, cuts: Iterable[int] = (), **parsing: Any) -> Message:
    """The sum of the deltas of an output that comes in parts."""
    parser = MessageParser(message_format, MessageParsing(**{"calls": "free", **parsing}))
    message = Message("")
    calls: list[tuple[str, str]] = []
    ids: set[str | None] = set()
    bounds = [0, *sorted(cuts), len(text)]
    for number, (begin, end) in enumerate(pairwise(bounds), start=2):
        delta = parser.push(text[begin:end], is_last=number == len(bounds))
        message = Message(message.content + delta.content, message.reasoning + delta.reasoning)
        assert len({call.index for call in delta.tool_calls}) == len(delta.tool_calls)
        for call in delta.tool_calls:
            assert (call.id is None) == (call.name is None) == (call.index < len(calls))
            if call.name is not None:
                calls.append((call.name, ""))
                ids.add(call.id)
            calls[call.index] = (calls[call.index][0], calls[call.index][1] + call.arguments)
    assert len(ids) == len(calls)
    return message._replace(calls=calls or ())


NESTED = r'{"a": "}\"{", "b": [{"c": "\\"}]}'
TWO = f"""Sure.
<tool_call>
{{"name": "f", "arguments": {NESTED}}}
</tool_call>
<tool_call>
{{"name": "g", "arguments": {{}}}}
</tool_call>"""
CASES = {
    "reasoning and two calls": (
        "qwen",
        f"<think>\nhm\n</think>\n\n{TWO}",
        Message("Sure.", "hm", [("f", NESTED), ("g", "{}")]),
    ),
    "text after calls": ("qwen", f"{TWO}\n\nDone.", Message("Sure.Done.", "", [("f", NESTED), ("g", "{}")])),
    "no space between calls": (
        "qwen",
        '<tool_call>{"name":"f","arguments":{}}</tool_call><tool_call>{"name":"g","arguments":{}}</tool_call>',
        Message("", "", [("f", "{}"), ("g", "{}")]),
    ),
    "keys in another order": (
        "qwen",
        '<tool_call>\n{"arguments": {"a": "ø"}, "name": "f"}\n</tool_call>',
        Message("", "", [("f", '{"a": "ø"}')]),
    ),
    "half a character": (
        "qwen",
        '<tool_call>{"arguments": {"a": "\\ud83d", "b": "ø"}, "name": "f"}</tool_call>',
        Message("", "", [("f", r'{"a": "\ud83d", "b": "\u00f8"}')]),
    ),
    "a name of half a character": (
        "mistral-7b",
        '[TOOL_CALLS] [{"name": "\\ud83d", "arguments": {}}]',
        Message('[TOOL_CALLS] [{"name": "\\ud83d", "arguments": {}}]'),
    ),
    "a call that is cut off": (
        "qwen",
        '<tool_call>\n{"name": "f", "arguments": {"a": "x\\',
        Message("", "", [("f", '{"a": "x\\')]),
    ),
    "a call that is none": (
        "qwen",
        'So <tool_call>\n{"name\n</tool_call> it is <b>',
        Message('So <tool_call>\n{"name\n</tool_call> it is <b>'),
    ),
    "marks in arguments": (
        "qwen",
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call><tool_call>"}}</tool_call> Done.',
        Message("Done.", "", [("f", '{"a": "</tool_call><tool_call>"}')]),
    ),
    "marks in arguments before the name": (
        "qwen",
        '<tool_call>{"arguments": {"a": "</tool_call>"}, "name": "f"}</tool_call>',
        Message("", "", [("f", '{"a": "</tool_call>"}')]),
    ),
    "arguments without their brace": (
        "qwen",
        '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {"a": 1</tool_call>So.',
        Message("So.", "", [("f", '{"a": 1}'), ("g", '{"a": 1')]),
    ),
    "arguments without their quote": (
        "qwen",
        '<tool_call>\n{"name": "f", "arguments": {"a": "x}}\n</tool_call>\nSo.',
        Message("So.", "", [("f", '{"a": "x}}\n')]),
    ),
    "an end that is cut off": (
        "qwen",
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_c',
        Message("", "", [("f", "{}")]),
    ),
    "what follows arguments": (
        "qwen",
        '<tool_call>{"name": "f", "arguments": {}, "x": 3}</tool_call>',
        Message(', "x": 3}</tool_call>', "", [("f", "{}")]),
    ),
    "marks without end": (
        "qwen",
        "<tool_call><tool_call></tool_call>",
        Message("<tool_call><tool_call></tool_call>"),
    ),
    "reasoning alone": ("qwen", "<think>so it goes", Message("", "so it goes")),
    "reasoning that begins late": ("qwen", "I <think> so", Message("I <think> so")),
    "llama": ("llama", '{"name": "f", "parameters": {"a": 3}}', Message("", "", [("f", '{"a": 3}')])),
    "llama with its tag": (
        "llama",
        '<|python_tag|>{"name": "f", "parameters": {"a": 3}}',
        Message("", "", [("f", '{"a": 3}')]),
    ),
    "llama with its type": (
        "llama",
        '{"type": "function", "name": "f", "parameters": {"a": 3}}',
        Message("", "", [("f", '{"a": 3}')]),
    ),
    "llama, two": (
        "llama",
        '{"name": "f", "parameters": {}}; {"name": "g"}',
        Message('; {"name": "g"}', "", [("f", "{}")]),
    ),
    "llama, other JSON": ("llama", '{"name": "Ada"}', Message('{"name": "Ada"}')),
    "llama, text": ("llama", 'It is {"name": 3}', Message('It is {"name": 3}')),
    "mistral, a list": (
        "mistral-7b",
        'ok[TOOL_CALLS] [{"name": "f", "arguments": {"a": [1]}}, {"name": "g", "arguments": {}}]',
        Message("ok", "", [("f", '{"a": [1]}'), ("g", "{}")]),
    ),
    "mistral, half a list": ("mistral-7b", '[TOOL_CALLS] [{"name', Message('[TOOL_CALLS] [{"name')),
    "mistral, a list with a call that is none": (
        "mistral-7b",
        '[TOOL_CALLS] [{"name": "f", "arguments": {}}, 5]',
        Message(", 5]", "", [("f", "{}")]),
    ),
    "mistral, a list that is cut off": (
        "mistral-7b",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b',
        Message("", "", [("f", '{"a": 1}'), ("g", '{"b')]),
    ),
    "mistral, a list that is cut off in a name": (
        "mistral-7b",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g',
        Message("", "", [("f", '{"a": 1}')]),
    ),
    "mistral, arguments": (
        "magistral",
        '[THINK]a[/THINK]b[TOOL_CALLS]f[ARGS]{"a": 3}[TOOL_CALLS]g.h[ARGS]{}',
        Message("b", "a", [("f", '{"a": 3}'), ("g.h", "{}")]),
    ),
    "mistral, ids of its own": (
        "magistral",
        '[TOOL_CALLS]f[CALL_ID]VvvODy9mT[ARGS]{"a": 3}[TOOL_CALLS]g[CALL_ID]VvvODy9mU[ARGS]{}',
        Message("", "", [("f", '{"a": 3}'), ("g", "{}")]),
    ),
    "mistral, marks in arguments": (
        "magistral",
        '[TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]g[ARGS]{}"}[TOOL_CALLS]h[ARGS]{}',
        Message("", "", [("f", '{"a": "[TOOL_CALLS]g[ARGS]{}"}'), ("h", "{}")]),
    ),
    "mistral, broken arguments": (
        "magistral",
        '[TOOL_CALLS]f[ARGS]{"a": [1[TOOL_CALLS]g[ARGS]{}',
        Message("", "", [("f", '{"a": [1'), ("g", "{}")]),
    ),
    "mistral, no arguments": (
        "magistral",
        "[TOOL_CALLS][TOOL_CALLS]f [TOOL_CALLS]g[ARGS]{}",
        Message("[TOOL_CALLS][TOOL_CALLS]f", "", [("g", "{}")]),
    ),
}


@pytest.mark.parametrize(("name", "text", "message"), CASES.values(), ids=CASES)
def test_the_parts_of_a_message_are_the_same_wherever_it_is_cut(
    name: str, text: str, message: Message
) -> None:
    assert parsed(FORMATS[name], text) == message
    for cut in range(1, len(text)):
        assert parsed(FORMATS[name], text, [cut]) == message
    assert parsed(FORMATS[name], text, range(1, len(text))) == message


PIECES = [
    "<tool_call>",
    "\n</tool_call>",
    "[TOOL_CALLS]",
    "f[ARGS]{}",
    '{"name": "f", ',
    "}",
    '"',
    "\\",
    "\n",
    "ø",
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=4).map("".join)


@given(st.data())
def test_arguments_come_as_they_are_written_whatever_their_texts_are(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(FORMATS)))
    calls, source = FORMATS[name].forced_calls, data.draw(st.sampled_from(["free", "forced"]))
    num = data.draw(st.integers(1, 3 if calls.separator is not None else 1))
    arguments = st.dictionaries(TEXTS, TEXTS | st.lists(TEXTS, max_size=2), max_size=2)
    written = [json.dumps(data.draw(arguments), ensure_ascii=False) for _ in range(num)]
    begun = calls.begin.replace("{name}", "f")
    each = [f"{begun}{one}{calls.end}" for one in written]
    text = calls.before + (calls.separator or "").join(each) + calls.after
    cuts = data.draw(st.sets(st.integers(1, len(text)), max_size=5))
    assert parsed(FORMATS[name], text, cuts, calls=source) == Message("", "", [("f", one) for one in written])


@given(st.data())
def test_nothing_but_space_around_marks_is_lost_of_any_text(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(FORMATS)))
    pieces = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "f[ARGS]", "<|python_tag|>", '{"name": "f", ']
    pieces += ['"arguments": {', "}", '"', "\\", "[", "]", ",", " \n", "text", "}}"]
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), min_size=1, max_size=12)))
    cuts = data.draw(st.sets(st.integers(1, len(text)), max_size=5))
    message = parsed(FORMATS[name], text)
    assert parsed(FORMATS[name], text, cuts) == message
    if not message.calls:
        assert "".join(message.content.split()) == "".join(text.split())


@pytest.mark.parametrize("name", FORMATS)
def test_of_forced_calls_that_are_cut_no_markup_is_content(name: str) -> None:
    calls = FORMATS[name].forced_calls
    begun = f"{calls.before}{calls.begin}".replace("{name}", "f")
    whole = f'{begun}{{"a": "</tool_call>[TOOL_CALLS]"}}{calls.end}{calls.after}'
    for end in range(1, len(whole) + 1):
        message = parsed(FORMATS[name], whole[:end], calls="forced")
        assert message.content == ""
        assert [name for name, _ in message.calls] == ["f"] * (end > len(begun))
    assert parsed(FORMATS[name], whole, calls="forced").calls == [("f", '{"a": "</tool_call>[TOOL_CALLS]"}')]


@pytest.mark.parametrize(
    "text", ["[TOOL_CALLS]", "[TOOL_CALLS]f[ARGS]{}", '[TOOL_CALLS]{"\\"', "[TOOL_CALLS]f"]
)
def test_many_marks_take_linear_time(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    num_fed = 0

    class Counting(ResponseParser):
        def feed(self, text: str) -> Any:
            nonlocal num_fed
            num_fed += len(text)
            return super().feed(text)

    monkeypatch.setattr("transformers.utils.chat_parsing.ResponseParser", Counting)
    num = 10 * MAX_CALLS
    message = parsed(MAGISTRAL, text * num)
    assert num_fed <= (MAX_CALLS + 1) * num * len(text)
    assert len(message.calls) == (MAX_CALLS if text.endswith("{}") else 0)
    assert message.content == text * (num - len(message.calls))


def test_a_list_of_calls_is_kept_as_far_as_a_message_may_have_them() -> None:
    text = "[TOOL_CALLS] [" + ", ".join(['{"name": "f", "arguments": {}}'] * (MAX_CALLS + 2)) + "]"
    for cuts in ((), range(1, len(text))):
        assert parsed(MISTRAL_7B, text, cuts) == Message("", "", [("f", "{}")] * MAX_CALLS)


@pytest.mark.parametrize("num_spaces", [8, 9])
def test_the_space_in_a_head_is_bounded(num_spaces: int) -> None:
    text = f'<tool_call>{" " * num_spaces}{{"name": "f", "arguments": {{}}}}</tool_call>'
    message = parsed(QWEN, text, range(1, len(text)))
    assert (
        message
        == parsed(QWEN, text)
        == (Message("", "", [("f", "{}")]) if num_spaces == 8 else Message(text))
    )


def test_a_head_at_its_bounds_is_found_wherever_it_is_cut() -> None:
    gap, name = " " * 8, "n" * 128
    keys = gap.join(
        ["", "{", '"type"', ":", '"function"', ",", '"name"', ":", f'"{name}"', ",", '"arguments"', ":"]
    )
    for text in (
        f"<tool_call>{keys}{gap}{{}}}}",
        f"<tool_call>{gap}{name}{gap}[CALL_ID]{gap}{'i' * 32}{gap}[ARGS]{gap}{{}}",
    ):
        assert (
            parsed(QWEN, text) == parsed(QWEN, text, range(1, len(text))) == Message("", "", [(name, "{}")])
        )


def test_reasoning_that_the_prompt_begins() -> None:
    for prompt, begun in [("<|im_start|>assistant\n<think>\n", "<think>"), ("A <think>?<|im_end|>", "")]:
        assert QWEN.begun(prompt) == begun
    assert parsed(QWEN, "\nhm\n</think>\n\nYes.", begun="<think>") == Message("Yes.", "hm")
    assert LLAMA.begun("<think>") == ""
    for continued, begun in [
        ("<think>\nSo", "<think>"),
        ("<think>So</think>Yes", ""),
        ("Yes <think>", "<think>"),
        ("Yes <think> so", ""),
    ]:
        assert QWEN.begun(f"User: <think><|im_start|>assistant\n{continued}", continued) == begun


def test_what_is_not_asked_for_is_left_out() -> None:
    text = f"<think>hm</think>{TWO}"
    assert parsed(QWEN, text, is_parallel=False) == Message("Sure.", "hm", [("f", NESTED)])
    assert parsed(QWEN, text, calls="none") == Message(TWO, "hm")
    assert parsed(QWEN, text, returns_reasoning=False) == Message("Sure.", "", [("f", NESTED), ("g", "{}")])


def test_ids_are_as_the_family_has_them() -> None:
    (call,) = MessageParser(MAGISTRAL, MessageParsing(calls="free")).push("[TOOL_CALLS]f[ARGS]{}").tool_calls
    assert call.id is not None and len(call.id) == 9 and call.id.isalnum()
    (call,) = MessageParser(MessageFormat(), MessageParsing(calls="forced")).push(TWO + "\n").tool_calls[:1]
    assert call.id is not None and call.id.startswith("call_")


@pytest.mark.parametrize(
    "template",
    [
        "",
        "{{ messages }}",
        "<tool_call>{name}\n<arg_key>",
        "<tool_call>\n<function=name>",
        "<|start_header_id|>",
    ],
)
def test_templates_of_other_families_tell_no_format_of_calls(template: str) -> None:
    assert MessageFormat.of(template) == MessageFormat()
    assert MessageFormat.of(template, "hermes", "deepseek_r1") == QWEN
    assert MessageFormat.of(template, "llama3_json", "none") == LLAMA


def test_names_of_parsers_go_before_the_template() -> None:
    assert MessageFormat.of("</think>", reasoning_parser="none").reasoning is None
    assert MessageFormat.of("[TOOL_CALLS] [ARGS]", "mistral", "mistral") == MAGISTRAL
