"""Prefix caching through real HTTP: what is found again, by whom, and where it is reported.

Its options, and owners without HTTP: tests/scheduling/test_prefix_caching.py and tests/api/test_fields.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import httpx
import pytest

from tests.api.batch_inputs import as_jsonl, completion_line, result_lines, submit, wait_ended
from tests.api.servers import RunningServer, chunks_of, wait_until

BLOCK_SIZE = 16
NUM_TOKENS = 100
NUM_CACHEABLE = 96  # whole blocks before the last token, which is always computed
_first_tokens = itertools.count(1000)


def new_prompt() -> list[int]:
    """Token ids that no other prompt begins with."""
    return [next(_first_tokens), *range(5000, 5000 + NUM_TOKENS - 1)]


def usage_of(server: RunningServer, prompt: list[int], key: str = "one", **body: Any) -> dict[str, Any]:
    usage: dict[str, Any] = server.complete(prompt, key, max_tokens=2, **body)["usage"]
    return usage


def cached(usage: dict[str, Any]) -> int:
    num_cached: int = usage["prompt_tokens_details"]["cached_tokens"]
    return num_cached


def test_the_second_of_equal_prompts_finds_the_first(server: RunningServer) -> None:
    prompt = new_prompt()
    assert cached(usage_of(server, prompt)) == 0
    assert cached(usage_of(server, prompt)) == NUM_CACHEABLE
    longer = usage_of(server, [*prompt, *range(7000, 7050)])
    assert cached(longer) == NUM_CACHEABLE
    assert longer["prompt_tokens"] == NUM_TOKENS + 50
    differing = [*prompt[: 3 * BLOCK_SIZE], 9, *prompt[3 * BLOCK_SIZE + 1 :]]
    assert cached(usage_of(server, differing)) == 3 * BLOCK_SIZE
    assert cached(usage_of(server, [9, *prompt[1:]])) == 0, "only what begins alike is shared"


@pytest.mark.slow  # a server of its own
def test_owners_share_nothing_and_keys_of_one_owner_do(keyed_server: RunningServer) -> None:
    prompt = new_prompt()
    counts = [cached(usage_of(keyed_server, prompt, key)) for key in ("one", "three", "two", "three")]
    assert counts == [0, 0, NUM_CACHEABLE, NUM_CACHEABLE]
    salted = [cached(usage_of(keyed_server, prompt, key, cache_salt="salt-a")) for key in ("one", "three")]
    assert salted == [0, 0]


def test_salts_divide_what_an_owner_shares(server: RunningServer) -> None:
    prompt = new_prompt()
    salts = ("salt-a", "salt-b", None, "salt-a", None)
    counts = [cached(usage_of(server, prompt, cache_salt=salt)) for salt in salts]
    assert counts == [0, 0, 0, NUM_CACHEABLE, NUM_CACHEABLE]
    assert not any("salt-a" in line for line in server.output)


def test_a_stream_of_a_chat_reports_the_same(server: RunningServer) -> None:
    text = " ".join(f"word{next(_first_tokens)}" for _ in range(40))
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 2, "ignore_eos": True}
    chat["cache_salt"] = text[:20]  # what the template writes first is in other tests' chats, too

    def post(**fields: Any) -> httpx.Response:
        headers = {"Authorization": "Bearer one"}
        return server.http.post("/v1/chat/completions", json=chat | fields, headers=headers)

    assert cached(post().json()["usage"]) == 0
    whole = post().json()["usage"]
    assert cached(whole) == (whole["prompt_tokens"] - 1) // BLOCK_SIZE * BLOCK_SIZE > 0
    stream = post(stream=True, stream_options={"include_usage": True})
    assert chunks_of(stream.text)[-1]["usage"] == whole


def test_a_prompt_with_several_choices_counts_once(server: RunningServer) -> None:
    prompt = new_prompt()
    assert cached(usage_of(server, prompt, n=3)) == 0, "what one choice computes, others may find"
    usage = usage_of(server, prompt, n=3)
    assert (usage["prompt_tokens"], cached(usage)) == (NUM_TOKENS, NUM_CACHEABLE)


@pytest.mark.slow  # without HTTP: tests/jobs/test_prefix_cache.py
def test_lines_find_what_their_owner_sent_online(keyed_server: RunningServer) -> None:
    prompt = new_prompt()
    usage_of(keyed_server, prompt, "one")
    content = as_jsonl([completion_line("line", prompt=prompt)])
    for key, expected in (("two", NUM_CACHEABLE), ("three", 0)):
        client = keyed_server.client(key)
        batch = wait_ended(client, submit(client, content, endpoint="/v1/completions").id)
        (line,), _ = result_lines(client, batch)
        assert cached(line["response"]["body"]["usage"]) == expected
        assert batch.usage is not None
        assert batch.usage.input_tokens_details.cached_tokens == expected


def test_metrics_count_hits(server: RunningServer) -> None:
    names = ("prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_cached_total")
    online = {"class": "online"}
    before = [server.metric(f"backfill:{name}", **online) for name in names]
    prompt = new_prompt()
    for _ in range(3):
        usage_of(server, prompt)
    added = [
        server.metric(f"backfill:{name}", **online) - total for name, total in zip(names, before, strict=True)
    ]
    assert added == [3 * NUM_TOKENS, 2 * NUM_CACHEABLE, 2 * NUM_CACHEABLE]
    for name in names[:2]:
        assert server.metric(f"vllm:{name}") == server.metric(f"backfill:{name}")
    wait_until(lambda: server.metric("backfill:kv_blocks", state="referenced") == 0, "the end of all work")
    assert server.metric("backfill:kv_cache_usage_perc") == 0
    states = ("cached", "cached_with_copy", "protected")
    num_cached = [server.metric("backfill:kv_blocks", state=state) for state in states]
    assert sum(num_cached) >= NUM_CACHEABLE // BLOCK_SIZE
