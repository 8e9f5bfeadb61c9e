"""Keywords of LLM and AsyncLLM. No test here starts an engine."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from backfill import LLM, AsyncLLM, BackfillError, InvalidOption
from backfill.core.config import EngineConfig
from backfill.core.options import options_of
from tests.test_docs import options as command_options


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_unknown_keywords_are_a_type_error_that_names_them(kind: type[LLM | AsyncLLM]) -> None:
    with pytest.raises(TypeError, match=rf"{kind.__name__}\(\).*'kv_gb', 'max_seqs'.*max_num_seqs"):
        kind(kv_gb=1, max_seqs=5)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"kv_gib": -1.0}, "^kv_gib must be above 0"),
        ({"kv_gib": "1"}, "^kv_gib must be a number or None, got '1'"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, r"^max_num_batched_tokens \(4\).*max_num_seqs"),
        ({"host_kv_gib": 0, "checkpointing": "eager"}, "^checkpointing eager needs .* and host_kv_gib is 0"),
        ({"generation_config": "none"}, "^generation_config must be auto or vllm"),
        ({"tool_call_parser": "none"}, "^tool_call_parser must be auto, hermes"),
        ({"reasoning_parser": "r1"}, "^reasoning_parser must be auto, none"),
        ({"log_level": "LOUD"}, "^log_level must be"),
        ({"seed": "x"}, "^seed must be a whole number, got 'x'"),
        ({"chat_template": "{{ messages"}, "^chat_template, line 1"),
        ({"chat_template": "/nowhere/a.jinja"}, "^chat_template /nowhere/a.jinja cannot be read"),
    ],
)
def test_values_that_cannot_be_are_value_errors_in_the_callers_words(
    keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        LLM("nothing is looked up", **keywords)
    assert isinstance(refusal.value, InvalidOption)


def test_replicas_are_no_option_of_one_engine() -> None:
    with pytest.raises(TypeError, match="'data_parallel_size': it makes one engine") as refusal:
        LLM("nothing is looked up", data_parallel_size=2)
    assert "did you mean" not in str(refusal.value)


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BackfillError, match="no model"):
        LLM("no-such-model")
    with pytest.raises(BackfillError, match=r"has no config\.json"):
        LLM(str(tmp_path))


def test_options_are_those_of_the_server() -> None:
    flags = {flag.removeprefix("--").replace("-", "_") for flag in command_options("serve")}
    assert set(options_of(EngineConfig)) <= flags


def test_help_names_every_option() -> None:
    for kind in (LLM, AsyncLLM):
        parameters = inspect.signature(kind).parameters
        assert {"model", "seed", *options_of(EngineConfig)} <= set(parameters)
        assert all(each.kind is not each.VAR_KEYWORD for each in parameters.values())
