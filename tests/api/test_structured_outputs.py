"""``response_format`` and ``structured_outputs`` over HTTP: the official client, streams, batches, errors."""

from __future__ import annotations

import json
from typing import Any, Literal

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
        model=MODEL, messages=QUESTION, response_format={"type": "json_object"}, max_tokens=300, temperature=0
    )
    text = answer.choices[0].message.content or ""
    assert text.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": schema_format({"items": {"not": {}}})}, "response_format", "#/items"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format", "type"),
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
        ({"guided_json": {}}, "guided_json", "Use structured_outputs."),
        ({"structured_outputs": {"regex": "[a"}}, "structured_outputs", "unclosed"),
        ({"structured_outputs": {"grammar": "start: a"}}, "structured_outputs", "unknown name"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs", "whitespace_pattern"),
        ({"structured_outputs": {"regex": "a"}, "response_format": INTEGER}, "structured_outputs", "either"),
    ],
)
def test_what_cannot_be_used_is_a_400_that_says_where(
    client: OpenAI, fields: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model=MODEL, messages=QUESTION, extra_body=fields)
    assert raised.value.param == param and message in str(raised.value)


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
