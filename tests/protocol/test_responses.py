from __future__ import annotations

import json
import re
from typing import Any, cast

import msgspec
import pytest

from backfill.core.errors import EngineDead, RequestError
from backfill.core.plan import TokenLogprobs
from backfill.core.request import FinishReason
from backfill.generation.generator import TextDelta
from backfill.generation.tokenizer import Tokenizer
from backfill.protocol.chat import ChatCompletionRequest
from backfill.protocol.encoding import EncodedBody, EncodedList
from backfill.protocol.generation import CompletionRequest
from backfill.protocol.parsing import MAX_CONTAINERS, MAX_ITEMS, MAX_KEYS, check_shape, parse_body
from backfill.protocol.responses import Response, error_of
from backfill.protocol.shapes import ChatShape, CompletionShape
from tests.protocol.builders import make_generation

GENERATION = make_generation()


class LetterTokenizer:
    def token_text(self, token_id: int) -> str:
        return chr(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return self.token_text(token_id).encode()


TOKENIZER = cast(Tokenizer, LetterTokenizer())


def whole(shape: ChatShape | CompletionShape, text: str, *, with_logprobs: bool) -> dict[str, object]:
    response = Response(GENERATION, shape)
    for letter in text:
        logprobs = TokenLogprobs(-0.5, 1, ((ord(letter), -0.5), (0, -2.25))) if with_logprobs else None
        response.add(0, TextDelta(letter, ord(letter), logprobs, FinishReason.STOP))
    body = json.loads(bytes(EncodedBody(response.whole())))
    (choice,) = body["choices"]
    result: dict[str, object] = choice["logprobs"]
    return result


def test_a_whole_chat_body_has_the_logprobs_of_every_token() -> None:
    def entry(letter: str, logprob: float) -> dict[str, object]:
        return {"token": letter, "logprob": logprob, "bytes": list(letter.encode())}

    content = [{**entry(c, -0.5), "top_logprobs": [entry(c, -0.5), entry("\0", -2.25)]} for c in 'a"é']
    assert whole(ChatShape(TOKENIZER), 'a"é', with_logprobs=True) == {"content": content}


def test_a_whole_completion_body_has_the_logprobs_of_every_token() -> None:
    assert whole(CompletionShape(TOKENIZER), 'a"é', with_logprobs=True) == {
        "tokens": ["a", '"', "é"],
        "token_logprobs": [-0.5] * 3,
        "top_logprobs": [{c: -0.5, "\0": -2.25} for c in 'a"é'],
        "text_offset": [0, 1, 2],
    }


def test_a_completion_names_the_token_that_was_drawn_beside_the_likely_ones() -> None:
    for top in ((), ((ord("x"), -0.1), (ord("y"), -2.5))):
        found = CompletionShape(TOKENIZER).logprobs(ord("a"), TokenLogprobs(-7.5, 9, top), 0)
        (of_token,) = found["top_logprobs"]
        assert list(of_token.items()) == [*((chr(token), value) for token, value in top), ("a", -7.5)]


@pytest.mark.parametrize("shape", [ChatShape(TOKENIZER), CompletionShape(TOKENIZER)])
def test_logprobs_that_nobody_asked_for_are_null(shape: ChatShape | CompletionShape) -> None:
    assert whole(shape, "ab", with_logprobs=False) is None


def cached(usage: dict[str, Any]) -> int:
    num_cached: int = usage["prompt_tokens_details"]["cached_tokens"]
    return num_cached


def delta(num_cached_tokens: int, finish_reason: FinishReason | None = FinishReason.STOP) -> TextDelta:
    return TextDelta("a", 97, None, finish_reason, num_cached_tokens=num_cached_tokens)


@pytest.mark.parametrize("shape", [ChatShape(TOKENIZER), CompletionShape(TOKENIZER)])
def test_usage_says_how_much_of_the_prompt_was_cached(shape: ChatShape | CompletionShape) -> None:
    response = Response(GENERATION, shape)
    response.add(0, delta(0, None))
    response.add(0, delta(32))
    usage = response.whole()["usage"]
    assert (cached(usage), usage["prompt_tokens"], usage["completion_tokens"]) == (32, 2, 2)


def test_every_prompt_counts_once_with_the_choice_that_found_least() -> None:
    generation = make_generation(num_choices=4, prompts=[[5, 6], [7, 8]])
    response = Response(generation, CompletionShape(TOKENIZER))
    # The first choice of each prompt computes what the second finds. They may begin in any order.
    for choice, num_cached, so_far in ((1, 96, 96), (0, 16, 16), (2, 0, 16), (3, 64, 16)):
        response.chunks(choice, delta(num_cached))
        assert cached(response.usage_chunk()["usage"]) == so_far
    response = Response(generation, CompletionShape(TOKENIZER))
    for choice, num_cached in ((0, 16), (1, 96), (2, 48), (3, 48)):
        response.add(choice, delta(num_cached))
    usage = response.whole()["usage"]
    assert (cached(usage), usage["prompt_tokens"], usage["completion_tokens"]) == (16 + 48, 4, 4)


def test_the_best_outputs_are_those_whose_tokens_are_most_likely_in_the_mean() -> None:
    generation = make_generation(num_choices=6, prompts=[[5, 6], [7, 8]])
    generation = msgspec.structs.replace(generation, num_best=2, returns_logprobs=False)
    response = Response(generation, CompletionShape(TOKENIZER))
    outputs = [[("a", -1.0)], [("b", -0.5), ("b", -0.9)], [("c", -3.0)]]
    outputs += [[("d", -2.0)], [("e", -4.0)], [("f", -1.5), ("f", -1.5), ("f", -1.5)]]
    for index, output in enumerate(outputs):
        for text, logprob in output:
            response.add(index, TextDelta(text, 97, TokenLogprobs(logprob, 1, ()), FinishReason.STOP))
    body = response.whole()
    assert [(each["index"], each["text"]) for each in body["choices"]] == list(
        enumerate(["bb", "a", "fff", "d"])
    )
    assert all(each["logprobs"] is None for each in body["choices"])
    assert body["usage"]["completion_tokens"] == 9, "the others were made too"


def test_running_usage_has_the_cached_tokens_from_the_first_chunk_on() -> None:
    generation = msgspec.structs.replace(GENERATION, usage_on_every_chunk=True)
    response = Response(generation, ChatShape(TOKENIZER))
    for finish_reason in (None, FinishReason.STOP):
        chunks = response.chunks(0, delta(16, finish_reason))
        assert {cached(chunk["usage"]) for chunk in chunks} == {16}


def test_the_death_of_an_engine_says_how_it_ended() -> None:
    status, body = error_of(EngineDead("The engine process ended: rank 1 of 2 was killed by signal 9."))
    assert (status, body["error"]["code"]) == (503, "server_is_overloaded")
    assert "rank 1 of 2 was killed" in body["error"]["message"]


def encoded_list(entries: list[object], group: int) -> EncodedList:
    encoded = EncodedList()
    for start in range(0, len(entries), group):
        encoded.extend(entries[start : start + group])
    return encoded


def test_a_body_with_encoded_lists_is_the_body_with_those_lists() -> None:
    entries: list[object] = [{"token": 'a\0"\n', "bytes": [0, 34], "logprob": -0.1}, None, 1e-9, "é", [[]]]
    plain = {
        "id": "x\0y",
        "choices": [{"logprobs": {"content": entries}}, {"logprobs": None}],
        "end": [entries],
    }
    body = {
        "id": "x\0y",
        "choices": [{"logprobs": {"content": encoded_list(entries, 1)}}, {"logprobs": None}],
        "end": [encoded_list(entries, 3)],
    }
    encoded = EncodedBody(body)
    assert json.loads(bytes(encoded)) == plain
    assert b"".join(encoded.chunks()) == bytes(encoded)
    assert encoded.num_bytes == len(bytes(encoded))
    assert bytes(EncodedBody({"a": EncodedList()})) == b'{"a":[]}'


def test_a_long_body_comes_in_chunks() -> None:
    entries: list[object] = ["x" * 1000] * 2000
    chunks = list(EncodedBody({"a": encoded_list(entries, 1), "b": encoded_list(entries, 2)}).chunks())
    assert max(map(len, chunks)) < 300_000
    assert json.loads(b"".join(chunks)) == {"a": entries, "b": entries}
    with pytest.raises(TypeError):
        EncodedBody({"a": object()})


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


@pytest.mark.parametrize(
    ("fields", "where", "got"),
    [
        ({"stop": ["a", 5]}, r"'stop\.1'", "string, got 5"),
        ({"stop": [""] * 17}, "'stop'", "16 items, got 17"),
        ({"stop": {"a": 1}}, "'stop'", 'got {"a": 1}'),
        ({"prompt": [1, 2, "a"]}, r"'prompt\.2'", 'integer, got "a"'),
        ({"prompt": ["a", 5]}, r"'prompt\.1'", "string, got 5"),
        ({"prompt": [[1], [2, None]]}, r"'prompt\.1\.1'", "got null"),
        ({"stop": ["a", 5], "n": "b", "prompt": 7}, "'n'", 'got "b"'),
    ],
)
def test_what_is_wrong_in_a_list_is_named(fields: dict[str, Any], where: str, got: str) -> None:
    with pytest.raises(RequestError, match=f"{where}.*{re.escape(got)}") as refused:
        parse_body(CompletionRequest, json.dumps({"prompt": "a", **fields}).encode())
    assert refused.value.param == where.strip("'").partition("\\")[0]


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
