"""Deadlines of batches in the pool."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backfill.blending.deadlines import BatchWork, Deadlines, Pace
from backfill.blending.requests import Batch, OrderName, PlannedRequest
from backfill.blending.resources import Cost
from tests.blending.builders import LLAMA_8B_ON_A100, ORDERS, known, make_pool, take
from tests.shared import examples


def test_a_deadline_comes_before_the_plan_and_before_a_later_one() -> None:
    pool = make_pool("dfs")
    pool.add([known(i, 100, 100) for i in range(10)])
    pool.add([known(i, 100, 100, group="late", complete_by_s=1000.0) for i in range(10, 20)])
    pool.add([known(i, 100, 100, group="soon", complete_by_s=500.0) for i in range(20, 30)])
    assert pool.take(now_s=0.0) == PlannedRequest(0, 0, 100.0)
    assert [pool.take(now_s=450.0) for _ in range(2)] == [PlannedRequest(i, 0, 100.0) for i in (20, 21)]
    assert take(pool, "late", now_s=950.0).request_id == 10
    # Nothing can be done for `soon` any more: the order is that of the plan.
    assert pool.take(now_s=2000.0) == PlannedRequest(1, 0, 100.0)


def test_groups_that_share_the_device_are_in_danger_at_their_own_pace() -> None:
    due, other = Batch("a", 10_000.0), Batch("b", 9000.0)
    deadlines = Deadlines()
    deadlines.add(BatchWork(due, 100, Cost(3000.0, 1000.0)))
    assert deadlines.urgent(0.0, 1.0) == deadlines.urgent(0.0, 1.0, "a") == []
    for group in "cd":
        deadlines.add(BatchWork(Batch(group, 1e9), 1, Cost(1.0, 1.0)))
    assert deadlines.urgent(0.0, 1.0, "a") == [due], "it has a third of the device"
    deadlines.remove(BatchWork(due, 100, Cost(3000.0, 1000.0)))
    deadlines.add(BatchWork(due, 100, Cost(300.0, 100.0)))
    deadlines.add(BatchWork(other, 100, Cost(9000.0, 1000.0)))
    assert deadlines.urgent(0.0, 1.0) == [other, due]
    assert deadlines.urgent(0.0, 1.0, "a") == [], "the other's work does not delay it"


def test_in_order_of_arrival_the_earliest_deadline_goes_first() -> None:
    pool = make_pool("fcfs")
    pool.add([known(i, 100, 100, group="a", complete_by_s=90_000.0) for i in range(3)])
    pool.add([known(i, 100, 100, group="a", complete_by_s=5_000.0) for i in range(3, 6)])
    assert [take(pool, "a").request_id for _ in range(6)] == [3, 4, 5, 0, 1, 2]


deadline_batches = st.lists(
    st.tuples(st.integers(1, 15), st.integers(1, 2000), st.integers(1, 2000), st.floats(0, 100)),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("slowdown", [1, 5])
def test_a_deadline_is_met_on_a_device_that_others_use_too(slowdown: int) -> None:
    """The batch that is due would end in time alone, and not if it shared the device to the end."""
    model, num_due = LLAMA_8B_ON_A100, 200
    request_s = slowdown * max(model.compute_s(3000, 3000), model.memory_s(3000, 3000))
    due_s = 1.6 * num_due * request_s
    due = [known(i, 3000, 3000, group="due", complete_by_s=due_s) for i in range(num_due)]
    pool = make_pool("blend")
    pool.add(due + [known(i, 3000, 3000) for i in range(num_due, 2 * num_due)])
    now_s, running = 0.0, pool.take(now_s=0.0)
    while running is not None:
        now_s += request_s
        next_one = pool.take(now_s=now_s)
        pool.finish(running.request_id, 3000)
        assert running.request_id >= num_due or now_s <= due_s
        running = next_one


@settings(max_examples=examples(50), deadline=None)
@given(deadline_batches, st.integers(0, 40), st.sampled_from(ORDERS))
def test_deadlines_are_met_where_they_can_be(
    batches: list[tuple[int, int, int, float]], num_others: int, order: OrderName
) -> None:
    """A device that overlaps perfectly, and deadlines that leave the margin over all work due before."""
    pool = make_pool(order)
    requests = [known(i, 3000, 3000) for i in range(num_others)]
    deadlines: list[float] = []
    compute_s = memory_s = at_s = 0.0
    model = LLAMA_8B_ON_A100
    for group, (num, prompt, output, slack_s) in enumerate(batches):
        compute_s += num * model.compute_s(prompt, output)
        memory_s += num * model.memory_s(prompt, output)
        at_s = max(at_s, 61.0 + 1.25 * max(compute_s, memory_s) + slack_s)
        deadlines.append(at_s)
        start = len(requests)
        requests += [
            known(i, prompt, output, group=str(group), complete_by_s=at_s) for i in range(start, start + num)
        ]
    pool.add(requests)
    done_compute_s = done_memory_s = now_s = 0.0
    while (taken := pool.take(now_s=now_s)) is not None:
        request = requests[taken.request_id]
        num_prompt = len(request.prompt_token_ids)
        done_compute_s += model.compute_s(num_prompt, request.max_output_tokens)
        done_memory_s += model.memory_s(num_prompt, request.max_output_tokens)
        now_s = max(done_compute_s, done_memory_s)
        pool.finish(taken.request_id, request.max_output_tokens)
        assert request.complete_by_s is None or now_s <= request.complete_by_s


# The pace: how long work takes over its least time.


def paced(slowdown: float, *, num_s: int) -> Pace:
    """Work of a second every ``slowdown`` seconds."""
    pace, at_s = Pace(), 0.0
    pace.advance(at_s, is_busy=False)
    while at_s < num_s:
        at_s += slowdown
        pace.advance(at_s, is_busy=True)
        pace.add(1.0, 0.5)
    return pace


def test_a_device_that_was_idle_or_is_faster_than_its_model_counts_as_ideal() -> None:
    idle = Pace()
    for at_s in (0.0, 1e6):
        idle.advance(at_s, is_busy=False)
    assert Pace().slowdown == idle.slowdown == paced(0.1, num_s=600).slowdown == 1.0


@pytest.mark.parametrize("slowdown", [2.0, 10.0, 300.0])
def test_the_pace_is_learned(slowdown: float) -> None:
    pace = paced(slowdown, num_s=6000)
    assert pace.slowdown == pytest.approx(slowdown, rel=0.3)
    assert Pace(pace.observed).slowdown == pace.slowdown, "of the same device"


def test_work_that_never_ends_makes_every_deadline_urgent() -> None:
    pace = Pace()
    pace.advance(0.0, is_busy=False)
    for at_s in range(10, 100_000, 10):
        pace.advance(float(at_s), is_busy=True)
    assert pace.slowdown > 1e9
