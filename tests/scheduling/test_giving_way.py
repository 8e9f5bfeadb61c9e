"""An owner that floods the server gives way to the prompts of others, and goes on."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backfill.core.config import SchedulerConfig
from backfill.core.plan import Compute, Resume, SampledToken, StepOutcome, StepPlan
from backfill.core.request import FinishReason, PriorityLevel, Request, RequestId, RequestStatus
from backfill.core.slo import SLO
from backfill.kvcache.content import Evictable
from backfill.kvcache.create import create_kv_cache
from backfill.scheduling.owner_shares import flooding_owner
from backfill.scheduling.policies.slo import SloPolicy
from backfill.scheduling.prediction import StepPredictor
from backfill.scheduling.scheduler import Scheduler
from tests.builders import linear_cost, make_request
from tests.integrity import check_scheduler
from tests.scheduling.bench import offline
from tests.shared import examples

NUM_LAYERS = 10
SLO_1_S = SLO(ttft_s=1.0, tpot_s=0.15)


class World:
    """A device that computes 1,000 tokens a second in steps of 10 ms more, and can stop steps.

    Args:
        stops_at: of a step that may be stopped, the layer before which it is; None: it runs to its end.
    """

    def __init__(
        self,
        num_blocks: int = 5000,
        stops_at: Callable[[int, int], int | None] = lambda *_: None,
        max_steps: int = 1,
        context_s: float = 0.0,
    ) -> None:
        predictor, config = (
            StepPredictor(linear_cost(step_s=0.01, context_s=context_s)),
            SchedulerConfig(max_num_seqs=64),
        )
        policy = SloPolicy(predictor, default_slo=SLO_1_S, max_step_tokens=2048, can_stop=True)
        self.scheduler = Scheduler(
            config,
            create_kv_cache(config, num_blocks, 4, 0),
            policy,
            predictor=predictor,
            default_slo=SLO_1_S,
            num_layers=NUM_LAYERS,
            max_steps_in_flight=max_steps,
        )
        self._checks_every = 1 if num_blocks <= 100 else 4
        self.now_s = 0.0
        self.tokens = Counter[str]()
        self.seconds = Counter[str]()  # of steps with requests of the owner alone
        self._stops_at = stops_at
        self._layers_done: dict[str, int] = {}

    def send(self, owner: str, prompt_tokens: int = 20, max_tokens: int = 30, **fields: object) -> Request:
        request = make_request(prompt_tokens, max_tokens, owner=owner, arrived_at_s=self.now_s, **fields)  # type: ignore[arg-type]
        self.scheduler.add(request)
        return request

    def plan(self) -> StepPlan:
        return self.scheduler.plan_step(self.now_s)

    def run(self, plan: StepPlan, stop_at: int | None = None) -> StepPlan:
        """Run it to its end, or to where its slices are stopped that may be."""
        first, last = 0, NUM_LAYERS
        if isinstance(plan.work, Resume):
            first = self._layers_done[plan.slices[0].request_id]
            last = first + plan.work.num_layers
        if plan.safepoints is None or stop_at is None or not first < stop_at < last:
            stop_at = last
        stops = stop_at < NUM_LAYERS
        suspended = [each.request_id for each in plan.slices if each.stoppable] if stops else []
        self._layers_done |= dict.fromkeys(suspended, stop_at)
        seconds = plan.predicted_s * (stop_at - first) / (last - first)
        self.now_s += max(0.001, seconds)
        by_id, owners = self.scheduler.requests.by_id, set[str]()
        for each in plan.slices:
            owners.add(by_id[each.request_id].owner)
            self.tokens[by_id[each.request_id].owner] += each.num_tokens
        if len(owners) == 1:
            self.seconds[owners.pop()] += seconds
        sampled = [
            SampledToken(each.request_id, 7)
            for each in plan.slices
            if each.samples and each.request_id not in suspended
        ]
        outcome = StepOutcome(tuple(sampled), suspended=tuple(suspended), layers_done=stop_at if stops else 0)
        self.scheduler.commit(plan, outcome, self.now_s)
        if plan.step % self._checks_every == 0:
            check_scheduler(self.scheduler)
        return plan

    def step(self) -> StepPlan:
        plan = self.plan()
        first = self._layers_done.get(plan.slices[0].request_id, 0) if isinstance(plan.work, Resume) else 0
        return self.run(plan, self._stops_at(plan.step, first))

    def owner_of(self, request_id: RequestId) -> str:
        return self.scheduler.requests.by_id[request_id].owner

    def owners_of(self, plan: StepPlan) -> set[str]:
        return {self.owner_of(each.request_id) for each in plan.slices}


def flooded(
    stops_at: Callable[[int, int], int | None] = lambda *_: None,
    num: int = 12,
    max_tokens: int = 200,
    **fields: Any,
) -> World:
    """Answers of one owner, after another one has been there."""
    world = World(stops_at=stops_at, **fields)
    world.send("chat", max_tokens=1)
    for _ in range(num):
        world.send("flood", max_tokens=max_tokens)
    for _ in range(3):
        world.step()
    return world


@pytest.mark.parametrize(
    ("counts", "owner"),
    [
        ({}, None),
        ({"a": 4}, None),
        ({"a": 5}, "a"),
        ({"a": 64, "b": 15}, None),
        ({"a": 64, "b": 14}, "a"),
        ({"a": 40, "b": 40}, None),
    ],
)
def test_who_floods_the_server(counts: dict[str, int], owner: str | None) -> None:
    """More than four fifths, with one more of another owner."""
    assert flooding_owner(counts) == owner


def test_a_step_of_a_flood_stops_for_another_owners_prompt_and_goes_on_behind_it() -> None:
    world = flooded()
    plan = world.plan()
    assert isinstance(plan.work, Compute) and plan.safepoints is not None
    assert all(each.stoppable for each in plan.slices)
    chat = world.send("chat", max_tokens=1)
    world.run(plan, stop_at=4)
    assert {each.request_id for each in world.step().slices} == {chat.request_id}
    assert chat.finish_reason is not None
    resumed = world.step()
    assert isinstance(resumed.work, Resume) and resumed.work.num_layers == NUM_LAYERS - 4
    assert resumed.slices == plan.slices
    assert isinstance(world.step().work, Compute)


def test_another_owners_answers_go_on_in_a_step_that_is_stopped() -> None:
    world = flooded()
    chat = world.send("chat", max_tokens=5)
    world.step()
    plan = world.plan()
    assert [each.request_id for each in plan.slices if not each.stoppable] == [chat.request_id]


@pytest.mark.parametrize("since_s", [60.0, 700.0])
def test_nobody_gives_way_where_there_was_no_other_owner_for_long(since_s: float) -> None:
    world = flooded()
    world.now_s += since_s
    assert (world.step().safepoints is not None) is (since_s < 600.0)


def test_nobody_gives_way_to_a_batch() -> None:
    world = World()
    world.scheduler.add(offline(8, 500, owner="batch"))
    for _ in range(12):
        world.send("chats", max_tokens=200)
    for _ in range(4):
        plan = world.step()
    assert "chats" in world.owners_of(plan)
    assert {world.owner_of(each.request_id): each.stoppable for each in plan.slices} == {
        "batch": True,
        "chats": False,
    }


@pytest.mark.parametrize(("num_offline", "gives_way"), [(4, True), (40, False)])
def test_a_step_that_is_mostly_offline_stops_for_whoever_asks(num_offline: int, gives_way: bool) -> None:
    """Else prompts of the owner with most requests would stop offline work no more."""
    world = flooded(num=8)
    for _ in range(num_offline):
        world.scheduler.add(offline(1, 500, owner="batch"))
    for _ in range(5):
        plan = world.step()
    owners = Counter(world.owner_of(each.request_id) for each in plan.slices)
    assert owners == {"flood": 8, "batch": num_offline}
    of_flood = {each.stoppable for each in plan.slices if world.owner_of(each.request_id) == "flood"}
    assert of_flood == {gives_way}


def test_answers_of_a_flood_take_turns_where_not_all_fit_anothers_gaps() -> None:
    """Their contexts have grown since they were let in: all of them take more than 0.15 s."""
    world = flooded(num=40, max_tokens=5000, context_s=5e-5)
    while world.step().predicted_s < 0.25:
        pass
    world.send("chat", max_tokens=500)
    for _ in range(3):
        world.step()
    computed = Counter[RequestId]()
    for _ in range(40):
        slices = world.step().slices
        assert len(slices) < 40
        computed.update(each.request_id for each in slices if world.owner_of(each.request_id) == "flood")
    levels = {each.request_id: each.priority_level for each in world.scheduler.requests.by_id.values()}
    in_time = [
        computed[name]
        for name, level in levels.items()
        if level is PriorityLevel.ONLINE and world.owner_of(name) == "flood"
    ]
    assert len(in_time) >= 30 and min(in_time) >= 10, computed


def test_in_a_pipeline_all_steps_of_a_flood_stop_and_the_prompt_is_next() -> None:
    world = flooded(num=24, max_steps=2)
    first, second = world.plan(), world.plan()
    for plan in (first, second):
        assert world.owners_of(plan) == {"flood"}
        assert all(each.stoppable for each in plan.slices)
    chat = world.send("chat", max_tokens=1)
    world.run(first, stop_at=4)
    third = world.plan()
    assert {each.request_id for each in third.slices} == {chat.request_id}
    world.run(second, stop_at=6)
    resumed = world.plan()
    assert isinstance(resumed.work, Resume)
    world.run(third)
    assert chat.finish_reason is not None
    world.run(resumed)


def test_a_step_in_a_pipeline_counts_as_its_own_owners() -> None:
    """And only for the time since the step before it ended."""
    world = flooded(num=24, max_steps=2)
    flood = world.plan()
    chat = world.send("chat", prompt_tokens=400, max_tokens=1)
    of_chat = world.plan()
    assert {each.request_id for each in of_chat.slices} == {chat.request_id}
    world.run(flood)
    assert world.scheduler.giving._given_s == 0.0
    since_s = world.now_s
    world.run(of_chat)
    assert world.scheduler.giving._given_s == pytest.approx(world.now_s - since_s)


def test_time_without_a_step_is_given_by_nobody() -> None:
    world = flooded()
    chat = world.send("chat", max_tokens=1)
    plan = world.step()
    assert {each.request_id for each in plan.slices} == {chat.request_id}
    world.now_s += 60.0
    assert world.step().safepoints is not None


def full_of_a_flood() -> tuple[World, list[Request]]:
    """A pool with at most 10 blocks left, and the requests that hold the others."""
    world = World(num_blocks=120)
    world.send("chat", 4, 1)
    flood = [world.send("flood", 20, 100) for _ in range(16)]
    while world.scheduler.kv.counts.available(Evictable.ALL) > 10:
        world.step()
    return world, flood


def test_a_flood_gives_its_blocks_too() -> None:
    """Only as many as the prompt lacks, and of a request only a few times."""
    world, flood = full_of_a_flood()
    chat = world.send("chat", 60, 4)
    plan = world.step()
    assert chat.request_id in {each.request_id for each in plan.slices}
    preempted = [each for each in flood if each.status is RequestStatus.PREEMPTED]
    assert 0 < len(preempted) < 4
    for _ in range(400):
        if all(each.finish_reason is not None for each in flood):
            break
        if chat.finish_reason is not None:
            chat = world.send("chat", 60, 4)
        world.step()
    assert all(each.finish_reason is not None for each in flood)
    assert max(each.num_given_way for each in flood) <= 3


def test_a_flood_whose_own_growth_preempts_it_still_gives_its_blocks() -> None:
    world, flood = full_of_a_flood()
    for each in flood:
        each.num_preemptions += 5
    chat = world.send("chat", 100, 1)
    assert chat.request_id in {each.request_id for each in world.step().slices}
    assert max(each.num_given_way for each in flood) == 1


@pytest.mark.parametrize("max_steps", [2, *(pytest.param(each, marks=pytest.mark.slow) for each in (1, 4))])
def test_a_flood_gives_its_blocks_in_a_pipeline_too(max_steps: int) -> None:
    """None of its requests joins a step while others are in flight that are to be preempted."""
    world = World(num_blocks=360, max_steps=max_steps)
    world.send("chat", 4, 1)
    flood = [world.send("flood", 40, 150) for _ in range(24)]
    plans: list[StepPlan] = []

    def step() -> None:
        for index, each in enumerate(flood):
            if each.finish_reason is not None:
                flood[index] = world.send("flood", 40, 150)
        while len(plans) < max_steps and (plan := world.plan()).slices:
            plans.append(plan)
        world.run(plans.pop(0))

    for _ in range(3):
        for _ in range(100 * max_steps):
            step()
        chat = world.send("chat", 900, 1)
        while chat.finish_reason is None:
            step()
        assert world.now_s - chat.arrived_at_s < 1.5


def test_an_owner_that_floods_owes_nothing_of_what_another_one_gave() -> None:
    world = flooded()
    giving = world.scheduler.giving
    giving._given_s = 4.0
    world.step()
    assert giving.owner is None
    for request_id in list(world.scheduler.requests.by_id):
        world.scheduler.finish(request_id, FinishReason.ABORT)
    for _ in range(12):
        world.send("other", max_tokens=200)
    world.send("chat", max_tokens=1)
    world.step()
    assert giving.owner == "other"


def test_what_resumes_in_flight_is_not_resumed_again() -> None:
    world = flooded()
    plan = world.plan()
    world.send("chat", max_tokens=1)
    world.run(plan, stop_at=4)
    world.step()
    suspension = world.scheduler._suspension
    assert isinstance(world.plan().work, Resume)
    for _ in range(40):
        assert suspension.resume(math.inf, suspension.requests) is None


def test_what_was_not_tried_is_not_discarded() -> None:
    """Refused are the stopped slices of a flood, and not what was suspended before them."""
    world = World()
    world.scheduler.add(first := offline(30, 5))
    world.run(world.plan(), stop_at=9)
    suspension = world.scheduler._suspension
    for _ in range(40):
        assert suspension.resume(math.inf, {RequestId("another")}) is None
    assert set(suspension.requests) == {first.request_id}


def test_who_has_fewer_requests_never_gives_way() -> None:
    world = World()
    for owner in ("a", "b"):
        for _ in range(8):
            world.send(owner, max_tokens=200)
    for _ in range(10):
        assert world.step().safepoints is None


@pytest.mark.slow
@pytest.mark.parametrize(("pause_s", "share"), [(0.0, 0.02), (0.1, 0.25)])
def test_a_flood_gives_a_third_of_the_time_and_a_ttft_objective(pause_s: float, share: float) -> None:
    """Chats come one after another, and stop its steps as soon as these begin.

    Beyond that, turns alone decide: without pauses, most tokens of the steps are theirs, but all have both.
    """
    world = flooded()
    chat = world.send("chat", 30, 1)
    began_s = world.now_s
    world.seconds.clear()
    while world.now_s < began_s + 20.0:
        plan, is_due = world.plan(), False
        flood = [each for each in world.scheduler.requests.by_id.values() if each.owner == "flood"]
        for _ in range(12 - len(flood)):
            world.send("flood", max_tokens=200)
        if chat.last_token_at_s is not None and world.now_s >= chat.last_token_at_s + pause_s:
            chat, is_due = world.send("chat", 30, 1), "chat" not in world.owners_of(plan)
        world.run(plan, 1 if is_due else None)
    assert share < world.seconds["chat"] / 20.0 < share + 0.1
    assert world.tokens["flood"] > 12 * 20.0 / SLO_1_S.tpot_s


def test_answers_of_a_flood_leave_anothers_gaps_in_time() -> None:
    """Also where all of them take longer than what is left of the gap."""
    world = flooded(num=60)
    chat, ends_s = world.send("chat", max_tokens=40), list[float]()
    for number in range(60):
        if number % 5 == 4:
            world.send("chat", 60, 1)
            world.run(world.plan(), stop_at=5)
        else:
            world.step()
        if chat.last_token_at_s is not None and chat.last_token_at_s not in ends_s:
            ends_s.append(chat.last_token_at_s)
    gaps_s = [after - before for before, after in itertools.pairwise(ends_s)]
    assert len(gaps_s) > 20
    assert max(gaps_s) < 1.2 * SLO_1_S.tpot_s, sorted(gaps_s)[-5:]


@pytest.mark.parametrize(("left_s", "are_late"), [(0.03, False), (0.015, True)])
def test_a_flood_has_what_is_left_of_anothers_gap(left_s: float, are_late: bool) -> None:
    """Also its prompts, of which other steps have a little at least, and answers that have stood still."""
    world = flooded(num=50)
    chat = world.send("chat", max_tokens=40)
    while chat.last_token_at_s is None:
        world.step()
    for each in world.scheduler.requests.running.values():
        if are_late and each is not chat:
            each.priority_level, each.last_token_at_s = PriorityLevel.RELEGATED, world.now_s - 2.0
    chat.last_token_at_s = world.now_s - SLO_1_S.tpot_s + left_s
    plan = world.plan()
    assert world.owners_of(plan) == {"chat", "flood"}
    assert plan.predicted_s <= left_s


@pytest.mark.parametrize("num", [16, 60], ids=["all stopped", "others beside"])
def test_a_flood_goes_on_beside_answers_with_a_tight_objective(num: int) -> None:
    """It leaves no time for one layer of what was stopped, nor for the flood's answers."""
    world = flooded(num=num)
    world.send("chat", max_tokens=500, slo=SLO(1.0, 0.012))
    world.step()
    plan = world.plan()
    world.send("chat", 20, 1)
    world.run(plan, stop_at=5)
    plans = [world.step() for _ in range(4)]
    assert any(isinstance(each.work, Resume) for each in plans)
    num_tokens = world.tokens["flood"]
    for _ in range(10):
        world.step()
    assert world.tokens["flood"] >= num_tokens + 100


def test_a_stopped_flood_goes_on_at_once_where_it_holds_the_blocks_of_the_prompt() -> None:
    world = World(num_blocks=100)
    world.send("chat", 4, 1)
    for _ in range(12):
        world.send("flood", 20, 8)
    for _ in range(2):
        world.step()
    plan = world.plan()
    chat = world.send("chat", 300, 2)
    world.run(plan, stop_at=3)
    for _ in range(100):
        if chat.finish_reason is not None:
            break
        assert world.step().slices, "nothing runs, and nothing will"
    assert chat.finish_reason is not None


@settings(max_examples=examples(50))
@given(st.data())
def test_whatever_is_stopped_all_requests_end(data: st.DataObject) -> None:
    """Of three owners in small pools, also where nothing of a flood is left that is not suspended."""
    layers = data.draw(st.lists(st.one_of(st.none(), st.integers(1, NUM_LAYERS - 1)), min_size=1, max_size=8))
    world = World(data.draw(st.integers(12, 40)), lambda step, _: layers[step % len(layers)])
    most_tokens = 4 * world.scheduler.kv.num_blocks
    arrivals: list[tuple[int, str, int, int, bool]] = []
    for _ in range(data.draw(st.integers(6, 14))):
        owner = data.draw(st.sampled_from(["flood"] * 5 + ["chat", "other"]))
        prompt_tokens = data.draw(st.integers(1, most_tokens - 8))
        is_online = owner == "flood" or data.draw(st.booleans())
        arrivals.append((data.draw(st.integers(0, 15)), owner, prompt_tokens, 8, is_online))
    for step in range(2000):
        for at, owner, prompt_tokens, max_tokens, is_online in arrivals:
            if at == step and is_online:
                world.send(owner, prompt_tokens, max_tokens)
            elif at == step:
                world.scheduler.add(offline(prompt_tokens, max_tokens, owner=owner))
        if step > 15 and not world.scheduler.has_unfinished:
            return
        plan = world.step()
        assert plan.slices or not world.scheduler.has_unfinished, "nothing runs, and nothing will"
    raise AssertionError("requests have not ended")
