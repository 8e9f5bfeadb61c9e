"""Requests compute nothing that the cache holds for them, and find nothing that is not theirs."""

from __future__ import annotations

from collections import Counter

import pytest

from backfill.core.config import CheckpointingName, PolicyName, PrefixCacheScope
from backfill.core.plan import StepOutcome, StepPlan
from backfill.core.request import FinishReason, PriorityLevel, Request, RequestStatus, ServiceClass
from backfill.core.slo import SLO
from backfill.scheduling.prediction import StepPredictor
from backfill.scheduling.queues import LevelRule, UnfinishedRequests
from tests.builders import linear_cost
from tests.scheduling.bench import sizes
from tests.scheduling.caching import BLOCK_SIZE, CachingBench, request_of, tokens

OFFLINE = ServiceClass.OFFLINE
SHARED, SUFFIX = 600, 40


def sharing_requests(count: int, **fields: object) -> list[Request]:
    shared = tokens("shared", SHARED)
    return [request_of(shared + tokens(number, SUFFIX), **fields) for number in range(count)]


@pytest.mark.parametrize(
    ("at_once", "service_class", "chunk"),
    [
        (True, ServiceClass.ONLINE, 8192),
        (True, OFFLINE, 256),
        (True, ServiceClass.ONLINE, 100),
        (False, OFFLINE, 8192),
        (False, ServiceClass.ONLINE, 256),
        (False, OFFLINE, 100),
    ],
)
def test_a_shared_prefix_is_computed_once(at_once: bool, service_class: ServiceClass, chunk: int) -> None:
    bench = CachingBench(max_num_seqs=256, max_prefill_chunk_tokens=chunk)
    requests = sharing_requests(60, service_class=service_class)
    if at_once:
        bench.finish(*requests)
    else:
        for request in requests:
            bench.finish(request)
    shared = SHARED // BLOCK_SIZE * BLOCK_SIZE
    tail = SHARED + SUFFIX - shared
    counters = bench.counters(service_class)
    assert counters.num_computed_tokens == shared + 60 * tail
    assert sum(request.num_cached_tokens for request in requests) == 59 * shared
    assert counters.num_prefix_hit_tokens == 59 * shared
    assert counters.num_prefix_queried_tokens == 60 * (SHARED + SUFFIX)


def test_equal_prompts_at_once_are_computed_once_but_for_their_last_block() -> None:
    bench = CachingBench()
    requests = [request_of(tokens("same", 64), max_tokens=4) for _ in range(10)]
    bench.finish(*requests)
    assert bench.counters().num_computed_tokens == 64 + 9 * 16 + 10 * 3
    assert [request.num_cached_tokens for request in requests] == [0] + [48] * 9


@pytest.mark.parametrize("kept", [1.0, 0.6], ids=["whole", "edited"])
def test_a_turn_of_a_chat_computes_what_lies_behind_the_common_prefix(kept: float) -> None:
    """Templates may leave out part of an earlier answer."""
    bench = CachingBench()
    history = tokens("system prompt", 100)
    known: list[int] = []  # the tokens whose KV the turn before computed
    for turn in range(8):
        request = request_of(history + tokens(("user", turn), 30 + 7 * turn), max_tokens=45 + 10 * turn)
        before = bench.counters().num_computed_tokens
        bench.finish(request)
        prompt, output = list(request.prompt_token_ids), request.output_token_ids
        computed = bench.counters().num_computed_tokens - before - (len(output) - 1)
        common = next((i for i, pair in enumerate(zip(known, prompt)) if pair[0] != pair[1]), len(known))  # noqa: B905
        assert computed == len(prompt) - request.num_cached_tokens
        assert len(prompt) - common <= computed < len(prompt) - common + BLOCK_SIZE
        known = (prompt + output)[:-1]
        history = prompt + output[: int(kept * len(output))]


def served_in(plan: StepPlan, request: Request) -> bool:
    return request.request_id in sizes(plan)


HISTORY, TURN = 3000, 3  # tokens; computing the history takes longer than a first token may
IN_A_MOMENT = SLO(ttft_s=0.02, tpot_s=0.5)


def turn_of_a_chat(**fields: object) -> Request:
    return request_of(
        tokens("history", HISTORY) + tokens("turn", TURN), max_tokens=5, slo=IN_A_MOMENT, **fields
    )


@pytest.mark.parametrize("policy", ["slo", "bros", "conserve"])
def test_a_prompt_is_in_time_if_what_the_cache_lacks_of_it_can_be(policy: PolicyName) -> None:
    bench = CachingBench(policy=policy, max_prefill_chunk_tokens=1000)
    bench.finish(request_of(tokens("history", HISTORY)))
    chat, job = turn_of_a_chat(request_id="chat"), request_of(tokens("job", 4000), service_class=OFFLINE)
    bench.add(job)
    bench.step()
    bench.add(chat)
    assert "chat" in sizes(bench.step())
    assert chat.priority_level is PriorityLevel.ONLINE
    assert chat.first_token_at_s is not None
    assert chat.first_token_at_s <= chat.arrived_at_s + IN_A_MOMENT.ttft_s


def test_a_relegated_prompt_returns_when_the_cache_comes_to_hold_enough_of_it() -> None:
    num_cached = {"chat": 0}
    predictor = StepPredictor(linear_cost(token_s=1e-5))
    requests = UnfinishedRequests(
        LevelRule(0.0, True, predictor, 1000), lambda request: num_cached[request.request_id]
    )
    chat = turn_of_a_chat(request_id="chat")

    def level_at(now_s: float, cached: int) -> PriorityLevel:
        num_cached["chat"] = cached
        requests.change_levels(now_s)
        assert requests.waiting[chat.priority_level].requests == [chat]
        return chat.priority_level

    requests.add(chat)
    assert level_at(0.0, 0) is PriorityLevel.RELEGATED
    assert level_at(0.001, 500) is PriorityLevel.RELEGATED, "not enough"
    assert level_at(0.002, 2000) is PriorityLevel.ONLINE
    assert level_at(0.015, 2000) is PriorityLevel.RELEGATED
    assert level_at(0.021, 3000) is PriorityLevel.RELEGATED, "its deadline has passed"
    assert not requests._relegated


def test_every_relegated_prompt_is_looked_up_again() -> None:
    num_cached = Counter[str]()
    predictor = StepPredictor(linear_cost(token_s=1e-5))
    requests = UnfinishedRequests(
        LevelRule(0.0, True, predictor, 1000), lambda request: num_cached[request.request_id]
    )
    chats = [turn_of_a_chat(request_id=f"chat-{number}") for number in range(40)]
    for chat in chats:
        requests.add(chat)
    requests.change_levels(0.0)
    assert all(chat.priority_level is PriorityLevel.RELEGATED for chat in chats)
    num_cached["chat-39"] = 2000
    for step in range(1, 4):
        requests.change_levels(step * 1e-3)
    assert [chat for chat in chats if chat.priority_level is PriorityLevel.ONLINE] == [chats[39]]


def test_who_has_a_prefix_cached_does_not_wait_for_one_that_scores_it_again() -> None:
    bench, shared = CachingBench(), tokens("shared", SHARED)
    bench.finish(request_of(shared + tokens("first", SUFFIX)))
    chat = request_of(shared + tokens("chat", SUFFIX))
    bench.add(request_of(shared + tokens("scored", SUFFIX), prompt_logprobs=0), chat)
    bench.step()
    assert chat.num_prefix_waits == 0
    assert chat.first_token_at_s is not None


def test_a_block_that_is_not_on_the_device_is_new_to_those_who_wait_for_it() -> None:
    bench, shared = CachingBench(), tokens("shared", SHARED)
    bench.finish(request_of(shared))
    scored = request_of([*shared, 1], prompt_logprobs=0, max_tokens=2)
    bench.add(scored)
    bench.step()
    kv, end = bench.scheduler.kv, SHARED // BLOCK_SIZE * BLOCK_SIZE
    assert kv.new_keys(scored, 0, end) == []
    key = kv.key_of(scored.request_id, 3)
    assert key is not None
    block = kv._store.by_key[key].device
    assert block is not None
    block.is_valid = False  # its KV is on the way from the host
    assert kv.new_keys(scored, 0, end) == [key]


@pytest.mark.parametrize("policy", ["priority", "fcfs", "slo"])
def test_an_online_request_does_not_wait_for_an_offline_one_with_its_prefix(policy: PolicyName) -> None:
    """Under ``fcfs`` the offline requests are even planned before it."""
    bench = CachingBench(policy=policy, max_prefill_chunk_tokens=64)
    bench.add(*sharing_requests(4, service_class=OFFLINE))
    bench.step()
    bench.step()
    (chat,) = sharing_requests(1)
    bench.add(chat)
    for _ in range(3):
        assert served_in(bench.step(), chat)
    bench.finish()
    assert chat.num_prefix_waits == 0
    assert chat.num_cached_tokens >= 128, "what was computed before its arrival"


@pytest.mark.parametrize("policy", ["priority", "fcfs"])
def test_an_offline_request_waits_for_an_online_one_with_its_prefix(policy: PolicyName) -> None:
    bench = CachingBench(policy=policy, max_prefill_chunk_tokens=64)
    chat, *jobs = sharing_requests(4, service_class=OFFLINE)
    chat = request_of(chat.prompt_token_ids)
    bench.add(chat, *jobs)
    plan = bench.step()
    assert list(sizes(plan)) == [chat.request_id]
    bench.finish()
    assert chat.num_prefix_waits == 0 and all(job.num_prefix_waits > 0 for job in jobs)
    assert all(job.num_cached_tokens == 592 for job in jobs)


def test_a_prefix_that_takes_many_steps_is_computed_once() -> None:
    """More steps than a request waits for work that comes to nothing."""
    bench = CachingBench(max_prefill_chunk_tokens=64)
    shared = tokens("long", 4000)
    requests = [request_of(shared + tokens(number, 40)) for number in range(20)]
    bench.finish(*requests)
    assert bench.counters().num_computed_tokens == 4000 + 20 * 40


def test_no_request_waits_long_for_work_that_comes_to_nothing() -> None:
    bench = CachingBench(policy="slo", preemption="discard", max_prefill_chunk_tokens=64, num_layers=4)
    first, second = sharing_requests(2, service_class=OFFLINE)
    bench.add(first, second)
    stopped = StepOutcome((), discarded=(first.request_id,), layers_done=2)
    num_waits = 0
    while not served_in(plan := bench.scheduler.plan_step(0.0), second):
        bench.scheduler.commit(plan, stopped, 0.0)
        num_waits += 1
    assert 0 < num_waits <= 32


def test_a_request_finds_what_others_compute_while_it_is_running() -> None:
    """It is at the second chunk of its prompt when a shorter one, more urgent, has computed more of it."""
    bench = CachingBench(max_prefill_chunk_tokens=64, max_num_batched_tokens=128)
    prompt = tokens("same", 640)
    job = request_of(prompt, service_class=OFFLINE)
    bench.add(job)
    bench.step()
    chat = request_of(prompt[:500])
    bench.finish(chat)
    assert chat.num_cached_tokens == 64
    assert bench.counters(OFFLINE).num_computed_tokens == 640 - job.num_cached_tokens
    assert job.num_cached_tokens > 0


def preempted_by_a_chat(bench: CachingBench) -> Request:
    """An offline request that was preempted for a chat which then took only empty blocks."""
    job = request_of(tokens("job", 180), max_tokens=20, service_class=OFFLINE)
    bench.add(job)
    for _ in range(3):
        bench.step()
    chat = request_of(tokens("chat", 190), max_tokens=2)
    bench.add(chat)
    plan = bench.step()
    assert sizes(plan) == {chat.request_id: 64}
    assert job.status is RequestStatus.PREEMPTED
    bench.scheduler.finish(chat.request_id, FinishReason.ABORT)
    return job


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("checkpointing", ["none", "adaptive", "eager"])
def test_preempted_work_whose_blocks_nobody_needed_resumes_at_once(
    checkpointing: CheckpointingName, prefix_caching: bool
) -> None:
    bench = CachingBench(
        20,
        0 if checkpointing == "none" else 40,
        policy="slo",
        checkpointing=checkpointing,
        max_prefill_chunk_tokens=64,
        prefix_caching=prefix_caching,
    )
    job = preempted_by_a_chat(bench)
    start = job.num_computed_tokens
    assert start % BLOCK_SIZE, "its last block is not full"
    (scheduled,) = bench.step().slices
    assert (scheduled.start, scheduled.num_tokens) == (start, 1)
    bench.finish()
    counters = bench.counters(OFFLINE)
    assert (counters.num_preemptions, counters.num_recomputed_tokens) == (1, 0)
    assert (counters.num_restored_tokens, bench.executor.num_copies["restore"]) == (0, 0)
    assert counters.num_prefix_hit_tokens == job.num_cached_tokens == 0, "its own KV is no hit"


@pytest.mark.parametrize(
    ("scope", "second", "num_hit"),
    [
        ("owner", {"owner": "a", "cache_salt": "s"}, 48),
        ("owner", {"owner": "b", "cache_salt": "s"}, 0),
        ("owner", {"owner": "a", "cache_salt": "t"}, 0),
        ("owner", {"owner": "as", "cache_salt": ""}, 0),
        ("owner", {"owner": "", "cache_salt": "as"}, 0),
        ("owner", {}, 0),
        ("global", {"owner": "b", "cache_salt": "s"}, 48),
        ("global", {"owner": "a", "cache_salt": ""}, 0),
    ],
)
def test_hits_are_those_of_the_same_owner_and_salt(
    scope: PrefixCacheScope, second: dict[str, str], num_hit: int
) -> None:
    for service_class in ServiceClass:
        bench = CachingBench(prefix_cache_scope=scope)
        first = request_of(tokens("same", 64), owner="a", cache_salt="s")
        later = request_of(tokens("same", 64), service_class=service_class, **second)
        bench.finish(first)
        bench.finish(later)
        assert later.num_cached_tokens == num_hit
        bench.finish(request_of(tokens("same", 64), **second))  # what it computed is found in its own
        assert bench.counters().num_prefix_hit_tokens >= 48


def test_without_prefix_caching_nothing_is_found_and_nothing_stays() -> None:
    bench = CachingBench(prefix_caching=False)
    for _ in range(3):
        bench.finish(*(request_of(tokens("same", 100), max_tokens=30) for _ in range(4)))
        assert bench.scheduler.kv.counts.empty == 1024
    counters = bench.counters()
    assert (counters.num_prefix_queried_tokens, counters.num_prefix_hit_tokens) == (0, 0)
    assert counters.num_computed_tokens == 12 * (100 + 29)


def test_hits_and_evictions_are_counted_by_class_and_tier() -> None:
    """Requests of four full blocks and a token, one after another, through pools of 8 and 12 blocks."""
    bench = CachingBench(8, 12, policy="priority", checkpointing="eager")
    bench.expect_no_reuse()
    online, offline = (bench.counters(each) for each in ServiceClass)
    for number in range(4):
        service_class = OFFLINE if number % 2 else ServiceClass.ONLINE
        bench.finish(request_of(tokens(number, 64), max_tokens=2, service_class=service_class))
    # Nothing is protected: what was used last stays. The second
    # request takes a block of the first, the third and the fourth take four each. Host memory lacks four.
    assert (online.num_evicted_blocks, offline.num_evicted_blocks) == (5, 4)
    assert (online.num_evicted_host_blocks, offline.num_evicted_host_blocks) == (4, 0)
    assert online.num_checkpointed_tokens == offline.num_checkpointed_tokens == 128

    on_device, in_host, nowhere = (request_of(tokens(number, 64)) for number in (3, 1, 0))
    bench.finish(on_device)
    assert (online.num_prefix_hit_tokens, online.num_host_prefix_hit_tokens) == (48, 0)
    bench.finish(in_host)
    assert (online.num_prefix_hit_tokens, online.num_host_prefix_hit_tokens) == (48, 48)
    bench.finish(nowhere)
    assert (online.num_prefix_hit_tokens, online.num_host_prefix_hit_tokens) == (48, 48)
    assert [each.num_cached_tokens for each in (on_device, in_host, nowhere)] == [48, 48, 0]
    assert online.num_prefix_queried_tokens == 5 * 64 and offline.num_prefix_queried_tokens == 2 * 64
    assert online.num_restored_tokens == 0, "nothing was preempted"
