from __future__ import annotations

import json

import pytest

from backfill.core.errors import RequestError
from backfill.protocol.chat import ChatCompletionRequest
from backfill.protocol.generation import CompletionRequest
from backfill.protocol.parsing import MAX_CONTAINERS, MAX_ITEMS, MAX_KEYS, check_shape, parse_body


def test_brackets_within_strings_are_text() -> None:
    check_shape(json.dumps({"prompt": '{[ "quoted" \\ {' * MAX_CONTAINERS}).encode())
    check_shape(b'{"prompt": "' + b"[" * 100_000)
    check_shape(b'{"prompt": "' + b'\\"[' * 100_000)
    check_shape(b"[" * MAX_CONTAINERS)
    check_shape(json.dumps({"prompt": [":,{" * 100] * MAX_CONTAINERS}).encode())


@pytest.mark.parametrize("item", [b"{}", b"[]", b'{"a": "["}', b'[{"b": "\\""}]'])
def test_a_body_of_many_items_is_refused_quickly(item: bytes) -> None:
    with pytest.raises(RequestError, match=str(MAX_CONTAINERS)):
        check_shape(b'{"x": [' + b",".join([item] * MAX_CONTAINERS) + b"]}")


@pytest.mark.parametrize("item", [b"1", b'"a"', b'"\\",["'])
def test_a_body_of_too_many_items_is_refused(item: bytes) -> None:
    check_shape(b'{"prompt": [' + b",".join([item] * MAX_ITEMS) + b"]}")
    with pytest.raises(RequestError, match=f"{MAX_ITEMS} items"):
        check_shape(b'{"prompt": [' + b",".join([item] * (MAX_ITEMS + 2)) + b"]}")


def test_a_body_of_too_many_keys_is_refused() -> None:
    check_shape(json.dumps(dict.fromkeys(map(str, range(MAX_KEYS)), ":")).encode())
    with pytest.raises(RequestError, match=f"{MAX_KEYS} keys"):
        check_shape(json.dumps(dict.fromkeys(map(str, range(MAX_KEYS + 1)), ":")).encode())


def test_messages_and_their_parts_are_counted() -> None:
    def chat(messages: list[dict[str, object]]) -> bytes:
        return json.dumps({"messages": messages}).encode()

    message: dict[str, object] = {"role": "user", "content": "a"}
    part = {"type": "text", "text": "a"}
    parse_body(ChatCompletionRequest, chat([message] * 2048))
    parse_body(ChatCompletionRequest, chat([{"role": "user", "content": [part] * 2048}]))
    with pytest.raises(RequestError, match="'messages' may have at most 2048 items") as caught:
        parse_body(ChatCompletionRequest, chat([message] * 2049))
    assert caught.value.param == "messages"
    with pytest.raises(RequestError, match=r"'messages.0.content' may have at most 2048 items"):
        parse_body(ChatCompletionRequest, chat([{"role": "user", "content": [part] * 2049}]))


def test_bodies_are_counted_before_they_are_parsed() -> None:
    raw = b'{"messages": [' + b",".join([b"{}"] * 200_000) + b"]}"
    with pytest.raises(RequestError, match="objects and arrays"):
        parse_body(ChatCompletionRequest, raw)


def test_a_misspelt_objective_is_named_with_the_known_ones() -> None:
    with pytest.raises(RequestError, match=r"'slo\.ttfs'.*takes ttft and tpot") as refused:
        parse_body(ChatCompletionRequest, b'{"messages": [], "slo": {"ttfs": 1}}')
    assert (refused.value.param, refused.value.code) == ("slo.ttfs", "unknown_parameter")


@pytest.mark.parametrize("num_levels", [200, 202])
def test_a_body_of_too_many_levels_is_refused_with_their_number(num_levels: int) -> None:
    nested = b'{"prompt": "", "x": ' + b"[" * (num_levels - 1) + b"]" * (num_levels - 1) + b"}"
    if num_levels == 200:
        parse_body(CompletionRequest, nested)
        return
    with pytest.raises(RequestError, match="at most 200 levels"):
        parse_body(CompletionRequest, nested)
