"""Which line runs next."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from backfill.core.request import Request
from backfill.jobs.order import FairOrder
from tests.scheduling.bench import Bench, offline


class Batch:
    """What the order knows of a feed."""

    def __init__(self, owner: str, deadline_at_s: float = 1.0, num_lines: int = 10**6) -> None:
        self.owner = owner
        self.deadline_at_s = deadline_at_s
        self.num_lines = num_lines  # not taken yet
        self.num_in_flight = 0
        self.turn = 0.0

    @property
    def has_lines(self) -> bool:
        return self.num_lines > 0


def order_of(batches: Iterable[Batch], weight_of: Callable[[str], float] = lambda owner: 1.0) -> Any:
    order: Any = FairOrder(weight_of)
    for batch in batches:
        order.add(batch)
    return order


def take(order: Any, accepts: Callable[[Batch], bool] = lambda batch: True) -> Batch | None:
    batch: Batch | None = order.next(accepts)
    if batch is not None:
        batch.num_lines -= 1
        batch.num_in_flight += 1
        order.note_taken(batch)
    return batch


def end(order: Any, batch: Batch) -> None:
    batch.num_in_flight -= 1
    order.note_ended(batch)


def test_of_one_owner_the_least_turn_goes_before_the_earliest_deadline() -> None:
    early, late, other = Batch("a", 1, 9), Batch("a", 2, 9), Batch("b", 3, 9)
    early.turn, late.turn = 5.0, 4.0
    order = order_of([early, late, other])
    assert [take(order), take(order)] == [late, other]
    late.turn = 5.0
    assert take(order) is early, "of equals by deadline"
    assert order.next(lambda batch: batch is late) is late


def test_an_owner_who_comes_and_goes_does_not_starve_the_others() -> None:
    steady = Batch("steady", 1, 1000)
    order = order_of([steady])
    served: Counter[str] = Counter()
    for _ in range(100):  # one place; there is always a new batch of the other
        quick = Batch("quick", 0, 1)
        order.add(quick)
        for _ in range(2):
            batch = take(order)
            assert batch is not None
            served[batch.owner] += 1
            end(order, batch)
        order.remove(quick)
    assert served["steady"] >= 100


def test_only_those_that_are_accepted_are_next() -> None:
    first, second, third = Batch("a", 1, 9), Batch("a", 2, 9), Batch("b", 1, 9)
    order = order_of([first, second, third])
    assert order.next() is first
    assert order.next(lambda batch: batch is not first) is second
    assert order.next(lambda batch: batch.owner == "b") is third
    assert order.next(lambda batch: False) is None


def test_finished_tokens_of_lines_are_as_the_weights_of_their_owners() -> None:
    """The order feeds an engine with fewer places than lines, on a virtual clock."""
    weights = {"a": 3.0, "b": 1.0}
    batches = {owner: Batch(owner) for owner in weights}
    order = order_of(batches.values(), weights.__getitem__)
    bench = Bench(max_num_batched_tokens=100, max_prefill_chunk_tokens=100, max_num_seqs=8)
    lines, tokens = list[Request](), Counter[str]()
    for _ in range(300):
        while order.num_in_flight < 40:
            batch = take(order)
            assert batch is not None
            lines.append(offline(20, 10, owner=batch.owner, owner_weight=weights[batch.owner]))
            bench.add(lines[-1])
        bench.step()
        for line in [each for each in lines if each.finish_reason is not None]:
            lines.remove(line)
            end(order, batches[line.owner])
            tokens[line.owner] += line.num_tokens
    assert tokens.total() > 2000
    assert 0.9 * 3 <= tokens["a"] / tokens["b"] <= 1.1 * 3


def test_a_share_is_of_owners_with_waiting_lines() -> None:
    batches = [Batch(owner) for owner in "aabc"]
    order = order_of(batches)
    for batch in batches[:2]:
        order.note_taken(batch)
    assert order.has_share("a", 6)
    batches[3].num_lines = 0
    order.note_waiting(batches[3])
    assert not order.has_share("a", 6)
    order.note_taken(batches[1])
    assert order.has_share("a", 6)
    weighted = order_of([Batch("a"), Batch("b")], {"a": 3.0, "b": 1.0}.__getitem__)
    for _ in range(2):
        weighted.note_taken(weighted.next(lambda batch: batch.owner == "a"))
    assert [weighted.has_share("a", capacity) for capacity in (2, 4)] == [True, False]
    assert not weighted.has_share("b", 1)


def test_owners_without_lines_are_not_searched_for_the_next() -> None:
    small = [Batch(f"small {number}", 1, 1) for number in range(1000)]
    large = Batch("large", 1, 10**6)
    order, num_asked = order_of([*small, large]), 0

    def accept(batch: Batch) -> bool:
        nonlocal num_asked
        num_asked += 1
        return True

    for _ in range(1000 + 512):
        assert take(order, accept) is not None
    assert large.num_in_flight == 512
    assert num_asked == 1000 + 512


@given(data=st.data())
def test_the_next_item_is_that_of_a_full_search(data: st.DataObject) -> None:
    order, batches = order_of([]), list[Batch]()
    owners, last_served, num_taken = dict[str, int](), dict[str, int](), 0  # owners: in which order they came
    for number in range(data.draw(st.integers(1, 40))):
        step = data.draw(st.sampled_from(["add", "take", "take", "take", "end", "leave", "refill"]))
        if step == "add" or not batches:
            batch = Batch(data.draw(st.sampled_from("abcd")), data.draw(st.integers(0, 3)), 1)
            if batch.owner not in {other.owner for other in batches}:
                owners[batch.owner], last_served[batch.owner] = number, num_taken
            order.add(batch)
            batches.append(batch)
        chosen = data.draw(st.sampled_from(batches))
        held: Counter[str] = Counter()
        for batch in batches:
            held[batch.owner] += batch.num_in_flight
        if step == "take":
            expected = min(
                (batch for batch in batches if batch.num_lines > 0),
                key=lambda b: (held[b.owner], last_served[b.owner], owners[b.owner], b.deadline_at_s),
                default=None,
            )
            assert take(order) is expected
            if expected is not None:
                num_taken += 1
                last_served[expected.owner] = num_taken
        elif step == "end" and chosen.num_in_flight:
            end(order, chosen)
        elif step == "refill":
            chosen.num_lines += 2
            order.note_waiting(chosen)
        elif step == "leave":
            order.remove(chosen)
            order.note_ended(chosen)  # a removed one is ignored
            batches.remove(chosen)
        assert order.num_in_flight == sum(batch.num_in_flight for batch in batches)


@given(num_owners=st.integers(1, 6), capacity=st.integers(1, 8), seed=st.integers(0, 99))
def test_no_owner_starves(num_owners: int, capacity: int, seed: int) -> None:
    """Lines end in the order they began: between two lines of one owner each other one gets a turn."""
    chooser = random.Random(seed)
    batches = [
        Batch(f"owner {number % num_owners}", chooser.random(), 10**6) for number in range(3 * num_owners)
    ]
    order, running, turns = order_of(batches), list[Batch](), Counter[str]()
    for _ in range(20 * num_owners):
        if len(running) == capacity:
            end(order, running.pop(0))
        batch = take(order)
        assert batch is not None
        running.append(batch)
        turns[batch.owner] += 1
    assert set(turns.values()) == {20}
