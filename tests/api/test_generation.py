"""Chat and completions through HTTP with the official client."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import OpenAI

from tests.api.servers import MODEL, RunningServer, chunks_of

QUESTION: list[Any] = [{"role": "user", "content": "Name three colours."}]


def streamed(server: RunningServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = server.http.post(path, json={**body, "stream": True})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    return chunks_of(response.text)


def test_an_answer_has_openais_shape_and_its_stream_joins_to_it(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    assert whole.id.startswith("chatcmpl-")
    assert (whole.object, whole.model) == ("chat.completion", MODEL)
    (choice,) = whole.choices
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason == "length"
    usage = whole.usage
    assert usage is not None and usage.completion_tokens == 24
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    *chunks, last = client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert last.choices == [] and last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (usage.prompt_tokens, 24)
    assert {(chunk.id, chunk.created) for chunk in chunks} == {(last.id, last.created)}


@pytest.mark.parametrize(("asked", "told"), [("flex", "flex"), ("priority", "default")])
def test_flex_runs_as_offline_and_every_chunk_says_the_service_tier(
    server: RunningServer, asked: str, told: str
) -> None:
    before = server.metric("backfill:request_success_total", **{"class": "offline"})
    body = {"messages": QUESTION, "max_tokens": 2, "service_tier": asked, "ignore_eos": True}
    chunks = streamed(server, "/v1/chat/completions", body)
    assert [chunk["service_tier"] for chunk in chunks] == [told] * 3
    num_offline = server.metric("backfill:request_success_total", **{"class": "offline"}) - before
    assert num_offline == (asked == "flex")


def test_a_stream_has_one_chunk_a_token_and_no_usage_unasked(server: RunningServer) -> None:
    body = {"messages": QUESTION, "max_tokens": 9, "ignore_eos": True}
    events = streamed(server, "/v1/chat/completions", body)
    assert len(events) == 1 + 9
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(event["choices"] and "usage" not in event for event in events)


def test_continuous_usage_counts_up(server: RunningServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {
        "prompt": "One two",
        "max_tokens": 4,
        "ignore_eos": True,
        "stream_options": options,
        "stop": None,
        "logprobs": None,
        "repetition_penalty": 1.0,
        "best_of": 1,
    }
    events = streamed(server, "/v1/completions", body)
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 4, 4]


def test_completions_take_text_and_token_ids(server: RunningServer) -> None:
    client = server.client()
    tokens = server.http.post("/tokenize", json={"prompt": "The sea is"}).json()["tokens"]
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "temperature": 0}
    by_text = client.completions.create(prompt="The sea is", **asked)
    by_ids = client.completions.create(prompt=tokens, **asked)
    several = client.completions.create(prompt=[tokens, tokens], **asked)
    assert by_text.choices[0].text == by_ids.choices[0].text
    assert [choice.text for choice in several.choices] == [by_text.choices[0].text] * 2
    assert [choice.index for choice in several.choices] == [0, 1]
    assert several.usage is not None
    assert (several.usage.prompt_tokens, several.usage.completion_tokens) == (2 * len(tokens), 12)


def test_choices_differ_a_seed_repeats_them_and_a_stream_has_them_by_index(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": ["A", "B"], "n": 3, "seed": 5, "max_tokens": 8}
    whole = client.completions.create(**asked, temperature=1.0)
    texts = [choice.text for choice in whole.choices]
    assert len(set(texts)) == 6
    assert whole.usage is not None and whole.usage.completion_tokens == 48
    joined = [""] * 6
    for chunk in client.completions.create(**asked, temperature=1.0, stream=True):
        joined[chunk.choices[0].index] += chunk.choices[0].text
    assert joined == texts


def test_best_of_is_the_likeliest_of_the_outputs_that_n_would_give(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "Once", "max_tokens": 5, "seed": 4, "temperature": 1.2}
    everything = client.completions.create(**asked, n=4, logprobs=0)
    best = client.completions.create(**asked, n=2, best_of=4)

    def mean(choice: Any) -> float:
        logprobs: list[float] = choice.logprobs.token_logprobs
        return sum(logprobs) / len(logprobs)

    ranked = sorted(everything.choices, key=mean, reverse=True)
    assert [choice.text for choice in best.choices] == [choice.text for choice in ranked[:2]]
    assert [choice.index for choice in best.choices] == [0, 1]
    assert all(choice.logprobs is None for choice in best.choices)


def test_stop_strings_end_the_text(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "1, 2, 3, 4, 5,", "max_tokens": 30, "temperature": 0}
    free = client.completions.create(**asked).choices[0].text
    stop = free[6:9]
    ended = client.completions.create(**asked, stop=[stop, "never seen"]).choices[0]
    assert ended.text == free[: free.index(stop)]
    assert ended.finish_reason == "stop"
    assert ended.model_extra is not None
    assert ended.model_extra["stop_reason"] == stop
    kept = client.completions.create(**asked, stop=stop, extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].text == free[: free.index(stop)] + stop
    streamed = client.completions.create(**asked, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == ended.text


def test_stop_tokens_bias_and_lengths(client: OpenAI, server: RunningServer) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "Hello", "max_tokens": 5, "temperature": 0}
    (token,) = server.http.post("/tokenize", json={"prompt": " yes"}).json()["tokens"]
    biased = client.completions.create(**asked, logit_bias={str(token): 100}).choices[0]
    assert biased.text == " yes" * 5
    stopped = client.completions.create(
        **asked, logit_bias={str(token): 100}, extra_body={"stop_token_ids": [token]}
    ).choices[0]
    assert (stopped.text, stopped.finish_reason) == ("", "stop")
    least = client.completions.create(
        **asked, logit_bias={"2": 100}, extra_body={"min_tokens": 3, "return_token_ids": True}
    ).choices[0]
    assert least.model_extra is not None
    assert len(least.model_extra["token_ids"]) == 4
    assert least.finish_reason == "stop"


def test_bad_words_and_allowed_tokens(client: OpenAI, server: RunningServer) -> None:
    (token,) = server.http.post("/tokenize", json={"prompt": " Paris"}).json()["tokens"]
    asked: dict[str, Any] = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 6}
    asked |= {"temperature": 0, "logit_bias": {str(token): 100}}
    assert client.completions.create(**asked).choices[0].text == " Paris" * 6
    without = client.completions.create(**asked, extra_body={"bad_words": ["Paris"]}).choices[0].text
    assert "Paris" not in without
    ids = server.http.post("/tokenize", json={"prompt": " Paris London"}).json()["tokens"]
    allowed = client.completions.create(
        **{**asked, "temperature": 1, "seed": 3, "logit_bias": {}},
        extra_body={"allowed_token_ids": ids, "ignore_eos": True},
    )
    assert set(allowed.choices[0].text.split()) <= {"Paris", "London", "ParisParis", "LondonLondon"}


def test_chat_logprobs(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert len(content) == 3
    for entry in content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 2
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob)
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    assert (
        b"".join(bytes(entry.bytes or ()) for entry in content).decode() == answer.choices[0].message.content
    )


def test_completion_logprobs_and_offsets(client: OpenAI) -> None:
    choice = client.completions.create(
        model=MODEL, prompt="The sun", max_tokens=4, temperature=0, logprobs=2
    ).choices[0]
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert choice.text[offset:].startswith(token)
    assert logprobs.top_logprobs is not None
    assert all(len(top) == 2 for top in logprobs.top_logprobs)


def test_echo_repeats_the_prompt(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "Blue is", "max_tokens": 3, "temperature": 0}
    plain = client.completions.create(**asked).choices[0].text
    assert client.completions.create(**asked, echo=True).choices[0].text == "Blue is" + plain
    streamed = client.completions.create(**asked, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "Blue is" + plain


def test_echo_with_logprobs_scores_the_prompt(client: OpenAI, server: RunningServer) -> None:
    prompt = "Grüße: the sun is a star"
    num_prompt = server.http.post("/tokenize", json={"prompt": prompt}).json()["count"]
    asked: dict[str, Any] = {"model": MODEL, "prompt": prompt, "temperature": 0, "echo": True, "logprobs": 2}
    (whole,) = client.completions.create(**asked, max_tokens=3).choices
    logprobs = whole.logprobs
    assert logprobs is not None and logprobs.text_offset is not None
    assert logprobs.tokens is not None and logprobs.token_logprobs is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == num_prompt + 3
    assert whole.text.startswith(prompt) and logprobs.text_offset[0] == 0
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert whole.text[offset:].startswith(token) or "\ufffd" in token
    first, *others = logprobs.token_logprobs
    assert first is None and all(each <= 0 for each in others)
    assert logprobs.top_logprobs is not None and logprobs.top_logprobs[0] is None
    assert all(len(top) in (1, 2, 3) for top in logprobs.top_logprobs[1:])
    scored = zip(logprobs.tokens[1:], others, logprobs.top_logprobs[1:], strict=True)
    assert all(top[token] >= own for token, own, top in scored), "the token itself too"
    # The prompt alone, which is cached by now; and as a stream.
    only = client.completions.create(**asked, max_tokens=0)
    (alone,) = only.choices
    assert (alone.text, alone.finish_reason) == (prompt, "length")
    assert only.usage is not None and only.usage.completion_tokens == 0
    assert alone.logprobs is not None
    assert alone.logprobs.token_logprobs == logprobs.token_logprobs[:num_prompt]
    assert alone.logprobs.text_offset == logprobs.text_offset[:num_prompt]
    for max_tokens, expected in ((3, whole), (0, alone)):
        chunks = client.completions.create(**asked, max_tokens=max_tokens, stream=True)
        parts = [chunk.choices[0] for chunk in chunks]
        assert "".join(part.text for part in parts) == expected.text
        assert parts[-1].finish_reason == "length"
        found: list[Any] = []
        for part in parts:
            found += (part.logprobs.token_logprobs or []) if part.logprobs is not None else []
        assert expected.logprobs is not None and found == expected.logprobs.token_logprobs


def test_prompt_logprobs_have_vllms_shape(client: OpenAI, server: RunningServer) -> None:
    body = {"prompt": ["The sun", "A moon"], "max_tokens": 1, "n": 2, "prompt_logprobs": 1, "temperature": 0}
    answer = server.http.post("/v1/completions", json=body).json()
    scores = [choice["prompt_logprobs"] for choice in answer["choices"]]
    assert scores[0] == scores[1] and scores[2] == scores[3]
    ids = server.http.post("/tokenize", json={"prompt": "The sun"}).json()["tokens"]
    first, entries = scores[0]
    assert first is None and str(ids[1]) in entries and len(entries) in (1, 2)
    assert entries[str(ids[1])]["decoded_token"] == " sun"
    assert min(entry["rank"] for entry in entries.values()) == 1
    echoed = client.completions.create(model=MODEL, prompt="The sun", max_tokens=0, echo=True, logprobs=0)
    assert echoed.choices[0].logprobs is not None
    assert echoed.choices[0].logprobs.token_logprobs == [None, entries[str(ids[1])]["logprob"]]
    assert echoed.choices[0].logprobs.top_logprobs == [None, {" sun": entries[str(ids[1])]["logprob"]}]
    chat = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=1, extra_body={"prompt_logprobs": 0}
    )
    assert chat.usage is not None and chat.model_extra is not None
    of_chat = chat.model_extra["prompt_logprobs"]
    assert len(of_chat) == chat.usage.prompt_tokens and of_chat[0] is None
    assert all(len(each) == 1 for each in of_chat[1:])


def test_a_conversation_of_parts_and_roles(client: OpenAI) -> None:
    messages: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Say "}, {"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "Again"},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=4)
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 4


def test_many_concurrent_requests_are_all_answered(client: OpenAI, server: RunningServer) -> None:
    def ask(number: int) -> str:
        answer = client.completions.create(
            model=MODEL, prompt=f"Number {number} is", max_tokens=8, temperature=0.7, seed=number
        )
        return answer.choices[0].text

    with ThreadPoolExecutor(24) as pool:
        together = list(pool.map(ask, range(24)))
    assert all(together)
    assert server.metric("backfill:num_requests_running") == 0
    assert server.metric("backfill:kv_cache_usage_perc") == 0


def test_the_clients_request_id_names_the_response(server: RunningServer) -> None:
    body = {"prompt": "Hi", "max_tokens": 1}
    named = server.http.post("/v1/completions", json=body, headers={"X-Request-Id": "mine-1"})
    assert named.headers["x-request-id"] == "mine-1"
    assert named.json()["id"] == "cmpl-mine-1"
    assert server.http.post("/v1/completions", json=body).headers["x-request-id"].startswith("req_")
