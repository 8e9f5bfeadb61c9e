"""Keywords and inputs of the library, and a request on its way to the engine and back, without one."""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backfill import (
    LLM,
    AsyncLLM,
    BackfillError,
    InvalidOption,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from backfill.core.config import EngineConfig, SchedulerConfig
from backfill.core.errors import RequestAborted, RequestError
from backfill.core.options import options_of
from backfill.core.request import FinishReason, ServiceClass
from backfill.core.slo import SLO
from backfill.engine.client import EngineClient
from backfill.execution.grammars import GrammarCompiler
from backfill.generation.generator import TextDelta
from backfill.generation.message_format import MessageFormat
from backfill.generation.tokenizer import Tokenizer
from backfill.llm.inputs import (
    PromptInput,
    one_each,
    parse_conversation,
    parse_conversations,
    parse_prompt,
    parse_prompts,
)
from backfill.llm.progress import FetchLines
from backfill.llm.request import AbortHandle, PreparedRequest, Preparer, run_request
from tests.api.test_fields import HI, OK, make_tokenizer
from tests.builders import make_info
from tests.test_docs import options as command_options

TOKENIZER = make_tokenizer()
GRAMMARS = GrammarCompiler(Path(), 1000, (2,))
PREPARER = Preparer(TOKENIZER, make_info(), None, SchedulerConfig(), random.Random(0), GRAMMARS)


def prepare(prompt: PromptInput, **params: Any) -> PreparedRequest:
    return PREPARER.prepare(
        prompt,
        SamplingParams(max_tokens=4, **params),
        request_id="r",
        seed=1,
        service_class=ServiceClass.OFFLINE,
    )


@pytest.mark.parametrize("prompt", [{"prompt": "hi ok"}, {"prompt_token_ids": [HI, OK]}])
def test_a_prompt_may_have_a_salt(prompt: dict[str, Any]) -> None:
    salted = prepare(parse_prompt({**prompt, "cache_salt": "s" * 256})).generation
    assert (salted.cache_salt, salted.owner) == ("s" * 256, "")
    assert prepare(parse_prompt({**prompt, "cache_salt": None})).generation.cache_salt == ""
    with pytest.raises(RequestError, match="cache_salt must"):
        prepare(parse_prompt({**prompt, "cache_salt": ""}))


def test_objectives_below_the_floors_are_refused() -> None:
    floors = SchedulerConfig(min_ttft_slo=0.5, min_tpot_slo=0.05)
    preparer = Preparer(TOKENIZER, make_info(), None, floors, random.Random(0), GRAMMARS)

    def slo_of(slo: SLO) -> SLO | None:
        params, online = SamplingParams(max_tokens=4), ServiceClass.ONLINE
        prepared = preparer.prepare(
            PromptInput("hi"), params, request_id="r", seed=1, service_class=online, slo=slo
        )
        return prepared.generation.slo

    assert slo_of(SLO(0.5, 0.05)) == SLO(0.5, 0.05)
    with pytest.raises(RequestError, match=r"the least is ttft_s=0\.5 and tpot_s=0\.05") as refused:
        slo_of(SLO(0.4, 0.04))
    assert refused.value.param == "slo"


class ScriptedGenerator:
    """Yields numbered deltas, then raises ``error`` if there is one."""

    def __init__(self, deltas: list[tuple[int, TextDelta]], error: Exception | None = None) -> None:
        self.deltas = deltas
        self.error = error
        self.tokenizer = TOKENIZER

    async def stream(self, *_: object, **options: object) -> AsyncGenerator[tuple[int, TextDelta], None]:
        for numbered in self.deltas:
            yield numbered
        if self.error is not None:
            raise self.error


def outputs_of(generator: Any, request: PreparedRequest) -> list[RequestOutput]:
    async def run() -> list[RequestOutput]:
        return [output async for output in run_request(request, generator, AbortHandle())]

    return asyncio.run(run())


def delta(num_cached_tokens: int, *, ends: bool = True) -> TextDelta:
    reason = FinishReason.STOP if ends else None
    return TextDelta("ok", OK, None, reason, num_cached_tokens=num_cached_tokens)


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_outputs_say_how_much_of_the_prompt_was_cached(kind: RequestOutputKind) -> None:
    request = prepare(PromptInput("hi"), output_kind=kind)
    generator = ScriptedGenerator([(0, delta(48, ends=False)), (0, delta(32))])
    counts = [output.num_cached_tokens for output in outputs_of(generator, request)]
    assert counts == ([32] if kind is RequestOutputKind.FINAL_ONLY else [48, 32])


def test_of_several_outputs_the_one_that_found_least_counts() -> None:
    request = prepare(PromptInput("hi"), n=3, output_kind=RequestOutputKind.FINAL_ONLY)
    (output,) = outputs_of(ScriptedGenerator([(1, delta(32)), (0, delta(16)), (2, delta(32))]), request)
    assert output.num_cached_tokens == 16


def test_without_a_token_nothing_is_known_of_the_cache() -> None:
    (output,) = outputs_of(ScriptedGenerator([], RequestAborted("Aborted.")), prepare(PromptInput("hi")))
    assert output.finished
    assert output.num_cached_tokens is None


def rendered(tokenizer: Tokenizer, messages: list[dict[str, Any]], *, continues: bool = False) -> PromptInput:
    tokenizer.message_format = MessageFormat.of("<tool_call> </think>")
    preparer = Preparer(tokenizer, make_info(), None, SchedulerConfig(), random.Random(0), GRAMMARS)
    return preparer.render_chat(
        messages,
        tools=[{"type": "function", "function": {"name": "f"}}],
        add_generation_prompt=not continues,
        continue_final_message=continues,
        chat_template_kwargs=None,
        cache_salt=None,
    )


@pytest.mark.parametrize(("content", "begun"), [("<think>So it", "<think>"), ("<think>So</think>It", "")])
def test_reasoning_that_a_continued_message_has_begun_goes_on(content: str, begun: str) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]
    prompt = rendered(make_tokenizer(), messages, continues=True)
    assert prompt.parsing is not None and prompt.parsing.begun == begun


def test_an_output_of_a_chat_is_a_message_that_the_conversation_may_go_on_with() -> None:
    tokenizer = make_tokenizer()
    prompt = rendered(tokenizer, [{"role": "user", "content": "hi"}])
    request = replace(prepare(PromptInput("hi")), parsing=prompt.parsing)
    texts = ["<think>hm</think>Yes. ", '<tool_call>{"name": "f", "arguments": {}}', "</tool_call>"]
    reasons = [None, None, FinishReason.STOP]
    deltas = [(0, TextDelta(text, OK, None, reason)) for text, reason in zip(texts, reasons, strict=True)]
    generator = ScriptedGenerator(deltas)
    generator.tokenizer = tokenizer
    *earlier, last = (output.outputs[0] for output in outputs_of(generator, request))
    assert [each.message for each in earlier] == [None, None] and last.text == "".join(texts)
    assert last.message is not None and len(last.message["tool_calls"]) == 1
    message = parse_conversation([last.message, {"role": "tool", "content": "ok"}])[0]
    assert (message["content"], message["reasoning"]) == ("Yes.", "hm")
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}


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


def test_sizes_that_cannot_be_are_refused_before_an_engine_is_launched(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineClient, "launch", lambda _: pytest.fail("launched"))
    with pytest.raises(InvalidOption, match=r"^max_model_len 33000 exceeds the model's context of 32768"):
        LLM(str(small_model), max_model_len=33000)


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
        (b"abc", "prompts must be one prompt or a list"),
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
        ({"role": "user", "content": "a"}, "messages must be a conversation"),
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
    assert one_each(np.array([3, 4]), 2, "priority") == [3, 4]
    with pytest.raises(ValueError, match="priority must be one for each of 2 prompts, got 3"):
        one_each([1, 2, 3], 2, "priority")


def test_each_step_of_a_download_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    fetch = FetchLines("smollm2-135m-instruct")
    for step, done in (("downloading", 0), ("checking", 0), ("checking", 50), ("checking", 90)):
        fetch(step, done, 93_000_000)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == [
        "backfill: downloading smollm2-135m-instruct (93 MB)",
        "backfill: checking smollm2-135m-instruct (93 MB)",
    ]
