"""A request of the library on its way to the engine and back, without an engine process."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backfill import RequestOutput, RequestOutputKind, SamplingParams
from backfill.core.config import SchedulerConfig
from backfill.core.errors import RequestAborted, RequestError
from backfill.core.request import FinishReason, ServiceClass
from backfill.core.slo import SLO
from backfill.execution.grammars import GrammarCompiler
from backfill.generation.generator import TextDelta
from backfill.generation.message_format import MessageFormat
from backfill.generation.tokenizer import Tokenizer
from backfill.llm.inputs import PromptInput, parse_conversation, parse_prompt
from backfill.llm.request import AbortHandle, PreparedRequest, Preparer, run_request
from tests.api.test_fields import HI, OK, make_tokenizer
from tests.builders import make_info

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
