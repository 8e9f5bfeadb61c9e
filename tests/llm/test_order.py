"""Which request of a call runs next, what it is told of those that wait, and what the engine gets."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from unittest.mock import Mock

import pytest

from backfill import LLM, SamplingParams
from backfill.blending.pool import OfflinePool
from backfill.blending.requests import OrderName
from backfill.core.request import ServiceClass
from backfill.generation.generator import GenerationRequest
from backfill.llm.order import CallOrder
from backfill.llm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from backfill.llm.request import PreparedRequest
from tests.llm.conftest import requests_to
from tests.preparation.pool_doubles import KV_TOKENS, RESOURCES


def request(
    prompt: Sequence[int], *, priority: int = 0, salt: str = "", n: int = 1, max_tokens: int = 4
) -> PreparedRequest:
    generation = GenerationRequest(
        prompts=[list(prompt)],
        samplings=[SamplingParams(max_tokens=max_tokens)] * n,
        service_class=ServiceClass.OFFLINE,
        priority=priority,
        cache_salt=salt,
    )
    return PreparedRequest(request_id="r", prompt=None, generation=generation)


def order_of(*requests: PreparedRequest, order: OrderName = "fcfs") -> CallOrder:
    return CallOrder(requests, lambda: OfflinePool(order, RESOURCES, kv_tokens=KV_TOKENS))


def indices(order: CallOrder) -> list[int]:
    return [index for index, _ in order]


def reused(order: CallOrder) -> list[int | None]:
    return [each.generation.num_reused_tokens for _, each in order]


def output(*num_tokens: int) -> RequestOutput:
    outputs = [CompletionOutput(index=i, text="", token_ids=[1] * num) for i, num in enumerate(num_tokens)]
    return RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=[1],
        outputs=outputs,
        finished=True,
        num_cached_tokens=0,
        metrics=RequestMetrics(arrival_time=0.0),
    )


def test_requests_of_one_priority_run_as_the_pool_says_and_lower_ones_first() -> None:
    prompts = [[number % 2, 5, number] for number in range(8)]
    assert indices(order_of(*map(request, prompts), order="dfs")) == [0, 2, 4, 6, 1, 3, 5, 7]
    urgent = [request(prompt, priority=-(number > 3)) for number, prompt in enumerate(prompts)]
    assert indices(order_of(*urgent, order="dfs")) == [4, 6, 5, 7, 0, 2, 1, 3]
    assert indices(order_of()) == []


def test_a_request_is_told_what_those_that_wait_need_of_its_prompt() -> None:
    shared = [1, 2, 3, 4, 5]
    prompts = [[*shared, 6], [*shared[:2], 7], [*shared, 8], [9]]
    assert reused(order_of(*map(request, prompts))) == [5, 2, None, None]
    salted = [request([*shared, index], salt=salt) for index, salt in enumerate(("", "s", "t", "s"))]
    assert reused(order_of(*salted)) == [None, 5, None, None]
    assert reused(order_of(request(shared, n=3), request(shared))) == [None, None]


def test_a_request_alone_needs_no_plan_and_later_calls_may_need_its_prompt() -> None:
    create_pool = Mock()
    order = CallOrder([request([1])], create_pool)
    ((index, taken),) = order
    order.note_end(index, output(3))
    assert (index, taken.generation.num_reused_tokens) == (0, None)
    create_pool.assert_not_called()


def test_requests_are_chosen_one_by_one_and_the_pool_is_told_their_lengths() -> None:
    pool = Mock(wraps=OfflinePool("fcfs", RESOURCES, kv_tokens=KV_TOKENS))
    order = CallOrder([request([1]), request([2], n=2), request([3])], lambda: pool)
    waiting = iter(order)
    next(waiting), next(waiting)
    assert pool.take.call_count == 2
    order.note_end(0, output(3))
    order.note_end(1, output(4, 1))
    assert [call.args for call in pool.finish.call_args_list] == [(0, 3), (1, 2)]


def test_the_engine_gets_prompts_that_begin_alike_together_and_outputs_are_those_of_single_calls(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[1000 + number % 5] * 40 + [2000 + number] for number in range(30)]
    params, seeds = SamplingParams(max_tokens=2, ignore_eos=True), random.Random(3)
    monkeypatch.setattr(llm._engine.preparer, "seeds", seeds)
    state = seeds.getstate()
    alone = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in prompts]
    seeds.setstate(state)
    sent = requests_to(llm, monkeypatch)
    together = llm.generate(prompts, params, use_tqdm=False)
    assert [each.outputs[0].token_ids for each in together] == [each.outputs[0].token_ids for each in alone]
    assert [each.prompt_token_ids for each in together] == prompts
    groups = [each.prompt_token_ids[0] for each in sent]
    assert sum(one != other for one, other in itertools.pairwise(groups)) < 10, groups
    arrivals = [each.arrived_at_s for each in sent]
    assert arrivals == sorted(arrivals) and {each.num_reused_tokens for each in sent} == {None, 40}
