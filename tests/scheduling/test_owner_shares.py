"""No owner waits behind another one's queue: the least served is next, by its weight."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backfill.core.config import SchedulerConfig
from backfill.core.plan import SampledToken, StepOutcome, StepPlan
from backfill.core.request import PriorityLevel, Request, order_key
from backfill.core.slo import SLO
from backfill.kvcache.create import create_kv_cache
from backfill.scheduling import owner_shares
from backfill.scheduling.owner_shares import OwnerShares, in_turn, prompts_in_turn, relegating
from backfill.scheduling.policies.baselines import FcfsPolicy
from backfill.scheduling.policies.create import PolicyFactory
from backfill.scheduling.policies.slo import SloPolicy
from backfill.scheduling.policy import Snapshot
from backfill.scheduling.prediction import StepPredictor
from backfill.scheduling.queues import LevelRule, RequestQueue, UnfinishedRequests
from backfill.scheduling.scheduler import Scheduler
from tests.builders import linear_cost, make_request
from tests.scheduling.bench import Bench, bros_policy, conserve_policy, offline, slo_policy

NEVER = LevelRule(0.0, False, None, 1000)  # a request changes its level


def by_owner(requests: Iterable[Request]) -> dict[str, list[Request]]:
    """Each owner's, in their order."""
    queues = defaultdict[str, list[Request]](list)
    for request in requests:
        queues[request.owner].append(request)
    return queues


def order_of(waiting: Iterable[Request], started: Iterable[Request]) -> Sequence[Request]:
    queues = by_owner(waiting)
    return list(in_turn(queues, OwnerShares().served(queues.keys(), started)))


class Service:
    """One request at a time, each for as long as its prompt has tokens."""

    def __init__(self) -> None:
        self.shares = OwnerShares()
        self.waiting: list[Request] = []
        self.tokens_had = Counter[str]()

    def add(self, owner: str, prompt_tokens: int, weight: float = 1.0) -> Request:
        request = make_request(prompt_tokens, owner=owner, owner_weight=weight)
        request.enqueue(len(self.waiting) + sum(self.tokens_had.values()))
        self.waiting.append(request)
        return request

    def serve_next(self) -> Request:
        queues = by_owner(self.waiting)
        request = next(in_turn(queues, defaultdict(float, self.shares.served(queues.keys(), ()))))
        self.waiting.remove(request)
        request.first_scheduled_at_s = 0.0
        self.shares.on_end(request)
        self.tokens_had[request.owner] += request.num_prompt_tokens
        return request


def test_an_owner_that_comes_late_waits_for_one_request_of_the_queue() -> None:
    service = Service()
    for _ in range(100):
        service.add("flood", 10)
    for _ in range(20):
        service.serve_next()
    late = [service.add("late", 10), service.add("late", 10)]
    served = [service.serve_next() for _ in range(4)]
    assert [each.owner for each in served].count("late") == 2
    assert [each for each in served if each.owner == "late"] == late, "an owner's own order stays"


def test_what_runs_for_an_owner_counts_and_what_the_cache_had_does_not() -> None:
    running = make_request(50, owner="a")
    running.first_scheduled_at_s, running.num_cached_tokens = 0.0, 10
    waiting = [make_request(30, owner="a"), *(make_request(30, owner="b") for _ in range(3))]
    assert [each.owner for each in order_of(waiting, [running])][:4] == [
        "b",
        "b",
        "a",
        "b",
    ]  # 40 of a's against 0, 30, 60


def test_a_preempted_request_is_not_counted_twice() -> None:
    preempted = make_request(50, owner="a")
    preempted.first_scheduled_at_s = 0.0
    waiting = [preempted, make_request(30, owner="a"), *(make_request(30, owner="b") for _ in range(3))]
    assert [each.owner for each in order_of(waiting, [preempted])] == [
        "b",
        "b",
        "a",
        "a",
        "b",
    ]  # 50 of a's against 0, 30, 60; then 80


def test_who_asked_for_nothing_has_no_claim_for_it() -> None:
    """Also not one that leaves and comes back while the others compete."""
    service = Service()
    for _ in range(200):
        service.add("a", 10)
        service.add("b", 10)
    for _ in range(100):
        service.serve_next()
    for _ in range(50):
        service.add("late", 10)
    before = service.tokens_had.copy()
    for _ in range(90):
        service.serve_next()
    had = {owner: service.tokens_had[owner] - before[owner] for owner in ("a", "b", "late")}
    assert max(had.values()) - min(had.values()) <= 10, had


@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=2, max_size=4),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
)
def test_backlogged_owners_get_their_shares(weights: list[float], lengths: list[int]) -> None:
    """Between owners with a backlog lies at most one request, over the weight."""
    service = Service()
    owners = {f"owner{index}": weight for index, weight in enumerate(weights)}
    for index in range(12):
        for number, (owner, weight) in enumerate(owners.items()):
            service.add(owner, lengths[(index + number) % len(lengths)], weight)
    bound = max(lengths) / min(weights)
    while len({each.owner for each in service.waiting}) == len(owners):
        service.serve_next()
        had = [service.tokens_had[owner] / weight for owner, weight in owners.items()]
        assert max(had) - min(had) <= bound + 1e-9, had


def plain_order(waiting: Iterable[Request], running: Iterable[Request]) -> list[Request]:
    """The definition: again and again the first request of the owner that has had the least."""
    left, had = sorted(waiting, key=order_key), defaultdict[str, float](float)
    for request in (*left, *running):
        if request.first_scheduled_at_s is not None:
            had[request.owner] += (request.num_tokens - request.num_cached_tokens) / request.owner_weight
    ordered = list[Request]()
    while left:
        first = {owner: queue[0] for owner, queue in by_owner(left).items()}
        owner = min(first, key=lambda each: (had[each], first[each].order_key))
        request = first[owner]
        if request.first_scheduled_at_s is None:
            had[owner] += request.num_pending_tokens / request.owner_weight
        ordered.append(request)
        left.remove(request)
    return ordered


@given(st.data())
def test_a_queue_is_in_the_plain_order_however_far_it_is_read(data: st.DataObject) -> None:
    """Whatever came and went before, and though it changes while it is read."""
    queue, queued, running = RequestQueue(), list[Request](), list[Request]()
    weights = {"a": 1.0, "b": 2.0, "c": 0.5}
    for number in range(data.draw(st.integers(2, 24))):
        owner = data.draw(st.sampled_from(sorted(weights)))
        request = make_request(
            data.draw(st.integers(1, 40)),
            owner=owner,
            owner_weight=weights[owner],
            priority=data.draw(st.integers(0, 1)),
        )
        request.enqueue(number)
        if data.draw(st.booleans()):
            request.first_scheduled_at_s = 0.0
        if request.first_scheduled_at_s is not None and data.draw(st.booleans()):
            running.append(request)
        else:
            queue.push(request)
            queued.append(request)
    for request in data.draw(st.permutations(queued))[: data.draw(st.integers(0, len(queued)))]:
        queue.remove(request)
        queued.remove(request)
    if len({each.owner for each in queued}) < 2:
        assert list(queue.first(99, running, queue.preempted.values())) == sorted(queued, key=order_key)
        return
    expected = plain_order(queued, running)
    num_most = data.draw(st.integers(0, len(queued) + 1))
    first = queue.first(num_most, running, queue.preempted.values())
    assert len(first) == min(num_most, len(queued))
    num_read = data.draw(st.integers(0, len(first)))
    assert list(first[:num_read]) == expected[:num_read]
    for request in expected[:num_read]:  # they start
        queue.remove(request)
    assert list(first) == expected[:num_most]


def test_a_plan_reads_a_long_queue_of_several_owners_only_as_far_as_it_starts_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(max_num_batched_tokens=100, max_prefill_chunk_tokens=100)
    bench.add(*(offline(40, 5, owner=f"owner{number % 50}") for number in range(1000)))
    read = note_reads(monkeypatch)
    plan = bench.step()
    assert 0 < len(plan.slices) <= len(read) <= len(plan.slices) + 2


def test_owners_that_yield_are_left_out_of_a_long_queue_without_reading_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue, online = RequestQueue(), PriorityLevel.ONLINE
    for number in range(300):
        request = make_request(40, owner="abc"[number % 3])
        request.enqueue(number)
        queue.push(request)
    expected = [each for each in queue.first(300, (), ()) if each.owner != "a"]
    read = note_reads(monkeypatch)
    waiting = {online: queue.first(200, (), ())}
    view = Snapshot(0.0, running={}, restoring=(), waiting=waiting, num_blocks=1, online_blocks=0)
    view = relegating(view, {"a"})
    assert list(view.waiting[online][:5]) == expected[:5]
    assert len(read) == 5
    assert list(view.waiting[online]) == expected


def note_reads(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """Grows by what is put into its order."""
    read: list[Request] = []

    def noting(*args: Any) -> Iterator[Request]:
        for request in in_turn(*args):
            read.append(request)
            yield request

    monkeypatch.setattr(owner_shares, "in_turn", noting)
    return read


POLICIES = [
    pytest.param(policy, id=name)
    for name, policy in {
        "slo": slo_policy,
        "bros": bros_policy,
        "conserve": conserve_policy,
        "fcfs": lambda _: FcfsPolicy(),
    }.items()
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("urgent", [0, -5], ids=["", "with a more urgent priority"])
def test_a_flood_of_one_owner_does_not_delay_another(policy: object, urgent: int) -> None:
    """Also where its prompts are shorter and came before: more of its first tokens would be in time."""
    bench = Bench(policy, max_num_batched_tokens=100, max_prefill_chunk_tokens=100)  # type: ignore[arg-type]
    flood = [make_request(50, 1, owner="flood", priority=urgent) for _ in range(100)]
    bench.step(*flood)
    late = make_request(200, 2, owner="late", arrived_at_s=bench.clock.now_s())
    bench.add(late)
    num_ended = sum(each.finish_reason is not None for each in flood)
    while late.first_token_at_s is None:
        bench.step()
    num_meanwhile = sum(each.finish_reason is not None for each in flood) - num_ended
    assert num_meanwhile <= 8, "its 200 tokens beside as many of the flood, and what a step had begun"


def test_flex_requests_of_one_owner_do_not_delay_lines_of_another() -> None:
    bench = Bench(max_num_batched_tokens=100, max_prefill_chunk_tokens=100, max_num_seqs=4)
    bench.step(*(offline(40, 5, owner="flood") for _ in range(60)))
    line = offline(40, 5, owner="late", arrived_at_s=bench.clock.now_s())
    bench.add(line)
    for _ in range(12):
        bench.step()
    assert line.finish_reason is not None


@pytest.mark.parametrize("policy", [slo_policy, bros_policy])
def test_a_long_prompt_of_one_owner_holds_up_no_short_ones_of_another(policy: PolicyFactory) -> None:
    """A prompt of 5 s with an objective of a minute, beside chats that have a second."""
    bench = Bench(
        policy,
        cost=linear_cost(token_s=0.001, step_s=0.001),
        num_blocks=2000,
        max_num_batched_tokens=1000,
        max_prefill_chunk_tokens=1000,
    )
    bench.step(make_request(5000, 1, owner="long", slo=SLO(ttft_s=60.0, tpot_s=1.0)))
    chats: list[Request] = []
    while bench.scheduler.has_unfinished:
        if len(chats) < bench.clock.now_s() / 0.5:
            chat = make_request(
                50, 1, owner="short", arrived_at_s=bench.clock.now_s(), slo=SLO(ttft_s=1.0, tpot_s=1.0)
            )
            chats.append(chat)
            bench.add(chat)
        bench.step()
    late = [each for each in chats if (each.first_token_at_s or 99) - each.arrived_at_s > 1.15]
    assert len(chats) > 8 and not late


def slow_bench(step_s: float = 0.1, **limits: int) -> Bench:
    """A second for 1000 prompt tokens, and what each step takes more."""
    cost = linear_cost(token_s=0.001, step_s=step_s)
    most = {"max_num_batched_tokens": 1000, "max_prefill_chunk_tokens": 1000}
    return Bench(slo_policy, cost=cost, num_blocks=8000, **{**most, **limits})


def keep_waiting(bench: Bench, num: int, prompt_tokens: int) -> None:
    """Prompts of the flood that can be in time, and urgent ones."""
    waiting = bench.scheduler.requests.waiting[PriorityLevel.ONLINE].requests
    for _ in range(num - sum(each.owner == "flood" for each in waiting)):
        now_s = bench.clock.now_s()
        bench.add(make_request(prompt_tokens, 1, owner="flood", priority=-100, arrived_at_s=now_s))


def test_a_late_prompt_of_one_owner_does_not_wait_for_all_that_another_sends() -> None:
    """It was relegated while it was alone, and no other one of its owner waits."""
    bench = slow_bench()
    late = make_request(3000, 1, owner="late", slo=SLO(ttft_s=0.5, tpot_s=0.1))
    bench.add(late)
    bench.step()
    while late.first_token_at_s is None and bench.clock.now_s() < 30.0:
        keep_waiting(bench, 20, 200)
        bench.step()
    assert late.first_token_at_s is not None
    assert late.first_token_at_s < 3 + 3 + 2, "half of the time, and what had begun"


def test_of_one_owner_a_late_prompt_still_waits_for_those_in_time() -> None:
    bench = slow_bench()
    late = make_request(3000, 1, owner="flood", slo=SLO(ttft_s=0.5, tpot_s=0.1))
    bench.add(late)
    for _ in range(30):
        keep_waiting(bench, 20, 200)
        bench.step()
    assert late.priority_level is PriorityLevel.RELEGATED


def test_a_begun_prompt_gives_the_next_chunk_to_who_was_served_less() -> None:
    """Also where the begun one has the earlier deadline and the more urgent priority."""
    bench = slow_bench(step_s=0.02, max_num_batched_tokens=200, max_prefill_chunk_tokens=200)
    begun = make_request(5000, 1, owner="long", priority=-100, slo=SLO(ttft_s=10.0, tpot_s=1.0))
    bench.step(begun)
    for _ in range(3):
        short = make_request(
            100, 1, owner="short", arrived_at_s=bench.clock.now_s(), slo=SLO(ttft_s=60.0, tpot_s=1.0)
        )
        bench.step(short)
        assert short.finish_reason is not None
    assert begun.first_token_at_s is None


def test_late_answers_of_one_owner_leave_the_prompts_of_another_time_in_each_step() -> None:
    """They take turns, as many a step as the TPOT objective lets, each once in a TTFT objective."""
    slo = SLO(ttft_s=1.0, tpot_s=0.15)
    cost = linear_cost(token_s=2e-4, step_s=0.01, context_s=2e-5)
    bench = Bench(
        partial(SloPolicy, default_slo=slo, max_step_tokens=1000, can_stop=True),
        slo=slo,
        cost=cost,
        num_blocks=20_000,
        max_num_seqs=256,
    )
    late_slo = SLO(ttft_s=0.05, tpot_s=0.15)
    late = [make_request(200, 2000, owner="late", slo=late_slo) for _ in range(200)]
    bench.step(*late)
    while any(each.first_token_at_s is None for each in late):
        bench.step()
    began_s, chats = bench.clock.now_s(), []
    while bench.clock.now_s() < began_s + 10.0:
        if (due_s := began_s + 0.5 * len(chats)) <= bench.clock.now_s():
            chats.append(make_request(800, 1, owner="chat", slo=slo, arrived_at_s=due_s))
            bench.add(chats[-1])
        bench.step()
    assert all(each.first_token_at_s is not None for each in chats[:-2])


def flooding(bench: Bench, late: Request, num_prompts: int, **prompt: Any) -> None:
    """Let so many prompts of an owner "flood", all in time, wait."""
    waiting = bench.scheduler.requests.waiting[PriorityLevel.ONLINE].requests
    for _ in range(num_prompts - sum(each is not late for each in waiting)):
        bench.add(make_request(owner="flood", arrived_at_s=bench.clock.now_s(), **prompt))


class FloodedBench:
    """One owner keeps requests open, more than the device serves in time.

    A prompt of 100 tokens takes 0.11 s, a decode 2 ms in each step.
    """

    def __init__(self, num_open: int = 120) -> None:
        self.bench = Bench(
            slo_policy,
            cost=linear_cost(token_s=0.001, step_s=0.01),
            num_blocks=8000,
            max_num_seqs=256,
        )
        self._num_open = num_open
        self._open: list[Request] = []

    def step(self) -> StepPlan:
        self._open = [each for each in self._open if each.finish_reason is None]
        for _ in range(self._num_open - len(self._open)):
            self._open.append(self.send("flood", priority=-100))
        return self.bench.step()

    def send(self, owner: str, **fields: Any) -> Request:
        request = make_request(100, 30, owner=owner, arrived_at_s=self.bench.clock.now_s(), **fields)
        self.bench.add(request)
        return request

    def run_until(self, at_s: float) -> None:
        while self.bench.clock.now_s() < at_s:
            self.step()


def test_a_flood_that_is_late_makes_the_step_of_anothers_prompt_hardly_longer() -> None:
    world, ttft_s = FloodedBench(), []
    for number in range(8):
        world.run_until(2.0 + 1.37 * number)
        chat = world.send("chat")
        while chat.first_token_at_s is None:
            world.step()
        ttft_s.append(chat.first_token_at_s - chat.arrived_at_s)
    assert max(ttft_s) < 1.25 * 0.11


def test_two_floods_have_equal_parts() -> None:
    """Which of them gives way changes with what they were served."""
    world, tokens = FloodedBench(), Counter[str]()
    others: list[Request] = []
    while world.bench.clock.now_s() < 8.0:
        others = [each for each in others if each.finish_reason is None]
        others += [world.send("other") for _ in range(120 - len(others))]
        before = world.bench.scheduler.requests.by_id.copy()
        plan = world.step()
        for each in plan.slices:
            request = before.get(each.request_id)
            tokens["flood" if request is None else request.owner] += each.num_tokens
    assert 0.4 < tokens["other"] / tokens.total() < 0.6, tokens


@pytest.mark.parametrize(("num_of_other", "num_tokens"), [(3, 10 + 3 + 20), (0, 20)])
def test_who_has_no_late_requests_gives_way_where_it_has_nearly_all(
    num_of_other: int, num_tokens: int
) -> None:
    bench = slow_bench(step_s=0.01)
    answers = [make_request(10, 50, owner="a") for _ in range(10)]
    bench.step(*answers, *(make_request(10, 50, owner="b") for _ in range(num_of_other)))
    for _ in range(5):
        bench.step()
    chat = make_request(20, 1, owner="b", arrived_at_s=bench.clock.now_s())
    assert bench.step(chat).num_tokens == num_tokens


@pytest.mark.parametrize(
    ("make_other", "since_s", "is_longer"),
    [(make_request, 1.0, False), (make_request, 15.0, True), (offline, 1.0, True)],
    ids=["lately", "before", "a-batch"],
)
def test_beside_others_late_requests_of_one_owner_make_no_step_longer(
    make_other: Callable[..., Request], since_s: float, is_longer: bool
) -> None:
    """Without another one's online requests, and a while after them, throughput counts where all are late."""
    bench = slow_bench(step_s=0.02, max_num_seqs=256)
    bench.step(make_request(4, 1, owner="burst"), make_other(4, 1, owner="other"))
    if make_other is offline:
        bench.add(offline(4, 500, owner="other"))
    bench.clock.advance(since_s)
    now_s = bench.clock.now_s()
    bench.add(*(make_request(200, 30, owner="burst", arrived_at_s=now_s) for _ in range(60)))
    steps_s = [bench.step().predicted_s for _ in range(10)][1:]
    assert median(steps_s) > 0.2 if is_longer else max(steps_s) < 0.1


def test_late_requests_in_service_count_for_their_owner() -> None:
    requests = UnfinishedRequests(NEVER)
    late, chat = make_request(500, owner="flood"), make_request(50, owner="chat")
    waiting = [make_request(10, owner=owner) for owner in ("flood", "chat")]
    for each in (late, chat, *waiting):
        requests.add(each)
    for each in (late, chat):
        requests.take(each)
        each.first_scheduled_at_s = 0.0
        requests.run(each)
    late.priority_level = PriorityLevel.RELEGATED
    requests.first_waiting(PriorityLevel.ONLINE, 10)
    assert requests.waiting[PriorityLevel.ONLINE].served == {"flood": 500, "chat": 50}
    requests.requeue(late)  # preempted
    requests.first_waiting(PriorityLevel.ONLINE, 10)
    assert requests.waiting[PriorityLevel.ONLINE].served == {"flood": 500, "chat": 50}
    requests.remove(late)
    requests.first_waiting(PriorityLevel.ONLINE, 10)
    assert requests.waiting[PriorityLevel.ONLINE].served == {"flood": 500, "chat": 50}


@pytest.mark.parametrize("num_blocks", [2000, 130])
@pytest.mark.parametrize("batch_of", [None, "flood", "batch"])
def test_a_late_answer_goes_on_beside_another_owners_prompts(num_blocks: int, batch_of: str | None) -> None:
    bench = Bench(slo_policy, cost=linear_cost(token_s=0.001, step_s=0.01), num_blocks=num_blocks)
    late = make_request(400, 5, owner="late", slo=SLO(ttft_s=0.001, tpot_s=0.1))
    bench.step(late)
    while late.first_token_at_s is None:
        bench.step()
    assert late.priority_level is PriorityLevel.RELEGATED
    if batch_of is not None:
        bench.add(offline(40, 5, owner=batch_of))
    while late.finish_reason is None and bench.clock.now_s() < 10:
        flooding(bench, late, 40, prompt_tokens=100, max_tokens=1)
        bench.step()
    assert late.finish_reason is not None


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_begun_prompt_goes_on_in_a_pipeline_too(depth: int) -> None:
    """Of the begun prompts a step has its share alone; those of the other owner are more urgent."""
    slo, config = (
        SLO(ttft_s=5.0, tpot_s=0.1),
        SchedulerConfig(max_num_batched_tokens=1000, max_prefill_chunk_tokens=300),
    )
    predictor = StepPredictor(linear_cost(token_s=0.001, step_s=0.05))
    scheduler = Scheduler(
        config,
        create_kv_cache(config, 20_000, 4, 0),
        slo_policy(predictor, default_slo=slo),
        predictor=predictor,
        default_slo=slo,
        max_steps_in_flight=depth,
    )
    late = make_request(3000, 1, owner="late", slo=SLO(ttft_s=60.0, tpot_s=0.1))
    scheduler.add(late)
    now_s, in_flight = 0.0, deque[StepPlan]()
    while late.finish_reason is None and now_s < 20:
        while len(in_flight) < depth:
            plan = scheduler.plan_step(now_s)
            if plan.does_nothing or (in_flight and not plan.slices):
                break
            in_flight.append(plan)
        plan = in_flight.popleft()
        now_s += max(plan.predicted_s, 0.001)
        tokens = tuple(SampledToken(each.request_id, 7) for each in plan.slices if each.samples)
        scheduler.commit(plan, StepOutcome(tokens), now_s)
        waiting = scheduler.requests.waiting[PriorityLevel.ONLINE].requests
        for _ in range(20 - sum(each is not late for each in waiting)):
            scheduler.add(make_request(400, 1, owner="flood", priority=-100, arrived_at_s=now_s, slo=slo))
    assert late.finish_reason is not None


def test_one_large_request_of_an_owner_ends() -> None:
    """It is above its owner's part by itself; the growth of the other's takes its blocks a few times."""
    bench = Bench(
        slo_policy,
        cost=linear_cost(token_s=0.001, step_s=0.01),
        num_blocks=200,
        max_num_batched_tokens=100,
        max_prefill_chunk_tokens=10,
    )
    large = make_request(500, 100, owner="large", slo=SLO(ttft_s=1e6, tpot_s=0.1))
    for number in range(700):
        if number == 30:
            bench.add(large)
        flooding(bench, large, 10, prompt_tokens=8, max_tokens=60, slo=SLO(ttft_s=2e6, tpot_s=0.1))
        bench.step()
        if large.finish_reason is not None:
            break
    assert large.finish_reason is not None
    assert 0 < large.num_preemptions <= 3


@pytest.mark.parametrize("policy", POLICIES[:3])  # the baseline preempts the latest, whosever it is
@pytest.mark.parametrize("is_online", [True, False])
def test_growth_of_one_owner_preempts_none_of_another_that_holds_less(
    policy: object, is_online: bool
) -> None:
    """Though the other's request is the latest and the least urgent."""
    bench = Bench(policy, num_blocks=20)  # type: ignore[arg-type]
    make = make_request if is_online else offline
    flood = [make(12, 40, owner="flood", priority=-100) for _ in range(4)]
    other = make(8, 20, owner="other")
    bench.step(*flood, other)
    while other.finish_reason is None:
        bench.step()
    assert sum(each.num_preemptions for each in flood) > 0
    assert other.num_preemptions == 0
    while bench.scheduler.has_unfinished:
        bench.step()
    assert all(each.finish_reason is not None for each in flood)


def test_fcfs_preempts_the_latest_whosever_it_is() -> None:
    bench = Bench(FcfsPolicy(), num_blocks=20)
    flood = [make_request(12, 40, owner="flood") for _ in range(4)]
    other = make_request(8, 20, owner="other")
    bench.step(*flood, other)
    while bench.scheduler.has_unfinished:
        bench.step()
    assert other.num_preemptions > 0
    assert flood[0].num_preemptions == 0


STATES = ["waits", "starts", "has answered", "comes back", "waits late", "starts late"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(STATES)), max_size=8))
def test_whose_turn_it_is(states: list[tuple[str, str]]) -> None:
    """Of an owner without online prompts in time, or with none but this, beside an owner with some."""
    levels = UnfinishedRequests(NEVER)
    in_time: list[Request] = []
    for owner, state in states:
        request = make_request(owner=owner)
        if "late" in state:
            request.priority_level = PriorityLevel.RELEGATED
        levels.add(request)
        if "waits" not in state:
            levels.take(request)
            (levels.restore if state == "comes back" else levels.run)(request)
        if state == "has answered":
            request.last_token_at_s = 0.0
        if state in ("waits", "starts"):
            in_time.append(request)
    started = levels.started_of_owners()
    for request in levels.by_id.values():
        owners = {each.owner for each in in_time if each is not request}
        assert levels._has_turn(request, started) == (bool(owners) and request.owner not in owners)


def test_answers_of_one_owner_leave_places_to_another() -> None:
    """Who has few requests does not wait for the end of one of those that have all places."""
    bench = slow_bench(step_s=0.01, max_num_seqs=16)
    bench.step(
        make_request(4, 2, owner="chat"),
        *(make_request(4, 50, owner="flood", slo=SLO(60.0, 1.0)) for _ in range(60)),
    )
    for _ in range(60):  # until the flood's first answers have ended, and others begun
        bench.step()
    for _ in range(4):
        chat = make_request(4, 2, owner="chat", arrived_at_s=bench.clock.now_s())
        bench.step(chat)
        assert chat.first_token_at_s is not None
        bench.step()


@pytest.mark.parametrize(("num_of_other", "is_short"), [(1, True), (20, False)], ids=["flood", "two equals"])
def test_answers_of_a_flood_let_no_step_grow_to_their_objective(num_of_other: int, is_short: bool) -> None:
    """Though all are in time: who asks next waits for the step. Where two send as much, throughput counts."""
    bench = slow_bench(step_s=0.001)
    bench.step(*(make_request(4, 60, owner="other") for _ in range(num_of_other)))
    in_time = SLO(ttft_s=60.0, tpot_s=1.0)
    bench.step(*(make_request(4, 60, owner="flood", slo=in_time) for _ in range(5)))
    bench.add(*(make_request(200, 30, owner="flood", slo=in_time) for _ in range(15)))
    steps_s = [bench.step().predicted_s for _ in range(5)]
    assert max(steps_s) < 0.05 if is_short else min(steps_s) > 0.08, steps_s


def test_prompts_of_a_flood_wait_for_anothers_first_token() -> None:
    bench = slow_bench(step_s=0.001)
    in_time = SLO(ttft_s=60.0, tpot_s=1.0)
    bench.step(*(make_request(10, 50, owner="a", slo=in_time) for _ in range(4)))
    chat = make_request(20, 1, owner="b", arrived_at_s=bench.clock.now_s())
    others = [make_request(10, 1, owner="a", arrived_at_s=bench.clock.now_s(), slo=in_time) for _ in range(8)]
    plan = bench.step(*others, chat)
    assert chat.first_token_at_s is not None
    assert plan.predicted_s < 1.3 * 0.025, "the chat's prompt and four answers"
    for _ in range(8):
        bench.step()
    assert all(each.first_token_at_s is not None for each in others)


def test_prompts_of_two_who_send_as_much_share_steps() -> None:
    bench = slow_bench(step_s=0.001)
    in_time = SLO(ttft_s=60.0, tpot_s=1.0)
    bench.step(*(make_request(10, 50, owner="a", slo=in_time) for _ in range(4)))
    now_s = bench.clock.now_s()
    prompts = [
        make_request(10, 1, owner=each, arrived_at_s=now_s, slo=in_time) for each in "ab" for _ in range(8)
    ]
    bench.step(*prompts)
    assert all(each.first_token_at_s is not None for each in prompts)


def test_the_prompts_of_an_owner_are_in_order_of_their_deadlines_whatever_the_turn() -> None:
    def prompt(owner: str, by_s: float) -> Request:
        request = make_request(100, owner=owner, slo=SLO(by_s, 1.0))
        request.enqueue(0, by_deadline=True)
        return request

    begun, urgent, other = prompt("a", 9.0), prompt("a", 0.4), prompt("b", 10.0)
    begun.first_scheduled_at_s = 0.0
    in_order = prompts_in_turn([begun], [other, urgent], {"a": 100.0, "b": 0.0})
    assert [each for each in in_order if each.owner == "a"] == [urgent, begun]
