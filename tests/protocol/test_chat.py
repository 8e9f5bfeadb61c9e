"""Conversations with calls of tools, as chat templates are given them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backfill.core.errors import RequestError
from backfill.generation.message_format import MAX_CALLS
from backfill.generation.tokenizer import Tokenizer
from backfill.protocol.chat import ChatCompletionRequest
from backfill.protocol.parsing import parse_body

TEMPLATE = """{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}\
{% for message in messages %}{{ message.role }}:{{ message.content }}\
{% if 'tool_calls' in message %}{% for call in message.tool_calls %}\
{{ call.id }} {{ call.function.name }}\
{% for key, value in call.function.arguments.items() %} {{ key }}={{ value }}\
{% endfor %}{% endfor %}{% endif %}{{ message.tool_call_id }}|{% endfor %}"""
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def call(arguments: Any, **fields: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments, **fields}}


def conversation(calls: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "no"},
    ]


def rendered(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> str:
    body = parse_body(ChatCompletionRequest, json.dumps({"messages": messages}).encode())
    body.check()
    return tokenizer.render_chat([each.as_template_input() for each in body.messages], tools=[TOOL])


@pytest.fixture(scope="module")
def tokenizer(default_model: Path) -> Tokenizer:
    return Tokenizer.from_folder(default_model, chat_template=TEMPLATE)


@pytest.mark.parametrize(
    ("calls", "written"),
    [
        ([call('{"city": "Oslo", "days": 2}')], "c1 weather city=Oslo days=2"),
        ([call({"city": "Oslo"})], "c1 weather city=Oslo"),
        ([call(""), call("{}")], "c1 weatherc1 weather"),
        ([], ""),
        (None, ""),
    ],
)
def test_a_template_is_given_tools_and_calls_with_their_arguments(
    tokenizer: Tokenizer, calls: Any, written: str
) -> None:
    expected = f"weather;user:Rain?|assistant:{written}|tool:noc1|"
    assert rendered(tokenizer, conversation(calls)) == expected


def test_a_message_without_calls_has_no_list_of_them() -> None:
    body = parse_body(ChatCompletionRequest, json.dumps({"messages": conversation([])}).encode())
    assert all("tool_calls" not in each.as_template_input() for each in body.messages)


NO_OBJECTS = ['{"city": "Os', "[1]", "[" * 20_000, '{"a": NaN}', r'{"a": "\ud83d"}', "Oslo"]


@pytest.fixture(scope="module")
def lenient(default_model: Path) -> Tokenizer:
    """It writes arguments whatever they are."""
    template = "{% for call in messages[1].tool_calls %}{{ call.function.arguments }};{% endfor %}"
    return Tokenizer.from_folder(default_model, chat_template=template)


@pytest.mark.parametrize("arguments", NO_OBJECTS)
def test_arguments_that_are_no_object_stay_text_for_templates_that_take_it(
    tokenizer: Tokenizer, lenient: Tokenizer, arguments: str
) -> None:
    messages = conversation([call("{}"), call(arguments)])
    with pytest.raises(RequestError, match=r"messages\[1\]\.tool_calls\[1\]\.function\.arguments is no"):
        rendered(tokenizer, messages)
    assert rendered(lenient, messages) == f"{{}};{arguments};"


def test_arguments_reach_the_template_as_they_were_written() -> None:
    text = '{"b": 1.0, "a": [123456789012345678901234567890, "\\u00f8", null, true], "é": {"b": {}}}'
    body = parse_body(ChatCompletionRequest, json.dumps({"messages": conversation([call(text)])}).encode())
    arguments = body.messages[1].as_template_input()["tool_calls"][0]["function"]["arguments"]
    assert json.dumps(arguments) == json.dumps(json.loads(text))


@pytest.mark.parametrize(
    ("calls", "where"),
    [
        ([call(5)], "messages.1.tool_calls.0.function.arguments"),
        ([call("{}", name=5)], "messages.1.tool_calls.0.function.name"),
        ([{"id": "c1", "type": "function"}], "messages.1.tool_calls.0.function"),
        ([{**call("{}"), "type": "custom"}], "messages.1.tool_calls.0.type"),
        ([call("{}")] * (MAX_CALLS + 1), "messages.1.tool_calls"),
    ],
)
def test_calls_that_are_none_are_refused_with_their_place(calls: Any, where: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse_body(ChatCompletionRequest, json.dumps({"messages": conversation(calls)}).encode())
    assert refused.value.param == "messages" and f"'{where}'" in str(refused.value)
