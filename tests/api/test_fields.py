"""Fields that decide how a request runs, how its prompt is built, and with whom it shares cached prefixes."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from backfill.generation.tokenizer import Tokenizer
from tests.api.in_process import InProcessServer, in_process_server

BOS, USER, ASSISTANT, HI, LOUD, OK = range(6)
WORDS = {"bos": BOS, "user": USER, "assistant": ASSISTANT, "hi": HI, "loud": LOUD, "ok": OK}
TEMPLATE = (
    "{% if shout %}loud {% endif %}"
    "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
MESSAGES = [{"role": "user", "content": "hi"}]
CONTINUED = [*MESSAGES, {"role": "assistant", "content": "ok"}]


def make_tokenizer() -> Tokenizer:
    """One token for each word, plus a BOS token if special tokens are asked for."""
    backend = BackendTokenizer(WordLevel(WORDS, unk_token="ok"))
    backend.pre_tokenizer = Whitespace()
    backend.post_processor = TemplateProcessing(single="bos $A", special_tokens=[("bos", BOS)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcessServer]:
    folder: Path = tmp_path_factory.mktemp("model")
    with in_process_server(folder, tokenizer=make_tokenizer()) as server:
        yield server


def chat(server: InProcessServer, **fields: Any) -> list[int]:
    """The prompt of a chat."""
    body = {"messages": MESSAGES, "max_tokens": 1, **fields}
    assert server.http.post("/v1/chat/completions", json=body).status_code == 200
    return server.engine.prompts[-1]


def tokenize(server: InProcessServer, **fields: Any) -> list[int]:
    answer = server.http.post("/tokenize", json=fields)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["tokens"]
    return tokens


def test_a_template_writes_its_own_special_tokens_unless_asked(server: InProcessServer) -> None:
    assert chat(server) == chat(server, add_special_tokens=False) == [USER, HI, ASSISTANT]
    assert chat(server, add_special_tokens=None) == [USER, HI, ASSISTANT]
    assert chat(server, add_special_tokens=True) == [BOS, USER, HI, ASSISTANT]


def test_tokenize_renders_messages_as_a_chat_does(server: InProcessServer) -> None:
    for fields in (
        {},
        {"add_special_tokens": True},
        {"chat_template_kwargs": {"shout": True}},
        {"add_generation_prompt": False},
        {"messages": CONTINUED, "continue_final_message": True},
    ):
        assert tokenize(server, **{"messages": MESSAGES, **fields}) == chat(server, **fields), fields
    shouted = tokenize(server, messages=MESSAGES, chat_template_kwargs={"shout": True})
    assert shouted == [LOUD, USER, HI, ASSISTANT]
    assert tokenize(server, messages=CONTINUED, continue_final_message=True)[-1] == OK


def test_tokenize_adds_special_tokens_to_a_prompt_unless_told_not_to(server: InProcessServer) -> None:
    assert tokenize(server, prompt="hi") == [BOS, HI]
    assert tokenize(server, prompt="hi", add_special_tokens=False) == [HI]


def test_tokenize_names_an_unsupported_field(server: InProcessServer) -> None:
    for fields, param in (
        ({"messages": MESSAGES, "continue_final_message": True}, "continue_final_message"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"messages": MESSAGES, "prompt": "hi"}, "prompt"),
    ):
        refused = server.http.post("/tokenize", json=fields)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == param


TIERS = ["auto", "default", "fast", "flex", "priority", "scale", "standard"]


@pytest.mark.parametrize("tier", [None, *TIERS])
def test_the_tier_that_was_used_is_echoed(server: InProcessServer, tier: str | None) -> None:
    body = {"prompt": [3], "max_tokens": 1, "service_tier": tier}
    answered = server.http.post("/v1/completions", json=body)
    assert answered.json()["service_tier"] == ("flex" if tier == "flex" else "default")
    assert server.engine.requests[-1].owner == "", "a server without keys has one owner"


@pytest.mark.parametrize("tier", ["Flex", "flexx", "batch", ""])
def test_an_unknown_tier_is_refused_with_the_list_of_tiers(server: InProcessServer, tier: str) -> None:
    body = {"prompt": [3], "max_tokens": 1, "service_tier": tier}
    refused = server.http.post("/v1/completions", json=body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "service_tier"
    assert all(repr(name) in error["message"] for name in TIERS), error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("size", [1, 20_000], ids=["small", "large"])
def test_an_answer_says_which_fields_had_no_effect(server: InProcessServer, stream: bool, size: int) -> None:
    body = {"prompt": [3] * size, "truncate_prompt_tokens": 1, "max_tokens": 1, "stream": stream}
    idle = {"user": "u", "metadata": {"a": "b"}, "store": True, "prompt_cache_key": "k", "tools": []}
    plain = server.http.post("/v1/completions", json={**body, **idle})
    assert plain.status_code == 200, plain.text
    assert "x-backfill-warning" not in plain.headers
    warned = server.http.post("/v1/completions", json={**body, "max_tokns": 5, "made_up": None})
    assert warned.status_code == 200
    warning = "unknown fields: max_tokns (did you mean max_tokens?), made_up"
    assert warned.headers["x-backfill-warning"] == warning


def test_a_strict_server_refuses_fields_that_have_no_effect() -> None:
    with in_process_server(Path(), tokenizer=make_tokenizer(), strict=True) as server:
        body = {"prompt": [3], "max_tokens": 1, "user": "u", "cache_salt": "s" * 256}
        assert server.http.post("/v1/completions", json=body).status_code == 200
        for fields, param in (({"max_tokns": 5}, "max_tokns"), ({"slo": {}}, "slo")):
            refused = server.http.post("/v1/completions", json={**body, **fields})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == param


def test_the_size_of_an_answer_counts_choices_and_logprobs(server: InProcessServer) -> None:
    body = {"prompt": [3], "max_tokens": 10_000, "n": 100, "logprobs": 20}
    refused = server.http.post("/v1/completions", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "max_tokens"


def test_a_request_has_the_owner_of_its_key_and_its_salt(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    prompts = {"/v1/completions": {"prompt": [3]}, "/v1/chat/completions": {"messages": MESSAGES}}
    digest = hashlib.sha256(b"bare-key").hexdigest()
    owners = {"one": "alice", "two": "alice", "three": "bob", "bare-key": digest}
    keys = ("alice=one", "alice=two", "bob=three", "bare-key")
    with in_process_server(Path(), tokenizer=make_tokenizer(), api_keys=keys) as server:
        # A body over 4 KiB is prepared elsewhere.
        for (path, fields), stream, (key, owner), user in product(
            prompts.items(), (False, True), owners.items(), ("u", "u" * 5000)
        ):
            body = {**fields, "max_tokens": 3, "n": 2, "stream": stream, "user": user}
            body["cache_salt"] = "a-salt"
            answer = server.http.post(path, json=body, headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == 200, answer.text
            requests = server.engine.requests[-2:]
            assert [(each.owner, each.cache_salt) for each in requests] == [(owner, "a-salt")] * 2
    assert digest not in caplog.text and "a-salt" not in caplog.text
