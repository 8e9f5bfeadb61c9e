"""What grammars and tools force of an answer over HTTP: the official client, streams, batches, errors."""

from __future__ import annotations

import json
from typing import Any, Literal

import jsonschema
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.api.batch_inputs import as_jsonl, chat_line, result_lines, submit, wait_ended
from tests.api.servers import MODEL, RunningServer, chunks_of

QUESTION: list[Any] = [{"role": "user", "content": "Describe a fruit."}]


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}


INTEGER = schema_format({"type": "integer"})


class Fruit(BaseModel):
    colour: Literal["red", "green", "yellow"]
    sour: bool


def test_the_client_parses_what_it_asked_for(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=QUESTION, response_format=Fruit, max_tokens=200, n=2, seed=1
    )
    assert len(answer.choices) == 2
    assert all(isinstance(choice.message.parsed, Fruit) for choice in answer.choices)
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}


def test_a_stream_is_that_of_the_whole_answer(server: RunningServer) -> None:
    body = {"prompt": "Yes or no?", "structured_outputs": {"choice": ["yes", "no"]}, "temperature": 0}
    whole = server.http.post("/v1/completions", json=body).json()["choices"][0]
    chunks = chunks_of(server.http.post("/v1/completions", json={**body, "stream": True}).text)
    assert whole["text"] == "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert whole["text"] in ("yes", "no")
    logged = server.http.post("/v1/completions", json={**body, "logprobs": 5}).json()["choices"][0]
    assert logged["text"] == whole["text"]
    assert all(value is not None for top in logged["logprobs"]["top_logprobs"] for value in top.values())


def test_json_objects(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, response_format={"type": "json_object"}, max_tokens=60, temperature=0
    )
    text = answer.choices[0].message.content or ""
    assert text.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": schema_format({"items": {"not": {}}})}, "response_format", "#/items"),
        (
            {"response_format": {"type": "json_object", "schema": {}}},
            "response_format",
            "Use type json_schema",
        ),
        (
            {"response_format": schema_format({"const": "a" * 70_000})},
            "response_format",
            "json_schema.schema may",
        ),
        ({"structured_outputs": {"regex": "[a"}}, "structured_outputs", "unclosed"),
    ],
)
def test_what_cannot_be_used_is_a_400_that_says_where(
    client: OpenAI, fields: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model=MODEL, messages=QUESTION, extra_body=fields)
    assert raised.value.param == param and message in str(raised.value)


@pytest.mark.slow  # of any line that cannot be: tests/api/test_batches.py
def test_lines_of_a_batch_are_structured_and_one_that_cannot_be_fails_alone(client: OpenAI) -> None:
    good = [
        chat_line(f"good-{index}", "A number.", response_format=INTEGER, max_tokens=40) for index in range(3)
    ]
    bad = chat_line("bad", "A number.", structured_outputs={"regex": "[a"})
    batch = wait_ended(client, submit(client, as_jsonl([*good, bad])).id)
    assert (batch.status, batch.request_counts and batch.request_counts.failed) == ("completed", 1)
    done, (failed,) = result_lines(client, batch)
    assert len(done) == 3
    for line in done:
        choice = line["response"]["body"]["choices"][0]
        assert choice["finish_reason"] != "stop" or isinstance(json.loads(choice["message"]["content"]), int)
    assert failed["response"]["status_code"] == 400
    assert failed["response"]["body"]["error"]["param"] == "structured_outputs"


TOO_LARGE = {
    "structured_outputs": {"regex": "(((a{1,50}){1,50}){1,50}){1,50}"},
    "max_tokens": 30,
    "min_tokens": 25,
}


def test_a_grammar_that_grows_too_large_on_the_way_is_a_fault_of_the_request(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="cannot go on within its grammar"):
        client.chat.completions.create(model=MODEL, messages=QUESTION, extra_body=TOO_LARGE)
    line = chat_line("large", "A number.", **TOO_LARGE)
    batch = wait_ended(client, submit(client, as_jsonl([line])).id)
    _, (failed,) = result_lines(client, batch)
    assert failed["response"]["status_code"] == 400
    assert "cannot go on within its grammar" in failed["response"]["body"]["error"]["message"]


WEATHER_QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"$ref": "#/$defs/unit"},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["C", "F"]}},
}


def tool(name: str, parameters: Any = WEATHER) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


TOOLS: list[Any] = [tool("weather"), {"type": "function", "function": {"name": "clock"}}]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
ASKED: dict[str, Any] = {"model": MODEL, "messages": WEATHER_QUESTION, "tools": TOOLS, "max_tokens": 400}


def check_calls(calls: Any) -> None:
    assert calls and len({call["id"] for call in calls}) == len(calls)
    for call in calls:
        assert call["type"] == "function"
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        jsonschema.validate(arguments, {"weather": WEATHER, "clock": {"maxProperties": 0}}[name])


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required", "parallel_tool_calls": False, "n": 2, "seed": 1},
        {"tool_choice": NAMED, "temperature": 0, "logprobs": True},
    ],
)
def test_forced_calls_follow_the_schemas_of_their_tools(client: OpenAI, fields: dict[str, Any]) -> None:
    answer = client.chat.completions.create(**ASKED, **fields)
    assert len(answer.choices) == fields.get("n", 1)
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        calls = choice.model_dump()["message"]["tool_calls"]
        assert len(calls) == 1
        check_calls(calls)
        assert fields["tool_choice"] == "required" or calls[0]["function"]["name"] == "weather"


def test_a_stream_of_calls_is_the_whole_answer(client: OpenAI) -> None:
    asked = {**ASKED, "tool_choice": NAMED, "temperature": 0}
    whole = client.chat.completions.create(**asked).choices[0].message.tool_calls
    with client.chat.completions.stream(**asked) as stream:
        deltas = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls" and len(deltas) > 1
    assert whole is not None and final.message.tool_calls is not None
    (expected,), (got,) = whole, final.message.tool_calls
    assert (got.type, got.id[:5]) == ("function", "call_") and got.type == expected.type == "function"
    assert (got.function.name, got.function.arguments) == (
        expected.function.name,
        expected.function.arguments,
    )


def test_chunks_have_openais_form(server: RunningServer) -> None:
    asked = {**ASKED, "tool_choice": NAMED, "stream": True, "stream_options": {"include_usage": True}}
    chunks = chunks_of(server.http.post("/v1/chat/completions", json=asked).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    first, *others = [each["tool_calls"] for each in deltas if "tool_calls" in each]
    assert (first[0]["index"], first[0]["type"], first[0]["function"]["name"]) == (0, "function", "weather")
    assert all(set(each[0]) == {"index", "function"} for each in others)
    assert all(not each.get("content") for each in deltas)
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls" and chunks[-1]["usage"]


def test_a_call_that_max_tokens_cuts_off_says_so(client: OpenAI) -> None:
    answer = client.chat.completions.create(**{**ASKED, "max_tokens": 20}, tool_choice=NAMED)
    assert answer.choices[0].finish_reason == "length"


def test_a_conversation_with_calls_and_no_choice_is_answered_in_text(client: OpenAI) -> None:
    messages = [
        *WEATHER_QUESTION,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]
    asked: dict[str, Any] = {**ASKED, "messages": messages, "max_tokens": 5}
    answer = client.chat.completions.create(**asked, tool_choice="none")
    assert answer.choices[0].message.content and answer.choices[0].message.tool_calls is None


@pytest.mark.slow  # likewise
def test_lines_of_a_batch_call_tools_and_one_that_cannot_fails_alone(client: OpenAI) -> None:
    fields = {"tools": TOOLS, "max_tokens": 400, "tool_choice": "required", "parallel_tool_calls": False}
    lines = [chat_line("good", "Rain?", **fields), chat_line("bad", "Rain?", tools=TOOLS)]
    batch = wait_ended(client, submit(client, as_jsonl(lines)).id)
    (good,), (bad,) = result_lines(client, batch)
    choice = good["response"]["body"]["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    check_calls(choice["message"]["tool_calls"])
    assert bad["response"]["status_code"] == 400
    assert bad["response"]["body"]["error"]["param"] == "tool_choice"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": TOOLS}, "tool_choice", "--tool-call-parser"),
        ({"tools": [tool("a b")]}, "tools", "tools[0].function.name"),
        ({"tools": [tool("a"), tool("a")]}, "tools", "tools[1].function.name"),
        ({"tools": [tool("a", {"type": "string"})]}, "tools", "tools[0].function.parameters"),
        ({"tools": [tool("a", "object")]}, "tools", "parameters"),
        ({"tools": [{"type": "function"}]}, "tools", "tools.0.function"),
        ({"tools": [{"type": "web_search"}]}, "tools", "type"),
        ({"tools": [tool(f"f{index}") for index in range(129)]}, "tools", "128"),
        ({"tool_choice": "required"}, "tool_choice", "tools"),
        ({"tools": TOOLS, "tool_choice": {**NAMED, "function": {"name": "x"}}}, "tool_choice", "'x'"),
    ],
)
def test_tools_that_cannot_be_used_are_a_400_that_names_the_field(
    client: OpenAI, fields: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model=MODEL, messages=WEATHER_QUESTION, extra_body=fields)
    assert raised.value.param == param and message in str(raised.value)
