"""What is kept of the prefix cache for online requests is weighed against the KV of offline ones."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import pytest

from backfill.core.request import Request, RequestStatus, ServiceClass
from backfill.core.slo import SLO
from backfill.costs.load import StepLoad
from tests.builders import linear_cost
from tests.scheduling.caching import CachingBench, request_of, tokens

NUM_BLOCKS = 300
NUM_CHATS, HISTORY_TOKENS = 5, 480
NUM_JOBS = 48  # unfinished at any time; together they need more than the pool


def make_bench(token_s: float, ttft_slo: float = 1.0) -> CachingBench:
    return CachingBench(
        NUM_BLOCKS,
        cost=linear_cost(token_s=token_s, step_s=0.02),
        checks_every=100,
        policy="slo",
        checkpointing="none",
        max_num_seqs=64,
        max_num_batched_tokens=1024,
        ttft_slo=ttft_slo,
        tpot_slo=0.15,
    )


def keep_what_is_used_again(bench: CachingBench) -> CachingBench:
    """As if nothing were weighed."""
    bench.scheduler._planner._kept_cache = None
    return bench


def keep_nothing(bench: CachingBench) -> CachingBench:
    keep_what_is_used_again(bench).scheduler.kv.protection.max_blocks = 0.0
    return bench


@dataclass
class Served:
    """Tokens a second of ended offline requests; first tokens of chats, in seconds."""

    offline: float
    ttfts_s: list[float]
    hit_rate: float


class Load:
    """Chats that ask again ``think_s`` after each answer, beside jobs without end."""

    def __init__(self, bench: CachingBench) -> None:
        self.bench = bench
        self.num_asked = self.num_jobs = 0
        self.jobs: list[Request] = []
        self.histories = [tokens(("chat", chat), HISTORY_TOKENS) for chat in range(NUM_CHATS)]

    def serve(self, seconds: float, think_s: float) -> Served:
        bench, counters = self.bench, self.bench.counters()
        begin_s, num_ended = bench.clock.now_s(), 0
        num_hits, num_queried = counters.num_prefix_hit_tokens, counters.num_prefix_queried_tokens
        due = [(begin_s + think_s * chat / NUM_CHATS, chat) for chat in range(NUM_CHATS)]
        running: dict[int, Request] = {}
        ttfts_s = []
        while bench.clock.now_s() < begin_s + seconds:
            while due and due[0][0] <= bench.clock.now_s():
                chat = heapq.heappop(due)[1]
                question = tokens(("question", self.num_asked), 20)
                running[chat] = request_of([*self.histories[chat], *question], max_tokens=10)
                self.num_asked += 1
                bench.add(running[chat])
            num_ended += sum(job.status is RequestStatus.FINISHED for job in self.jobs)
            self._keep_up()
            bench.step()
            for chat, request in list(running.items()):
                if request.status is RequestStatus.FINISHED:
                    ttfts_s.append((request.first_token_at_s or math.inf) - request.arrived_at_s)
                    heapq.heappush(due, (bench.clock.now_s() + think_s, chat))
                    del running[chat]
        hits, queried = counters.num_prefix_hit_tokens, counters.num_prefix_queried_tokens
        hit_rate = (hits - num_hits) / (queried - num_queried)
        return Served(100 * num_ended / seconds, ttfts_s, hit_rate)

    def _keep_up(self) -> None:
        self.jobs = [job for job in self.jobs if job.status is not RequestStatus.FINISHED]
        while len(self.jobs) < NUM_JOBS:
            prompt = tokens(("job", self.num_jobs), 32)
            self.jobs.append(request_of(prompt, max_tokens=100, service_class=ServiceClass.OFFLINE))
            self.num_jobs += 1
            self.bench.add(self.jobs[-1])


CHEAP_S, DEAR_S = 2e-5, 5e-4  # seconds a token of a prompt


@pytest.mark.slow
def test_offline_requests_get_the_memory_of_chats_that_are_cheap_to_compute_again() -> None:
    reuse = Load(keep_what_is_used_again(make_bench(CHEAP_S))).serve(20.0, think_s=8.0)
    weighed = Load(make_bench(CHEAP_S)).serve(20.0, think_s=8.0)
    assert weighed.offline >= 1.2 * reuse.offline
    assert max(weighed.ttfts_s) <= 1.0


@pytest.mark.slow  # that the cache is weighed: test_what_first_tokens_need_in_time_is_not_weighed
def test_chats_that_come_back_soon_are_kept() -> None:
    none = Load(keep_nothing(make_bench(DEAR_S, 10.0))).serve(10.0, think_s=1.0)
    weighed = Load(make_bench(DEAR_S, 10.0)).serve(10.0, think_s=1.0)
    assert weighed.hit_rate > 1.4 * none.hit_rate
    assert weighed.offline >= 1.1 * none.offline


@pytest.mark.slow
def test_what_is_kept_follows_how_soon_chats_come_back() -> None:
    bench = make_bench(DEAR_S, 10.0)
    load, kept = Load(bench), []
    for think_s in (20.0, 1.0, 20.0):
        load.serve(35.0, think_s)
        kept.append(min(bench.scheduler.kv.protection.max_blocks, NUM_BLOCKS))
    assert kept[0] < kept[1] > kept[2]


@pytest.mark.parametrize(("ttft_slo", "is_weighed"), [(1.0, True), (0.04, False)])
def test_what_first_tokens_need_in_time_is_not_weighed(ttft_slo: float, is_weighed: bool) -> None:
    bench = make_bench(CHEAP_S, ttft_slo)
    Load(bench).serve(15.0, think_s=8.0)
    assert (bench.scheduler.kv.protection.max_blocks < math.inf) == is_weighed


def test_without_offline_requests_nothing_is_weighed() -> None:
    bench = make_bench(CHEAP_S)
    for _ in range(3):
        bench.finish(request_of(tokens("chat", HISTORY_TOKENS), max_tokens=5))
        bench.clock.advance(2.0)
    assert bench.scheduler.kv.protection.max_blocks == math.inf


def test_a_request_with_an_objective_that_no_step_keeps_decides_nothing() -> None:
    """It is late, or counts as tight as leaves prompts their share of a step."""
    bench = make_bench(CHEAP_S)
    load = Load(bench)
    load.serve(6.0, think_s=8.0)
    hurried = request_of(tokens("hurried", 40), max_tokens=400)
    hurried.slo = SLO(0.5, 1e-4)
    bench.add(hurried)
    load.serve(2.0, think_s=8.0)
    assert hurried.status is not RequestStatus.FINISHED
    assert bench.scheduler.kv.protection.max_blocks < math.inf


def test_several_steps_in_flight_have_a_part_of_the_decodes_each() -> None:
    """So many stages decode as many times the requests in a step's time, and want their KV."""
    kept = []
    for max_steps in (1, 4):
        bench = make_bench(DEAR_S)
        load = Load(bench)
        load.serve(10.0, think_s=8.0)
        kept_cache = bench.scheduler._planner._kept_cache
        assert kept_cache is not None
        kept_cache.in_flight.max_steps = max_steps
        offline = [each for each in kept_cache.preemption.block_holders if each in load.jobs]
        per_s = kept_cache._offline_per_s(offline, StepLoad(), 0.03)
        kept.append(per_s(NUM_BLOCKS) / per_s(NUM_BLOCKS // 4))
    assert kept[0] < kept[1], "what one step has no time for, four have"
