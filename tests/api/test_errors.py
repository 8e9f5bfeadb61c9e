"""Bad input gets a clear error in OpenAI's shape, and the server keeps serving."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.api.servers import RunningServer

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(autouse=True)
def _serves_on(server: RunningServer) -> Iterator[None]:
    yield
    answer = server.http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1})
    assert answer.status_code == 200, answer.text


def assert_refused(
    server: RunningServer, path: str, body: Any, status: int, param: str | None, code: str | None = None
) -> str:
    response = server.http.post(path, json=body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert (error["param"], error["code"]) == (param, code)
    assert "Traceback" not in error["message"]
    return str(error["message"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e300}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -3}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"min_tokens": 50, "max_tokens": 4}, "min_tokens"),
        ({"n": 0}, "n"),
        ({"n": 100000}, "n"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": [99999999]}, "stop_token_ids"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"7": 1000}}, "logit_bias"),
        ({"logit_bias": {"07": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
        ({"stop_token_ids": list(range(129))}, "stop_token_ids"),
        ({"request_id": "x" * 129}, "request_id"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 2**70}, "seed"),
        ({"top_k": 2**70}, "top_k"),
        ({"priority": 2**70}, "priority"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"cache_salt": ["s"]}, "cache_salt"),
    ],
)
def test_fields_out_of_range_are_named(server: RunningServer, fields: dict[str, Any], param: str) -> None:
    bodies = {"/v1/chat/completions": {"messages": MESSAGES}, "/v1/completions": {"prompt": "hi"}}
    for path, body in bodies.items():
        assert param in assert_refused(server, path, {**body, **fields}, 400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": {}}, "guided_json"),
        ({"best_of": 4}, "best_of"),
    ],
)
def test_unsupported_fields_that_would_change_the_answer_are_refused(
    server: RunningServer, fields: dict[str, Any], param: str
) -> None:
    body = {"messages": MESSAGES, **fields}
    assert_refused(server, "/v1/chat/completions", body, 400, param, "unsupported_parameter")


def test_unknown_and_ignored_fields_are_accepted(server: RunningServer) -> None:
    body = {
        "messages": MESSAGES,
        "max_tokens": 1,
        "tools": [],
        "response_format": {"type": "text"},
        "user": "someone",
        "metadata": {"a": "b"},
        "store": True,
        "made_up": 1,
    }
    assert server.http.post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"messages": []}, "messages", None),
        ({}, "messages", "missing_required_parameter"),
        ({"messages": "hi"}, "messages", None),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages", None),
        ({"messages": [{"role": "user"}]}, "messages", None),
        ({"messages": [*MESSAGES, {"role": "tool", "content": None}]}, "messages", None),
        ({"messages": [{"content": "x"}]}, "messages", "missing_required_parameter"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages",
            None,
        ),
        ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs", None),
        ({"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs", None),
        ({"messages": MESSAGES, "continue_final_message": True}, "continue_final_message", None),
    ],
)
def test_bad_chats(server: RunningServer, body: Any, param: str, code: str | None) -> None:
    assert_refused(server, "/v1/chat/completions", body, 400, param, code)


@pytest.mark.parametrize(
    "prompt", ["", [], [""], [[1], []], [-1], [10**9], None, [1.5], ["a"] * 129], ids=lambda p: str(p)[:20]
)
def test_bad_prompts(server: RunningServer, prompt: Any) -> None:
    for echo in (False, True):
        assert_refused(server, "/v1/completions", {"prompt": prompt, "echo": echo}, 400, "prompt")


def test_a_long_list_of_wrong_items_is_refused_at_the_first(server: RunningServer) -> None:
    for path, name, item in (("/v1/completions", "prompt", 1.5), ("/detokenize", "tokens", "x")):
        few = assert_refused(server, path, {name: [item]}, 400, name)
        many = assert_refused(server, path, {name: [item] * 40_000}, 400, name)
        assert many.partition(", got ")[0] == few.partition(", got ")[0], "one error for all"


def test_a_text_over_any_possible_context_is_refused_before_it_is_tokenized(server: RunningServer) -> None:
    message = assert_refused(
        server, "/v1/completions", {"prompt": "a b " * 49_000}, 400, "prompt", "context_length_exceeded"
    )
    assert "2048 tokens" in message


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "tools", "add_generation_prompt"])
def test_template_variables_cannot_replace_the_template(server: RunningServer, name: str) -> None:
    body = {"messages": MESSAGES, "chat_template_kwargs": {name: "{{ 1 + 1 }}"}}
    message = assert_refused(server, "/v1/chat/completions", body, 400, "chat_template_kwargs")
    assert name in message


def test_a_prompt_beyond_the_context(server: RunningServer) -> None:
    code = "context_length_exceeded"
    prompt = [5] * 2048
    assert_refused(server, "/v1/completions", {"prompt": prompt, "max_tokens": 1}, 400, "prompt", code)
    message = assert_refused(
        server, "/v1/completions", {"prompt": "hi", "max_tokens": 2048}, 400, "max_tokens", code
    )
    assert "2048 tokens" in message
    for text in ("a b " * 2048, "a b " * 49_000):
        chat = {"messages": [{"role": "user", "content": text}]}
        assert_refused(server, "/v1/chat/completions", chat, 400, "messages", code)
    truncated = {"prompt": prompt, "truncate_prompt_tokens": 8, "max_tokens": 1}
    assert server.http.post("/v1/completions", json=truncated).json()["usage"]["prompt_tokens"] == 8


def test_an_unknown_model_is_404(client: OpenAI, server: RunningServer) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-99", messages=MESSAGES)  # type: ignore[arg-type]
    assert caught.value.code == "model_not_found"
    assert server.http.get("/v1/models/gpt-99").status_code == 404


@pytest.mark.parametrize(
    ("raw", "part"),
    [
        (b"{", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"[1, 2]", "JSON object"),
        (b'{"prompt": "\xff\xfe"}', "not valid JSON"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature"),
        (b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", ""),
        (b'{"prompt": "\\ud800"}', ""),
    ],
)
def test_bodies_that_are_not_json(server: RunningServer, raw: bytes, part: str) -> None:
    headers = {"content-type": "application/json"}
    response = server.http.post("/v1/completions", content=raw, headers=headers)
    assert response.status_code == 400, response.text
    assert part in response.json()["error"]["message"]


def test_a_body_over_the_limit_is_413_also_without_a_length(server: RunningServer) -> None:
    body = b'{"prompt": "' + b"a" * 200_000 + b'"}'
    headers = {"content-type": "application/json"}
    for content in (body, (body[i : i + 1000] for i in range(0, len(body), 1000))):
        response = server.http.post("/v1/completions", content=content, headers=headers)
        assert response.status_code == 413
        assert "200000 bytes" in response.json()["error"]["message"]


def test_tokenize_and_detokenize_check_their_input(server: RunningServer) -> None:
    assert_refused(server, "/tokenize", {}, 400, "prompt")
    assert_refused(server, "/detokenize", {"tokens": [10**9]}, 400, "tokens")
    assert_refused(server, "/detokenize", {}, 400, "tokens", "missing_required_parameter")


def test_a_bad_priority_header_is_named(server: RunningServer) -> None:
    headers = {"X-Vllm-Priority": "soon"}
    response = server.http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "priority"
