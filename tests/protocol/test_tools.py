"""What tools and reasoning make of a chat's prompt, grammar and answer, for a model whose family is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backfill.core.errors import RequestError
from backfill.core.request import FinishReason
from backfill.generation.generator import TextDelta
from backfill.generation.message_format import MAX_CALLS, MessageFormat
from backfill.generation.message_parser import MessageParser, MessageParsing
from backfill.generation.tokenizer import Tokenizer
from backfill.models.generation_config import GenerationDefaults
from backfill.preparation.line_file import LineFile
from backfill.preparation.messages import START, LineSelection
from backfill.protocol.generation import Generation
from backfill.protocol.preparer import RequestContext, RequestPreparer, ServedModel
from backfill.protocol.responses import Response, error_of
from backfill.protocol.shapes import ChatShape
from tests.preparation.facts import FACTS

TEMPLATE = """{% for tool in tools or [] %}{{ tool | tojson }}<tool_call>{% endfor %}\
{% for message in messages %}{{ message.content }}{% endfor %}\
{% if thinks is not defined %}<think>
{% endif %}{% if false %}</think>{% endif %}"""
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}},
    {"type": "function", "function": {"name": "g"}},
]
JSON = {"response_format": {"type": "json_object"}}
QUIET = {"chat_template_kwargs": {"thinks": False}}
NAMED = {"tool_choice": {"type": "function", "function": {"name": "g"}}}
F = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
G = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def preparer(default_model: Path) -> RequestPreparer:
    model = ServedModel(names=("m",), root="m", folder=default_model, created=0)
    tokenizer = Tokenizer.from_folder(default_model, chat_template=TEMPLATE)
    preparer = RequestPreparer(model, tokenizer, GenerationDefaults())
    preparer.facts = FACTS
    return preparer


def prepared(preparer: RequestPreparer, **fields: Any) -> Generation:
    body = {"messages": [{"role": "user", "content": "Rain?"}], "tools": TOOLS, "max_tokens": 90, **fields}
    return preparer.prepare("/v1/chat/completions", json.dumps(body).encode(), RequestContext())


def allows(preparer: RequestPreparer, generation: Generation, text: str) -> bool:
    """Whether the output may be this text."""
    structured = generation.request.samplings[0].structured_outputs
    if structured is None:
        return True
    assert preparer._compiler is not None
    matcher = preparer._compiler.matcher(structured)
    token_ids = preparer.tokenizer.encode(text, add_special_tokens=False)
    is_allowed: bool = matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()
    return is_allowed


def test_the_template_is_given_tools_unless_there_are_none(preparer: RequestPreparer) -> None:
    with_tools, without = (
        preparer.tokenizer.decode(prepared(preparer, tools=tools).request.prompts[0]) for tools in (TOOLS, [])
    )
    assert '"name": "f"' in with_tools and '"name": "g"' in with_tools
    assert without == "Rain?<think>\n"
    body = {"messages": [{"role": "user", "content": "Rain?"}], "tools": TOOLS}
    answer = json.loads(preparer.answer("/tokenize", json.dumps(body).encode()))
    assert preparer.tokenizer.decode(answer["tokens"]) == with_tools


@pytest.mark.parametrize(
    ("fields", "allowed", "refused"),
    [
        ({}, ["Hm</think>Yes."], []),
        ({"tool_choice": "none", **JSON}, ['{"b": 1}'], ["Hm</think>{}", G]),
        (JSON, ['{"b": 1}', F, f"{F}\n{G}"], ["Yes.", F.replace("1", '"1"')]),
        ({"tool_choice": "required"}, [f"Hm </thin></think>{F}\n{G}"], [F, f"</think>{F} so", "</think>"]),
        ({"tool_choice": "required", **QUIET}, [f"<think>Hm</think>{F}", F], [f"Hm{F}", f"</think>{F}"]),
        ({"tool_choice": "required", "parallel_tool_calls": False}, [f"</think>{F}"], [f"</think>{F}\n{G}"]),
        (NAMED, [f"</think>{G}"], [f"</think>{F}", f"</think>{G}\n{G}", f"</think>{G.replace('{}', '[]')}"]),
    ],
)
def test_what_an_answer_may_be(
    preparer: RequestPreparer, fields: dict[str, Any], allowed: list[str], refused: list[str]
) -> None:
    generation = prepared(preparer, **fields)
    assert [text for text in allowed if not allows(preparer, generation, text)] == []
    assert [text for text in refused if allows(preparer, generation, text)] == []


@pytest.mark.parametrize("template", ["<tool_call>", "[TOOL_CALLS] [", "[TOOL_CALLS] [ARGS]"])
def test_forced_calls_are_no_more_than_a_message_may_have(
    preparer: RequestPreparer, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    message_format = MessageFormat.of(template)
    monkeypatch.setattr(preparer.tokenizer, "message_format", message_format)
    generation = prepared(preparer, tool_choice="required", **QUIET)
    calls = message_format.forced_calls
    call = calls.begin.replace("{name}", "f") + '{"a": 1}' + calls.end
    for num, is_allowed in ((1, True), (2, True), (MAX_CALLS, True), (MAX_CALLS + 1, False)):
        text = calls.before + (calls.separator or "").join([call] * num) + calls.after
        assert allows(preparer, generation, text) == is_allowed
        assert MessageParser(message_format, MessageParsing(calls="forced")).push(text).tool_calls[
            -1
        ].index == (min(num, MAX_CALLS) - 1)


def test_reasoning_that_a_continued_message_has_begun_goes_on(preparer: RequestPreparer) -> None:
    messages = [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "<think>So it"}]
    generation = prepared(preparer, messages=messages, continue_final_message=True, tool_choice="required")
    assert generation.parsing is not None and generation.parsing.begun == "<think>"
    assert allows(preparer, generation, f" rains.</think>{F}") and not allows(preparer, generation, F)


@pytest.mark.parametrize(
    "field", [{"structured_outputs": {"regex": "a"}}, {"tool_choice": "required", **JSON}]
)
def test_a_grammar_that_leaves_no_place_for_calls_is_refused(
    preparer: RequestPreparer, field: dict[str, Any]
) -> None:
    with pytest.raises(RequestError, match=r"structured_outputs|response_format"):
        prepared(preparer, **field)


def test_tools_that_are_too_large_for_a_grammar_are_refused(preparer: RequestPreparer) -> None:
    large = {"type": "function", "function": {"name": "f", "parameters": {"title": "x" * (64 << 10)}}}
    with pytest.raises(RequestError, match="characters") as raised:
        prepared(preparer, tools=[large], tool_choice="required")
    assert raised.value.param == "tools"


def test_a_schema_that_cannot_be_used_is_refused_with_its_tool(preparer: RequestPreparer) -> None:
    wrong = {"type": "function", "function": {"name": "h", "parameters": {"properties": {"a": {"not": {}}}}}}
    for fields in ({"tool_choice": "required"}, JSON):
        with pytest.raises(RequestError, match=r"Tool 'h': .*#/properties/a.*not") as raised:
            prepared(preparer, tools=[*TOOLS, wrong], **fields)
        assert raised.value.param == "tools"
    schema = {"name": "n", "schema": {"not": {}}}
    form = {"response_format": {"type": "json_schema", "json_schema": schema}}
    for tools, choice in ((TOOLS, "auto"), ([wrong], "none")):
        with pytest.raises(RequestError, match="not") as raised:
            prepared(preparer, tools=tools, tool_choice=choice, **form)
        assert raised.value.param == "response_format"


def test_a_line_whose_tools_the_model_cannot_be_asked_for_is_refused_alone(
    preparer: RequestPreparer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "/v1/chat/completions"
    messages = [{"role": "user", "content": "Rain?"}]
    bodies = [{"messages": messages, "tools": TOOLS, "tool_choice": each} for each in ("auto", "none")]
    lines = [{"custom_id": str(n), "method": "POST", "url": url, "body": b} for n, b in enumerate(bodies)]
    path = tmp_path / "input"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(preparer.tokenizer, "message_format", MessageFormat())
    with pytest.raises(RequestError) as raised:
        prepared(preparer, tool_choice="auto")
    file = LineFile(LineSelection(path=str(path), max_line_bytes=10_000), preparer.prepare)
    first, second = file.read(START, 2).lines
    assert first.refusal == error_of(raised.value) and first.generation is None
    assert second.refusal is None and second.generation is not None


def test_marks_that_are_special_tokens_are_part_of_the_text(preparer: RequestPreparer) -> None:
    own = preparer.tokenizer.message_format
    assert prepared(preparer).request.samplings[0].skip_special_tokens
    try:
        preparer.tokenizer.message_format = MessageFormat(own.calls, ("<|im_start|>", "<|im_end|>"))
        del preparer.tokenizer._special_marks
        assert not prepared(preparer).request.samplings[0].skip_special_tokens
        assert prepared(preparer, tool_choice="none", **JSON).request.samplings[0].skip_special_tokens
    finally:
        preparer.tokenizer.message_format = own
        del preparer.tokenizer._special_marks


def test_each_choice_is_parsed_whole_as_in_a_stream(preparer: RequestPreparer) -> None:
    generation = prepared(preparer, n=2, tool_choice="auto")
    generation = msgspec.msgpack.decode(msgspec.msgpack.encode(generation), type=Generation)
    assert generation.parsing == MessageParsing(calls="free", begun="<think>")
    shape = ChatShape(preparer.tokenizer)
    stream, whole = Response(generation, shape), Response(generation, shape)
    deltas: list[list[dict[str, Any]]] = [[], []]
    reasons = []
    for index, text in enumerate([f"Hm</think>Two: {F}\n{G}", "Hm</think>No."]):
        for position, letter in enumerate(text, start=1):
            reason = FinishReason.STOP if position == len(text) else None
            delta = TextDelta(letter, 5, None, reason)
            whole.add(index, delta)
            choices = [chunk["choices"][0] for chunk in stream.chunks(index, delta)]
            deltas[index] += [choice["delta"] for choice in choices]
        reasons.append(choices[-1]["finish_reason"])
        assert {} not in deltas[index][:-1]
    assert reasons == ["tool_calls", "stop"]
    first, second = whole.whole()["choices"]
    assert [first["finish_reason"], second["finish_reason"]] == reasons
    assert second["message"] == {
        "role": "assistant",
        "content": "No.",
        "reasoning": "Hm",
        "reasoning_content": "Hm",
    }
    for message, parts in zip([first["message"], second["message"]], deltas, strict=True):
        for name in ("content", "reasoning", "reasoning_content"):
            assert "".join(part.get(name) or "" for part in parts) == message[name]
    functions = [call["function"] for call in first["message"]["tool_calls"]]
    assert functions == [{"name": "f", "arguments": '{"a": 1}'}, {"name": "g", "arguments": "{}"}]
    assert "tool_calls" not in second["message"]


@pytest.mark.parametrize(("text", "reason"), [(F[: F.index("1")], "stop"), (f"{F}\n", "tool_calls")])
def test_a_stop_string_within_arguments_ends_no_call(
    preparer: RequestPreparer, text: str, reason: str
) -> None:
    response = Response(prepared(preparer, tool_choice="auto"), ChatShape(preparer.tokenizer))
    response.add(0, TextDelta(f"</think>{text}", 5, None, FinishReason.STOP, stop_reason="1"))
    assert response.whole()["choices"][0]["finish_reason"] == reason


@pytest.mark.parametrize(
    ("choice", "text", "reason"),
    [
        ("required", F, "tool_calls"),
        ("required", F[: F.index("}") + 1], "tool_calls"),
        ("required", f"{F}\n{G[: G.index('}')]}", "length"),
        ("required", f'{F}\n<tool_call>\n{{"na', "length"),
        ("required", f"{F}\n<tool_", "length"),
        ("required", F[: F.index("1")], "length"),
        ("required", "", "length"),
        ("auto", F, "length"),
    ],
)
def test_calls_that_are_forced_and_whole_are_all_that_was_asked_for(
    preparer: RequestPreparer, choice: str, text: str, reason: str
) -> None:
    shape = ChatShape(preparer.tokenizer)
    whole, stream = (Response(prepared(preparer, tool_choice=choice), shape) for _ in range(2))
    delta = TextDelta(f"</think>{text}", 5, None, FinishReason.LENGTH)
    whole.add(0, delta)
    (chosen,) = whole.whole()["choices"]
    assert chosen["finish_reason"] == stream.chunks(0, delta)[-1]["choices"][0]["finish_reason"] == reason
