"""AsyncLLM on a small model: streams, both classes, aborts."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from backfill import SLO, AsyncLLM, EngineDead, RequestOutput, RequestOutputKind, SamplingParams
from backfill.engine.client import EngineClient
from backfill.engine.messages import Ready
from backfill.llm import engine
from tests.api.servers import TIMEOUT_S
from tests.builders import flat_cost, make_info, make_profile
from tests.llm.conftest import requests_to

PROMPT = [1000, 2000, 3000]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)

Run = Any


@pytest.fixture
def run(runner: asyncio.Runner) -> Run:
    """Runs a coroutine in the loop of the engine; none takes long unless it hangs."""

    def run_it(coroutine: Coroutine[Any, Any, Any]) -> Any:
        return runner.run(asyncio.wait_for(coroutine, TIMEOUT_S))

    return run_it


async def collect(outputs: Any) -> list[RequestOutput]:
    return [output async for output in outputs]


def test_outputs_grow_token_by_token(async_llm: AsyncLLM, run: Run) -> None:
    outputs = run(collect(async_llm.generate(PROMPT, GREEDY, "mine")))
    assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(1, 9))
    assert [output.finished for output in outputs] == [False] * 7 + [True]
    assert {output.request_id for output in outputs} == {"mine"}
    for before, after in itertools.pairwise(outputs):
        assert after.outputs[0].text.startswith(before.outputs[0].text)
        assert after.outputs[0].token_ids[:-1] == before.outputs[0].token_ids
    assert outputs[-1].outputs[0].finish_reason == "length"


def test_differences_and_final_outputs_add_up_to_the_same(async_llm: AsyncLLM, run: Run) -> None:
    def of(kind: RequestOutputKind) -> list[RequestOutput]:
        params = SamplingParams(n=2, seed=1, max_tokens=8, ignore_eos=True, logprobs=1, output_kind=kind)
        outputs: list[RequestOutput] = run(collect(async_llm.generate(PROMPT, params)))
        return outputs

    last, (final,) = of(RequestOutputKind.CUMULATIVE)[-1], of(RequestOutputKind.FINAL_ONLY)
    deltas = [delta.outputs[0] for delta in of(RequestOutputKind.DELTA)]
    assert len(deltas) == 16 and len(final.outputs) == 2
    for whole, other in zip(final.outputs, last.outputs, strict=True):
        parts = [delta for delta in deltas if delta.index == whole.index]
        assert whole.text == other.text == "".join(part.text for part in parts)
        assert whole.token_ids == other.token_ids == [token for part in parts for token in part.token_ids]
        in_parts = [list(entry) for part in parts for entry in part.logprobs or ()]
        assert [list(entry) for entry in whole.logprobs or ()] == in_parts and len(in_parts) == 8
        assert [part.finish_reason for part in parts] == [None] * 7 + ["length"]


def test_both_classes_together_give_what_each_gives_alone(async_llm: AsyncLLM, run: Run) -> None:
    async def both() -> list[list[RequestOutput]]:
        return await asyncio.gather(
            collect(async_llm.generate(PROMPT, GREEDY, slo=SLO(ttft_s=60.0, tpot_s=60.0))),
            *(
                collect(async_llm.generate(PROMPT, GREEDY, service_class="offline", priority=priority))
                for priority in range(3)
            ),
        )

    alone = run(collect(async_llm.generate(PROMPT, GREEDY)))[-1].outputs[0].token_ids
    assert [outputs[-1].outputs[0].token_ids for outputs in run(both())] == [alone] * 4


def test_what_a_request_asks_for_reaches_the_engine(
    async_llm: AsyncLLM, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = requests_to(async_llm, monkeypatch)
    slo, messages = SLO(ttft_s=50.0, tpot_s=40.0), [{"role": "user", "content": "Hello"}]
    run(collect(async_llm.generate({"prompt_token_ids": PROMPT, "cache_salt": "a"}, GREEDY)))
    run(collect(async_llm.generate(PROMPT, GREEDY, service_class="offline", priority=3)))
    run(collect(async_llm.generate(PROMPT, GREEDY, slo=slo)))
    run(collect(async_llm.chat(messages, GREEDY, cache_salt="b")))
    assert [(each.service_class.value, each.priority, each.slo, each.cache_salt) for each in sent] == [
        ("online", 0, None, "a"),
        ("offline", 3, None, ""),
        ("online", 0, slo, ""),
        ("online", 0, None, "b"),
    ]


def test_chat_and_prompts_of_text(async_llm: AsyncLLM, run: Run) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    (*_, chat) = run(collect(async_llm.chat(messages, GREEDY)))
    (*_, same) = run(collect(async_llm.generate(chat.prompt, GREEDY)))
    assert "Hello" in chat.prompt and chat.outputs[0].text == same.outputs[0].text
    (*_, long) = run(collect(async_llm.generate("word " * 2000, GREEDY)))  # tokenized in a thread
    assert len(long.prompt_token_ids) >= 2000


def test_seeds_follow_the_order_of_requests_however_long_they_take_to_prepare(
    async_llm: AsyncLLM, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    preparer = async_llm._engine.preparer
    prepare, is_short_prepared = preparer.prepare, threading.Event()
    seeds: dict[str, int | None] = {}

    def prepare_the_long_one_last(*args: Any, request_id: str, **fields: Any) -> Any:
        if request_id == "long":
            is_short_prepared.wait(TIMEOUT_S)
        prepared = prepare(*args, request_id=request_id, **fields)
        seeds[request_id] = prepared.generation.samplings[0].seed
        if request_id == "short":
            is_short_prepared.set()
        return prepared

    async def both() -> None:
        params = SamplingParams(max_tokens=1)
        long = async_llm.generate("word " * 1000, params, "long")
        await asyncio.gather(collect(long), collect(async_llm.generate("word", params, "short")))

    monkeypatch.setattr(preparer, "prepare", prepare_the_long_one_last)
    monkeypatch.setattr(preparer, "seeds", random.Random(1))
    run(both())
    drawn = random.Random(1)
    assert [seeds["long"], seeds["short"]] == [drawn.getrandbits(62) for _ in range(2)]


@pytest.mark.parametrize("num_outputs", [1, 3])
def test_an_aborted_request_ends_with_what_it_had(async_llm: AsyncLLM, run: Run, num_outputs: int) -> None:
    async def abort_at_the_third() -> list[RequestOutput]:
        outputs = []
        params = SamplingParams(n=num_outputs, max_tokens=None, ignore_eos=True)
        async for output in async_llm.generate(PROMPT, params, "long"):
            outputs.append(output)
            if len(outputs) == 3:
                await async_llm.abort(["long", "unknown"])
        return outputs

    last = run(abort_at_the_third())[-1]
    assert last.finished
    assert {output.finish_reason for output in last.outputs} == {"abort"}
    assert sum(len(output.token_ids) for output in last.outputs) >= 3
    assert async_llm._engine.client.num_in_flight == 0


def test_a_request_can_be_aborted_before_it_begins(async_llm: AsyncLLM, run: Run) -> None:
    async def abort_at_once() -> list[RequestOutput]:
        outputs = async_llm.generate(PROMPT, SamplingParams(n=3, max_tokens=None, ignore_eos=True), "long")
        waiting = asyncio.create_task(collect(outputs))
        while "long" not in async_llm._handles:
            await asyncio.sleep(0)
        await async_llm.abort("long")
        return await waiting

    (only,) = run(abort_at_once())
    assert only.finished and [output.finish_reason for output in only.outputs] == ["abort"] * 3


def test_leaving_a_stream_early_aborts_it(async_llm: AsyncLLM, run: Run) -> None:
    async def leave() -> int:
        async with aclosing(async_llm.generate(PROMPT, ENDLESS, "long")) as outputs:
            await anext(outputs)
        in_flight = async_llm._engine.client.num_in_flight
        await collect(async_llm.generate(PROMPT, GREEDY, "long"))  # the id is free again
        return in_flight

    async def cancel() -> int:
        task = asyncio.create_task(collect(async_llm.generate(PROMPT, ENDLESS)))
        while not async_llm._engine.client.num_in_flight:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return async_llm._engine.client.num_in_flight

    assert run(leave()) == 0
    assert run(cancel()) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"service_class": "flex"}, "^service_class must be 'online' or 'offline', got 'flex'"),
        ({"service_class": "offline", "slo": SLO(1.0, 1.0)}, "^slo is for online requests"),
        ({"slo": SLO(0.0, 1.0)}, "^slo must be an SLO of seconds above 0"),
        ({"slo": {"ttft": 1.0}}, "^slo must be an SLO"),
        ({"slo": SLO(True, 1.0)}, "^slo must be an SLO"),
        ({"slo": SLO("a", 1.0)}, "^slo must be an SLO"),  # type: ignore[arg-type]
        ({"priority": True}, "^priority must be an integer"),
        ({"slo": SLO(1e-9, 1.0)}, "cannot be met: even alone, its prompt cached, the request needs"),
        ({"priority": 2**31}, "^priority must be an integer between"),
        ({"prompt": [1, 10**7, -1]}, "^Prompt token ids must be between 0 and .*, got -1"),
        ({"prompt": ""}, "^prompt must not be empty"),
        ({"sampling_params": 5}, "^sampling_params must be SamplingParams"),
    ],
)
def test_what_cannot_be_served_is_refused(
    async_llm: AsyncLLM, run: Run, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(collect(async_llm.generate(**{"prompt": PROMPT, **arguments})))


def test_an_id_belongs_to_one_request_at_a_time(async_llm: AsyncLLM, run: Run) -> None:
    async def twice() -> None:
        async with aclosing(async_llm.generate(PROMPT, ENDLESS, "mine")) as outputs:
            await anext(outputs)
            with pytest.raises(ValueError, match="request_id 'mine' is in flight already"):
                await anext(async_llm.generate(PROMPT, GREEDY, "mine"))

    run(twice())


def test_defaults_and_facts_are_those_of_the_model(async_llm: AsyncLLM, run: Run) -> None:
    assert run(async_llm.get_default_sampling_params()) == SamplingParams()
    assert async_llm.info is not None and async_llm.info.vocab_size == 49152
    tokenizer = run(async_llm.get_tokenizer())
    assert tokenizer.decode(tokenizer("hello").input_ids) == "hello"


def test_shutdown_while_the_model_is_resolved_starts_no_engine(
    small_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_looking, may_find = threading.Event(), threading.Event()

    def find_slowly(*_: Any, **__: Any) -> Any:
        is_looking.set()
        assert may_find.wait(TIMEOUT_S)
        return small_model

    monkeypatch.setattr(engine, "resolve_model", find_slowly)

    async def shut_down_early() -> None:
        llm = AsyncLLM(str(small_model))
        starting = asyncio.create_task(llm.start())
        await asyncio.to_thread(is_looking.wait, TIMEOUT_S)
        await llm.shutdown()
        may_find.set()
        with pytest.raises(EngineDead, match="was closed"):
            await starting
        assert llm._engine.client is None

    asyncio.run(asyncio.wait_for(shut_down_early(), TIMEOUT_S))


def test_shutdown_while_the_engine_loads_fails_requests(small_model: Any) -> None:
    async def shut_down_early() -> list[Any]:
        llm = AsyncLLM(str(small_model), dtype="float32", threads=1, kv_gib=0.05, policy="fcfs")
        tasks = [asyncio.create_task(collect(llm.generate(PROMPT, GREEDY))) for _ in range(2)]
        while llm._engine.client is None or llm._engine.client.pid is None:
            await asyncio.sleep(0.001)
        await llm.shutdown()
        return await asyncio.gather(*tasks, return_exceptions=True)

    failures = asyncio.run(asyncio.wait_for(shut_down_early(), TIMEOUT_S))
    assert [type(failure) for failure in failures] == [EngineDead] * 2


@pytest.mark.slow  # starts an engine; while one loads in the test above
def test_the_end_of_the_block_ends_the_requests(async_llm: AsyncLLM, small_model: Any) -> None:
    async def end_early() -> BaseException | list[RequestOutput]:
        async with AsyncLLM(str(small_model), dtype="float32", threads=1, kv_gib=0.05, policy="fcfs") as llm:
            task = asyncio.create_task(collect(llm.generate(PROMPT, ENDLESS)))
            while not llm._engine.client.num_in_flight:
                await asyncio.sleep(0.01)
        (ending,) = await asyncio.gather(task, return_exceptions=True)
        with pytest.raises(EngineDead, match="This engine was closed; make another one"):
            await collect(llm.generate(PROMPT, GREEDY))
        return ending

    assert isinstance(asyncio.run(asyncio.wait_for(end_early(), TIMEOUT_S)), EngineDead)


@pytest.fixture
def unstarted(async_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model of engines that are ready at once, with steps of 0.1 s."""
    ready = Ready(make_info(), SLO(1.0, 1.0), make_profile(flat_cost(0.1)))
    monkeypatch.setattr(EngineClient, "start", AsyncMock(return_value=ready))
    return Path(async_llm._engine.client.config.model_dir)


@pytest.mark.parametrize("objective", ["ttft_slo", "tpot_slo"])
def test_objectives_of_the_engine_that_cannot_be_met_are_named_as_keywords(
    unstarted: Path, run: Run, objective: str
) -> None:
    with pytest.raises(ValueError, match=f"^{objective} 1e-09: one request alone needs 0.1 s on this device"):
        run(AsyncLLM(str(unstarted), **{objective: 1e-9}).start())


def test_objectives_that_may_be_missed_are_warned_of_once(
    unstarted: Path, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    llm = AsyncLLM(str(unstarted), ttft_slo=0.09)
    for _ in range(2):
        run(llm.start())
    assert caplog.text.count("ttft_slo 0.09: one request alone needs 0.1 s, by a") == 1
    assert "--ttft" not in caplog.text
