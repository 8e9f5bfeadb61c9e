from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from backfill.llm.inputs import PromptInput, one_each, parse_conversations, parse_prompts


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a", [PromptInput("a")]),
        (["a", "b"], [PromptInput("a"), PromptInput("b")]),
        (("a",), [PromptInput("a")]),
        ([1, 2], [PromptInput(None, [1, 2])]),
        ([[1], [2, 3]], [PromptInput(None, [1]), PromptInput(None, [2, 3])]),
        (np.array([1, 2]), [PromptInput(None, [1, 2])]),
        ({"prompt": "a"}, [PromptInput("a")]),
        ([{"prompt_token_ids": [4]}, "a"], [PromptInput(None, [4]), PromptInput("a")]),
        ({"prompt": "a", "cache_salt": "s"}, [PromptInput("a", cache_salt="s")]),
        ({"prompt_token_ids": [4], "cache_salt": "s"}, [PromptInput(None, [4], "s")]),
        ({"prompt_token_ids": [4], "cache_salt": None}, [PromptInput(None, [4])]),
        ([], []),
    ],
)
def test_prompts_come_in_many_forms(given: Any, expected: list[PromptInput]) -> None:
    assert parse_prompts(given) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (5, "prompts must be one prompt or a list"),
        (["a", 5], r"prompts\[1\] must be text"),
        (["a", ""], r"prompts\[1\] must not be empty"),
        ("", "prompt must not be empty"),
        ([[]], r"prompts\[0\] must not be empty"),
        ([1, "a"], r"prompts\[0\] must be text"),
        ([[True]], r"prompts\[0\] must be text"),
        ({"text": "a"}, "prompt must be text"),
        ({"prompt": "a", "multi_modal_data": {}}, "prompt must be text"),
        ({"prompt": "a", "cache_salt": "s", "multi_modal_data": {}}, "prompt must be text"),
        ({"prompt_token_ids": "a"}, "prompt must be text"),
    ],
)
def test_a_bad_prompt_is_refused_and_named(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_prompts(given)


def test_conversations_come_alone_or_in_a_list() -> None:
    alone = [{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    parsed = [{"role": "system", "content": "ab"}]
    assert parse_conversations(alone) == [parsed]
    assert parse_conversations([alone, alone]) == [parsed, parsed]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("hello", "messages must be a conversation"),
        (5, "messages must be a conversation"),
        ([], "messages must be a list of messages"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\['content'\]"),
        ([{"role": "nobody", "content": "a"}], r"messages\[0\]\['role'\]"),
        ([{"content": "a"}], r"messages\[0\]\['role'\]"),
        ([[{"role": "user", "content": "a"}], []], r"messages\[1\] must be a list of messages"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            r"messages\[0\]: Message parts of type",
        ),
    ],
)
def test_a_bad_conversation_is_refused_and_named(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_conversations(given)


def test_one_for_all_or_one_each() -> None:
    assert one_each(3, 2, "priority") == [3, 3]
    assert one_each([3, 4], 2, "priority") == [3, 4]
    with pytest.raises(ValueError, match="priority must be one for each of 2 prompts, got 3"):
        one_each([1, 2, 3], 2, "priority")
