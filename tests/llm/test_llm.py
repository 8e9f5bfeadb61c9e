"""LLM on a small model; the real one's tokens: tests/engine/test_generation_equality.py."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from backfill import (
    LLM,
    AsyncLLM,
    EngineDead,
    InvalidOption,
    InvalidRequest,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from backfill.core.errors import InsufficientMemory, ModelNotFound
from tests.api.servers import TIMEOUT_S, wait_until
from tests.llm.conftest import requests_to

PROMPTS = ["Gravity is", "def fibonacci(n):", "The capital of France is"]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


def generate(llm: LLM, prompts: Any, *args: Any, **kwargs: Any) -> list[RequestOutput]:
    return llm.generate(prompts, *args, use_tqdm=False, **kwargs)


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


@torch.inference_mode()
def test_greedy_tokens_equal_transformers(llm: LLM, small_model: Path) -> None:
    params = replace(GREEDY, prompt_logprobs=2)
    answers, tokenizer = generate(llm, PROMPTS, params), llm.get_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float32).eval()
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        (output,) = answer.outputs
        assert (answer.prompt, answer.finished, output.finish_reason) == (prompt, True, "length")
        assert answer.prompt_token_ids == tokenizer(prompt).input_ids
        assert output.text == tokenizer.decode(output.token_ids)
        ids = torch.tensor([answer.prompt_token_ids + output.token_ids[:-1]])
        logits = model(ids).logits[0]
        assert output.token_ids == logits[len(answer.prompt_token_ids) - 1 :].argmax(-1).tolist()
        assert answer.prompt_logprobs is not None and answer.prompt_logprobs[0] is None
        rows = logits.log_softmax(-1)
        assert len(answer.prompt_logprobs) == len(answer.prompt_token_ids)
        for row, token_id, entries in zip(
            rows, answer.prompt_token_ids[1:], answer.prompt_logprobs[1:], strict=False
        ):
            assert entries is not None and next(iter(entries)) == token_id
            assert set(entries) == {token_id, *row.topk(2).indices.tolist()}
            assert entries[token_id].rank == int((row > row[token_id]).sum()) + 1
            for each, entry in entries.items():
                assert entry.logprob == pytest.approx(float(row[each]), abs=1e-4)
                assert entry.decoded_token == tokenizer.decode([each])


def test_all_forms_of_a_prompt_give_the_same(llm: LLM) -> None:
    ids = llm.get_tokenizer()(PROMPTS[0]).input_ids
    forms = [PROMPTS[0], ids, {"prompt": PROMPTS[0]}, {"prompt_token_ids": ids}]
    expected = texts(generate(llm, PROMPTS[0], GREEDY))
    assert texts(generate(llm, forms, GREEDY)) == expected * 4
    assert [generate(llm, form, GREEDY)[0].prompt for form in forms] == [PROMPTS[0], None, PROMPTS[0], None]
    assert generate(llm, []) == []


def test_more_prompts_than_fit_a_step_come_back_in_their_order(llm: LLM) -> None:
    prompts = [[1000 + number] for number in range(40)]
    params = [SamplingParams(max_tokens=1 + number % 5, ignore_eos=True) for number in range(40)]
    outputs = generate(llm, prompts, params, priority=list(range(40, 0, -1)))
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [each.max_tokens for each in params]


def test_outputs_are_held_to_a_form(llm: LLM) -> None:
    answer = StructuredOutputsParams(choice=["yes", "no"])
    schema = StructuredOutputsParams(json={"type": "integer", "minimum": 10, "maximum": 99})
    params = [SamplingParams(max_tokens=9, seed=1, structured_outputs=each) for each in (answer, schema)]
    chosen, number = texts(generate(llm, PROMPTS[:2], params))
    assert chosen in ("yes", "no") and 10 <= int(number) <= 99
    wrong = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[a"))
    with pytest.raises(InvalidRequest, match=r"regular expression.*unclosed"):
        generate(llm, PROMPTS[0], wrong)


def test_chat_is_the_template_written_out(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is gravity?"}]
    rendered = llm.get_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    chats = llm.chat([messages, messages], GREEDY, use_tqdm=False)
    assert [chat.prompt for chat in chats] == [rendered] * 2
    (alone,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert texts(chats) == texts([alone]) * 2 == texts(generate(llm, rendered, GREEDY)) * 2
    begun = [*messages, {"role": "assistant", "content": "Gravity is the"}]
    (continued,) = llm.chat(begun, GREEDY, use_tqdm=False, continue_final_message=True)
    assert continued.prompt is not None and continued.prompt.endswith("Gravity is the")
    with pytest.raises(ValueError, match="continue_final_message needs a last message of role assistant"):
        llm.chat(messages, GREEDY, continue_final_message=True)
    with pytest.raises(ValueError, match="chat_template_kwargs may only hold variables"):
        llm.chat(messages, GREEDY, chat_template_kwargs={"tokenize": True})
    tool = {"type": "function", "function": {"name": "f"}}
    (with_tools,) = llm.chat(messages, GREEDY, use_tqdm=False, tools=[tool])
    assert with_tools.prompt == rendered, "this model's template knows no tools"
    (output,) = with_tools.outputs
    assert output.message == {"role": "assistant", "content": output.text}
    assert generate(llm, PROMPTS[0], GREEDY)[0].outputs[0].message is None
    for tools, match in (
        ([{"name": "f"}], r"tools\[0\] must be"),
        (tool, "tools must be a list"),
        ("f", "tools must"),
    ):
        with pytest.raises(ValueError, match=match):
            llm.chat(messages, GREEDY, tools=tools)  # type: ignore[arg-type]


def test_several_outputs_differ_and_their_seed_gives_them_again(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=10, temperature=1.0)
    first, second = (generate(llm, PROMPTS[0], params)[0] for _ in range(2))
    assert [output.index for output in first.outputs] == [0, 1, 2]
    assert len({output.text for output in first.outputs}) == 3
    assert [output.text for output in first.outputs] == [output.text for output in second.outputs]
    unseeded = SamplingParams(max_tokens=10)
    assert len(set(texts(generate(llm, [PROMPTS[0]] * 3, unseeded)))) == 3


def test_stop_strings_and_tokens_end_an_output(llm: LLM) -> None:
    (whole,) = texts(generate(llm, PROMPTS[0], GREEDY))
    word = whole.split()[3]

    def stopped(**fields: Any) -> Any:
        (answer,) = generate(llm, PROMPTS[0], SamplingParams(temperature=0, max_tokens=12, **fields))
        return answer.outputs[0]

    at_string = stopped(stop=[word, "never"])
    assert at_string.text == whole[: whole.index(word)]
    assert (at_string.finish_reason, at_string.stop_reason) == ("stop", word)
    assert stopped(stop=word, include_stop_str_in_output=True).text == whole[: whole.index(word)] + word
    token = generate(llm, PROMPTS[0], GREEDY)[0].outputs[0].token_ids[2]
    at_token = stopped(stop_token_ids=[token])
    assert (at_token.finish_reason, at_token.stop_reason, at_token.token_ids[-1]) == ("stop", token, token)


def test_logprobs_are_those_of_each_token(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2)
    (answer,) = generate(llm, PROMPTS[0], params)
    (output,) = answer.outputs
    assert output.logprobs is not None and len(output.logprobs) == 3
    for token_id, entries in zip(output.token_ids, output.logprobs, strict=True):
        assert next(iter(entries)) == token_id and len(entries) == 2
        assert [entry.rank for entry in entries.values()] == [1, 2]
        assert entries[token_id].decoded_token == llm.get_tokenizer().decode([token_id])
    total = sum(
        entries[token_id].logprob for token_id, entries in zip(output.token_ids, output.logprobs, strict=True)
    )
    assert output.cumulative_logprob == pytest.approx(total)
    (without,) = generate(llm, PROMPTS[0], GREEDY)
    assert (without.outputs[0].logprobs, without.outputs[0].cumulative_logprob) == (None, None)


def test_prompts_are_scored_whatever_is_cached(llm: LLM) -> None:
    prompt = [1000 + number for number in range(100)]
    generate(llm, prompt, GREEDY)  # and now it is cached
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, n=2)
    first, second = (generate(llm, prompt, params)[0] for _ in range(2))
    assert first.prompt_logprobs is not None and len(first.prompt_logprobs) == 100
    assert first.prompt_logprobs == second.prompt_logprobs and first.num_cached_tokens == 0
    assert all(entries and len(entries) == 1 for entries in first.prompt_logprobs[1:])
    assert generate(llm, [7], params)[0].prompt_logprobs == [None]
    assert generate(llm, prompt, GREEDY)[0].prompt_logprobs is None


def test_metrics_are_in_order(llm: LLM) -> None:
    (answer,) = generate(llm, PROMPTS[0], GREEDY)
    metrics = answer.metrics
    assert metrics.first_token_time is not None and metrics.last_token_time is not None
    assert metrics.arrival_time < metrics.first_token_time < metrics.last_token_time
    assert metrics.first_token_latency is not None and metrics.max_token_gap is not None
    assert 0 < metrics.max_token_gap <= metrics.last_token_time - metrics.first_token_time + 0.1


@pytest.mark.parametrize(
    ("prompts", "arguments", "message"),
    [
        (["a", "b " * 300], {}, r"^prompts\[1\]: This model's maximum context length is 256 tokens"),
        ("b " * 300, {}, "^This model's maximum context length is 256 tokens, and the prompt has [0-9]+"),
        (["a", [10**6]], {}, r"^prompts\[1\]: Prompt token ids must be between 0 and .*, got 1000000"),
        (["a", "caf\udce9"], {}, r"^prompts\[1\]: A text to tokenize must be valid Unicode"),
        ("a", {"sampling_params": {"max_tokens": 5}}, "^sampling_params must be SamplingParams"),
        (["a", "b"], {"sampling_params": [GREEDY]}, "^sampling_params must be one for each of 2 prompts"),
        ("a", {"sampling_params": SamplingParams(logit_bias={10**6: 1})}, "^logit_bias must name tokens"),
        ("a", {"priority": [1.5]}, "^priority must be an integer"),
        (5, {}, "^prompts must be one prompt or a list"),
        (["a", {"prompt": "a", "cache_salt": ""}], {}, r"^prompts\[1\]: cache_salt must have 1 to 256"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_runs(
    llm: LLM, prompts: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        generate(llm, prompts, **arguments)


@pytest.mark.parametrize(
    ("model", "options", "error"),
    [
        ("no-such-model", {}, ModelNotFound),
        (str(Path(__file__).parent), {}, ModelNotFound),
        (None, {"tensor_parallel_size": 3}, InvalidOption),
        (None, {"kv_gib": 1 << 20}, InsufficientMemory),
    ],
)
def test_a_refused_start_is_told_without_the_frames_of_threads_and_loops(
    small_model: Path, model: str | None, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error) as of_llm:
        LLM(model or str(small_model), **options)
    with pytest.raises(error) as of_async_llm:
        asyncio.run(AsyncLLM(model or str(small_model), **options).start())
    for raised in (of_llm, of_async_llm):
        shown = "".join(traceback.format_exception(raised.value))
        inner = ("concurrent", "threads.py", "resolve.py", "During handling", "direct cause")
        assert not [each for each in inner if each in shown]


def test_salts_of_prompts_and_conversations_reach_the_engine(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = requests_to(llm, monkeypatch)
    params, conversation = SamplingParams(max_tokens=1), [{"role": "user", "content": "a"}]
    generate(llm, ["a", {"prompt": "a", "cache_salt": "s"}], params)
    assert sorted(each.cache_salt for each in sent) == ["", "s"]
    for given, expected in ((None, ["", ""]), ("s", ["s", "s"]), (["s", None], ["", "s"])):
        sent.clear()
        llm.chat([conversation] * 2, params, use_tqdm=False, cache_salt=given)
        assert sorted(each.cache_salt for each in sent) == expected
    with pytest.raises(ValueError, match=r"^cache_salt must be a string, got a value of type int"):
        llm.chat(conversation, params, cache_salt=5)  # type: ignore[arg-type]


def test_an_output_ends_with_the_context(llm: LLM) -> None:
    (answer,) = generate(llm, [[1000] * 250], SamplingParams(max_tokens=100, ignore_eos=True))
    assert (len(answer.outputs[0].token_ids), answer.outputs[0].finish_reason) == (6, "length")


def test_the_bar_counts_prompts_on_standard_error(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS, SamplingParams(max_tokens=2))
    shown = capfd.readouterr()
    assert "3/3" in shown.err and "toks/s" in shown.err and not shown.out
    generate(llm, PROMPTS, SamplingParams(max_tokens=2))
    assert capfd.readouterr().err == ""
    bar = Mock()
    llm.generate(PROMPTS, SamplingParams(max_tokens=2), use_tqdm=bar)
    assert bar.call_args.kwargs["total"] == bar.return_value.update.call_count == 3
    bar.return_value.close.assert_called_once_with()


def test_it_works_inside_a_running_loop(llm: LLM) -> None:
    async def cell() -> list[RequestOutput]:
        return generate(llm, PROMPTS[:1], GREEDY)

    assert texts(asyncio.run(cell())) == texts(generate(llm, PROMPTS[:1], GREEDY))


def test_ctrl_c_aborts_the_requests_and_leaves_the_engine(llm: LLM) -> None:
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    with (
        when_busy(llm, lambda: signal.pthread_kill(main_thread, signal.SIGINT)),
        pytest.raises(KeyboardInterrupt),
    ):
        generate(llm, [[1000]] * 64, LONG)
    wait_until(lambda: not llm._engine.client.num_in_flight, "the end of the requests with the engine")
    assert len(generate(llm, PROMPTS, GREEDY)) == 3


def test_an_engine_that_dies_fails_the_call_and_is_started_by_the_next(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    expected = texts(generate(llm, PROMPTS, GREEDY))
    pid = llm._engine.client.pid
    assert pid is not None
    with (
        when_busy(llm, lambda: os.kill(pid, signal.SIGKILL)),
        pytest.raises(EngineDead, match="killed by signal 9"),
    ):
        generate(llm, [[1000]] * 64, LONG)
    assert llm.info is None
    assert texts(generate(llm, PROMPTS, GREEDY)) == expected
    assert "the engine has died and is restarted" in caplog.text


@pytest.mark.slow  # starts an engine; closing one that loads: test_async_llm.py
def test_closing_during_a_restart_fails_the_call_and_later_ones_say_so(small_model: Path) -> None:
    llm = LLM(str(small_model), dtype="float32", threads=1, kv_gib=0.01)
    client, failures = llm._engine.client, []
    dead = client.pid
    assert dead is not None
    os.kill(dead, signal.SIGKILL)

    def call() -> None:
        try:
            generate(llm, "a")
        except BaseException as error:
            failures.append(error)

    pause = threading.Event()
    while llm.info is not None:
        pause.wait(0.01)
    calling = threading.Thread(target=call)
    calling.start()
    while client.pid == dead:
        pause.wait(0.01)
    llm.close()
    calling.join(TIMEOUT_S)
    assert [type(failure) for failure in failures] == [EngineDead]
    assert client.pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(client.pid, 0)
    with pytest.raises(EngineDead, match="This engine was closed; make another one"):
        generate(llm, "a")
    llm.close()


def test_in_a_fork_calls_raise_engine_dead(llm: LLM) -> None:
    def use() -> int:
        signal.alarm(int(TIMEOUT_S))  # rather than hang
        with pytest.raises(EngineDead, match=f"belongs to process {os.getppid()}, and a fork of it cannot"):
            generate(llm, "a")
        llm.close()
        llm._engine.abandon()  # as AsyncLLM's finalizer does
        asyncio.run(llm._engine.close())
        return 0

    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = use()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(generate(llm, "a", GREEDY)) == 1


@contextmanager
def when_busy(llm: LLM, act: Any) -> Iterator[None]:
    """Call ``act`` once while the engine runs requests of the block."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.005):
            if llm._engine.client.num_in_flight:
                act()
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()
