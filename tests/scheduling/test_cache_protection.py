"""What online requests used stays in the cache beside an offline flood, but not for longer than a minute."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from backfill.core.request import Request, RequestStatus, ServiceClass
from backfill.kvcache.content import Evictable
from backfill.scheduling.policies.slo import SloPolicy
from tests.builders import linear_cost
from tests.scheduling.caching import CachingBench, request_of, tokens

OFFLINE = ServiceClass.OFFLINE
NUM_BLOCKS = NUM_HOST_BLOCKS = 192
NUM_CHATS, NUM_TURNS = 4, 7
NUM_JOBS = 12  # unfinished at any time; their blocks overflow both pools


@dataclass
class Chat:
    """Turns of one user, who thinks before each."""

    number: int
    rng: random.Random
    history: list[int] = field(default_factory=list)
    num_turns: int = 0

    def next_turn(self) -> Request:
        user = tokens((self.number, self.num_turns), self.rng.randint(20, 60))
        self.num_turns += 1
        return request_of([*self.history, *user], max_tokens=self.rng.randint(10, 30))

    def think_s(self) -> float:
        return self.rng.uniform(1.0, 4.0)


def make_bench(seed: int, num_host_blocks: int, ttft_slo: float = 0.2) -> CachingBench:
    return CachingBench(
        NUM_BLOCKS,
        num_host_blocks,
        cost=linear_cost(token_s=2e-4, step_s=0.02),
        completes=0.8,
        seed=seed,
        checks_every=10,  # of thousands
        policy="slo",
        checkpointing="adaptive" if num_host_blocks else "none",
        max_num_seqs=16,
        max_num_batched_tokens=1024,
        ttft_slo=ttft_slo,
        tpot_slo=0.15,
    )


def jobs(seed: int) -> Iterator[Request]:
    """Offline requests without end, of 10 to 40 blocks."""
    rng = random.Random(seed)
    number = 0
    while True:
        prompt = tokens(("job", seed, number), rng.randint(150, 500))
        yield request_of(prompt, max_tokens=rng.randint(10, 120), service_class=OFFLINE)
        number += 1


def serve_chats(bench: CachingBench, seed: int, flood: Iterator[Request] | None) -> None:
    """Serve all turns of the chats, and keep the flood up meanwhile."""
    rng = random.Random(seed)
    chats = [Chat(number, random.Random(rng.random())) for number in range(NUM_CHATS)]
    due = [(rng.uniform(0.0, 2.0), chat.number) for chat in chats]
    heapq.heapify(due)
    open_turns: dict[int, Request] = {}
    running: list[Request] = []
    while due or open_turns:
        while due and due[0][0] <= bench.clock.now_s():
            number = heapq.heappop(due)[1]
            open_turns[number] = chats[number].next_turn()
            bench.add(open_turns[number])
        running = keep_up(bench, flood, running)
        bench.step()
        if not (open_turns or running) and due:
            bench.clock.advance(max(0.0, due[0][0] - bench.clock.now_s()))
        for number, request in list(open_turns.items()):
            if request.status is RequestStatus.FINISHED:
                del open_turns[number]
                chat = chats[number]
                chat.history = [*request.prompt_token_ids, *request.output_token_ids]
                if chat.num_turns < NUM_TURNS:
                    heapq.heappush(due, (bench.clock.now_s() + chat.think_s(), number))


def keep_up(bench: CachingBench, flood: Iterator[Request] | None, running: list[Request]) -> list[Request]:
    """The unfinished jobs, as many as there shall be at any time."""
    if flood is None:
        return []
    running = [job for job in running if job.status is not RequestStatus.FINISHED]
    while len(running) < NUM_JOBS:
        running.append(next(flood))
        bench.add(running[-1])
    return running


def hit_rate(bench: CachingBench) -> float:
    counters = bench.counters()
    hits = counters.num_prefix_hit_tokens + counters.num_host_prefix_hit_tokens
    return hits / counters.num_prefix_queried_tokens


@pytest.mark.parametrize(
    "num_host_blocks",
    [pytest.param(0, id="device", marks=pytest.mark.slow), pytest.param(NUM_HOST_BLOCKS, id="two-tiers")],
)
def test_chats_find_as_much_beside_an_offline_flood_as_alone(num_host_blocks: int) -> None:
    """The objective leaves first tokens no time to compute a chat again (``KeptCache``)."""
    alone, beside = make_bench(1, num_host_blocks, 0.05), make_bench(1, num_host_blocks, 0.05)
    serve_chats(alone, 1, None)
    serve_chats(beside, 1, jobs(1))
    assert hit_rate(alone) > 0.7
    assert hit_rate(beside) >= 0.95 * hit_rate(alone)
    counters = beside.counters(OFFLINE)
    assert counters.num_evicted_blocks > 2 * NUM_BLOCKS
    assert not num_host_blocks or counters.num_evicted_host_blocks > 0, "it overflows both tiers"
    assert counters.num_prefix_hit_tokens == counters.num_host_prefix_hit_tokens == 0


@pytest.mark.slow
@pytest.mark.parametrize("num_host_blocks", [0, NUM_HOST_BLOCKS], ids=["device", "two-tiers"])
def test_the_flood_gets_the_pool_within_a_minute_after_the_last_chat(num_host_blocks: int) -> None:
    bench = make_bench(2, num_host_blocks)
    flood = jobs(2)
    serve_chats(bench, 2, flood)
    counts = bench.scheduler.kv.counts
    assert counts.available(Evictable.OFFLINE) < counts.available(Evictable.ALL), "something is protected"
    idle_since_s = bench.clock.now_s()
    running = list(bench.scheduler.requests.by_id.values())
    while bench.clock.now_s() < idle_since_s + 60.0:
        running = keep_up(bench, flood, running)
        bench.step()
    assert counts.available(Evictable.OFFLINE) == counts.available(Evictable.ALL), "nothing is protected"
    policy = bench.scheduler.policy
    assert isinstance(policy, SloPolicy)
    most_held = 0.0
    for _ in range(100):
        running = keep_up(bench, flood, running)
        bench.step()
        # The blocks that the policy still reserves for the next chats are another mechanism's.
        most_held = max(most_held, counts.referenced + policy._peak_blocks.value)
    assert most_held >= 0.95 * NUM_BLOCKS
