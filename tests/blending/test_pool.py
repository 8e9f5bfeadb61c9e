"""The pool: each request exactly once, whatever is added, cancelled, put back and corrected meanwhile."""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from backfill.blending.pool import LONG_RUN_VALUES, OfflinePool
from backfill.blending.requests import OrderName, PlannedRequest, PoolRequest
from backfill.blending.resources import OnlineUse
from backfill.core.errors import ConfigError, RequestError
from tests.blending.builders import (
    LLAMA_8B_ON_A100,
    ORDERS,
    as_bytes,
    known,
    make_pool,
    make_request,
    num_shared,
    prompts,
    take,
)
from tests.shared import examples

GROUPS = ["", "a", "b"]


def take_all(pool: OfflinePool, group: str | None = None) -> list[int]:
    taken = []
    while (request := pool.take(group)) is not None:
        taken.append(request.request_id)
    return taken


class PoolMachine(RuleBasedStateMachine):
    """A pool beside sets of the requests that wait, are in flight, or were put back."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[int, PoolRequest] = {}
        self.waiting: set[int] = set()
        self.in_flight: set[int] = set()
        self.returned: list[int] = []
        self.now_s = 0.0

    @initialize(order=st.sampled_from(ORDERS), share=st.sampled_from([0.0, 0.3]))
    def create(self, order: OrderName, share: float) -> None:
        self.order = order
        self.pool = make_pool(order, sample_share=share)

    @rule(
        new=st.lists(
            st.tuples(
                prompts,
                st.sampled_from([1, 50, 5000]),
                st.booleans(),
                st.sampled_from(GROUPS),
                st.sampled_from([None, None, 1.0, 100.0]),
            ),
            max_size=30,
        )
    )
    def add(self, new: list[tuple[list[int], int, bool, str, float | None]]) -> None:
        added = [
            make_request(len(self.requests) + i, prompt, most, most if is_known else None, group, deadline)
            for i, (prompt, most, is_known, group, deadline) in enumerate(new)
        ]
        self.pool.add(added)
        self.requests.update((request.request_id, request) for request in added)
        self.waiting.update(request.request_id for request in added)

    @rule(
        group=st.sampled_from([None, *GROUPS]),
        num=st.integers(1, 12),
        later_s=st.floats(0, 5),
        most=st.sampled_from([math.inf, 0.0, 60.0]),
    )
    def take(self, group: str | None, num: int, later_s: float, most: float) -> None:
        self.now_s += later_s
        for _ in range(num):
            self.check_taken(group, self.pool.take(group, now_s=self.now_s, most_output_tokens=most))

    def check_taken(self, group: str | None, taken: PlannedRequest | None) -> None:
        candidates = {
            request_id
            for request_id in (*self.waiting, *self.returned)
            if group is None or self.requests[request_id].group == group
        }
        if taken is None:
            assert not candidates
            return
        returned = [request_id for request_id in self.returned if request_id in candidates]
        assert taken.request_id in candidates
        if taken.request_id in returned:
            # In the blend those of the other kind, or too long ones, may have to wait.
            assert self.order == "blend" or taken.request_id == returned[0]
            self.returned.remove(taken.request_id)
        else:
            assert self.order == "blend" or not returned
            self.waiting.remove(taken.request_id)
        self.in_flight.add(taken.request_id)
        request = self.requests[taken.request_id]
        assert 1 <= taken.expected_output_tokens <= request.max_output_tokens
        prompt = as_bytes(request.prompt_token_ids)
        others = (as_bytes(self.requests[i].prompt_token_ids) for i in (*self.waiting, *self.returned))
        assert taken.reused_tokens == max((num_shared(prompt, other) for other in others), default=0)

    @rule(data=st.data(), num=st.integers(1, 12))
    def finish(self, data: st.DataObject, num: int) -> None:
        for _ in range(min(num, len(self.in_flight))):
            request_id = data.draw(st.sampled_from(sorted(self.in_flight)))
            self.pool.finish(
                request_id, data.draw(st.integers(0, self.requests[request_id].max_output_tokens))
            )
            self.in_flight.remove(request_id)

    @rule(data=st.data())
    def note_progress(self, data: st.DataObject) -> None:
        if self.in_flight:
            request_id = data.draw(st.sampled_from(sorted(self.in_flight)))
            most = self.requests[request_id].max_output_tokens
            self.pool.note_progress(request_id, data.draw(st.integers(1, most)))

    @rule(data=st.data())
    def put_back(self, data: st.DataObject) -> None:
        if self.in_flight:
            request_id = data.draw(st.sampled_from(sorted(self.in_flight)))
            self.pool.put_back(request_id)
            self.in_flight.remove(request_id)
            self.returned.append(request_id)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if not self.requests:
            return
        ids = data.draw(st.lists(st.sampled_from(sorted(self.requests)), max_size=4))
        self.pool.cancel(ids)
        self.waiting.difference_update(ids)
        self.in_flight.difference_update(ids)
        self.returned = [request_id for request_id in self.returned if request_id not in ids]

    @rule(compute=st.floats(0, 1), memory=st.floats(0, 1))
    def use_online(self, compute: float, memory: float) -> None:
        self.pool.online = OnlineUse(compute, memory)
        assert self.pool.online == OnlineUse(compute, memory)

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert self.pool.num_waiting == len(self.waiting) + len(self.returned)
        assert (self.pool.density > 0) == (self.pool.num_waiting + len(self.in_flight) > 0)

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.take(None, self.pool.num_waiting + 1, 0.0, math.inf)
            assert not self.waiting
            assert not self.returned


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=examples(30), stateful_step_count=25, deadline=None)


def test_an_empty_pool_has_nothing() -> None:
    pool = make_pool()
    pool.add([])
    assert pool.take() is None
    assert (pool.num_waiting, pool.density) == (0, 0.0)
    pool.cancel([1, 2])
    pool.put_back(1)
    pool.finish(1, 10)


@pytest.mark.parametrize("order", ORDERS)
def test_one_request_and_equal_prompts(order: OrderName) -> None:
    pool = make_pool(order)
    pool.add([make_request(1)])
    assert pool.take() == PlannedRequest(1, 0, 100.0)
    pool.add([make_request(i, [4, 5, 6]) for i in range(2, 6)])
    assert [take(pool).reused_tokens for _ in range(4)] == [3, 3, 3, 0]


def test_fcfs_is_the_order_of_arrival_over_any_additions() -> None:
    pool = make_pool("fcfs")
    for start in range(0, 60, 7):
        pool.add([make_request(i, [70 - i]) for i in range(start, start + 7)])
    assert take_all(pool) == list(range(63))


def test_the_random_order_depends_on_the_seed_alone() -> None:
    requests = [make_request(i, [i % 5, i]) for i in range(50)]
    at_once, in_parts, other = make_pool("random"), make_pool("random"), make_pool("random", seed=1)
    at_once.add(requests)
    other.add(requests)
    for start in range(0, 50, 10):
        in_parts.add(requests[start : start + 10])
    order = take_all(at_once)
    assert take_all(in_parts) == order
    assert take_all(other) != order != list(range(50))


def test_a_request_that_does_not_fit_keeps_only_its_own_kind_waiting() -> None:
    pool = make_pool()
    pool.add([known(i, 1000, 1) for i in range(20)] + [known(i, 10, 4000) for i in range(20, 40)])
    in_flight = [take(pool).request_id for _ in range(20)]
    sparse = next(request_id for request_id in in_flight if request_id >= 20)
    pool.put_back(sparse)
    rest = take_all(pool)
    assert sparse in rest
    assert next(request_id for request_id in rest if request_id >= 20) == sparse


def test_memory_bound_requests_that_are_too_long_are_passed_over() -> None:
    pool = make_pool()
    sparse = [known(3 + i, 10, length) for i, length in enumerate((3000, 5000, 4000))]
    pool.add([known(i, 1000, 1) for i in range(3)] + sparse)
    assert take(pool, most_output_tokens=3999).request_id < 3
    assert take(pool, most_output_tokens=3999).request_id == 3
    pool.finish(3, 3000)
    assert take(pool, most_output_tokens=3999).request_id < 3, "no memory-bound one fits"


@pytest.mark.parametrize(
    "long", [make_request(0, max_output_tokens=4000), known(0, 10, 4000, complete_by_s=30.0)]
)
def test_samples_and_batches_in_danger_go_whatever_fits(long: PoolRequest) -> None:
    pool = make_pool(sample_share=1.0)
    pool.add([long, *(known(1 + i, 1000, 1) for i in range(3)), *(known(4 + i, 10, 900) for i in range(3))])
    taken = take(pool, most_output_tokens=1.0)
    assert taken.request_id == 0
    assert taken.expected_output_tokens > 1


def test_what_is_expected_of_a_request_in_flight_is_corrected() -> None:
    """The others end after 8 tokens; those in flight have generated 100."""
    pool = make_pool()
    pool.add([make_request(number, (1, number), max_output_tokens=4000) for number in range(60)])
    kept, *others = (take(pool) for _ in range(40))
    assert pool.expected_output_tokens(kept.request_id) == kept.expected_output_tokens
    pool.note_progress(kept.request_id, 100)
    for planned in others[:32]:
        pool.finish(planned.request_id, 8)
    corrected = pool.expected_output_tokens(kept.request_id)
    assert corrected is not None
    assert 100 < corrected < kept.expected_output_tokens
    pool.finish(kept.request_id, 200)
    assert pool.expected_output_tokens(kept.request_id) is None


def test_the_part_of_the_cache_for_compute_bound_requests() -> None:
    """That of their reads in all reads, while they wait."""
    pool = make_pool()
    pool.add([known(i, 1000, 20) for i in range(10)] + [known(10, 10, 4000)])
    dense_s, sparse_s = 10 * LLAMA_8B_ON_A100.memory_s(1000, 20), LLAMA_8B_ON_A100.memory_s(10, 4000)
    assert pool.compute_bound_memory_frac == pytest.approx(dense_s / (dense_s + sparse_s))
    for request_id in range(5):
        pool.cancel([request_id])
    assert pool.compute_bound_memory_frac == pytest.approx(dense_s / 2 / (dense_s / 2 + sparse_s))
    take_all(pool)
    assert pool.compute_bound_memory_frac == pytest.approx(0.0, abs=1e-9)


def test_progress_moves_what_is_left() -> None:
    """Of (100, 4000) after 1,000 tokens: 3,000 tokens, and reads of 100 + 1000 to 100 + 4000 each step."""
    pool = make_pool()
    pool.add([known(0, 100, 4000), known(1, 100, 4000)])
    before = pool.density
    assert sorted(take_all(pool)) == [0, 1]
    for request_id in (0, 1):
        pool.note_progress(request_id, 1000)
    compute_s = LLAMA_8B_ON_A100.token_s * 3000
    memory_s = LLAMA_8B_ON_A100.memory_s(1100, 3000)
    assert pool.density == pytest.approx(compute_s / memory_s) != pytest.approx(before)
    pool.put_back(0)
    pool.put_back(1)
    assert pool.density == pytest.approx(before)


def test_every_choice_of_a_prompt_is_work() -> None:
    """The prompt is computed once; each of 3 outputs of 4,000 tokens has its own tokens and reads."""
    pool, model = make_pool(), LLAMA_8B_ON_A100
    pool.add([replace(known(0, 100, 4000), num_choices=3)])
    compute_s = model.compute_s(100, 3 * 4000)
    assert pool.density == pytest.approx(compute_s / (3 * model.memory_s(100, 4000)))
    take(pool)
    pool.note_progress(0, 1000)
    left_s = 3 * model.token_s * 3000
    assert pool.density == pytest.approx(left_s / (3 * model.memory_s(1100, 3000)))
    pool.finish(0, 4000)
    assert pool.density == 0.0


def test_the_long_run_use_of_online_traffic_is_the_mean_of_an_hour() -> None:
    pool = make_pool()
    pool.add([known(0, 100, 4000), known(1, 4000, 100)])
    for index in range(LONG_RUN_VALUES):  # a burst of a minute in an hour
        pool.online = OnlineUse(0.6 * (index < 60), 0.3 * (index < 60))
    use = OnlineUse(0.6 * 60 / LONG_RUN_VALUES, 0.3 * 60 / LONG_RUN_VALUES)
    assert pool._online_long_run.compute_frac == pytest.approx(use.compute_frac)
    assert pool._online_long_run.memory_frac == pytest.approx(use.memory_frac)


@pytest.mark.parametrize("merges", [False, True])
def test_progress_corrects_estimates(merges: bool) -> None:
    """Some go on while others have ended: these are expected to go on, also in a run that is merged."""
    pool = make_pool()
    pool.add([make_request(i, [1, i], 5000) for i in range(40)])
    taken = [take(pool).request_id for _ in range(20)]
    for request_id in taken[:4]:
        pool.note_progress(request_id, 1000)
    for request_id in taken[4:]:
        pool.finish(request_id, 10)
    if merges:
        pool.add([make_request(1000, [1, 1000], 5000)], merges_all=True)
    assert take(pool).expected_output_tokens == pytest.approx((16 * 10 + 4 * 1000) / 16)


def test_an_output_is_not_expected_to_be_larger_than_the_kv_cache() -> None:
    pool = OfflinePool("fcfs", LLAMA_8B_ON_A100, kv_tokens=110)
    pool.add([make_request(1, range(100), 5000)])
    assert pool.take() == PlannedRequest(1, 0, 10.0)


def test_dfs_serves_prefixes_together() -> None:
    pool = make_pool("dfs")
    requests = [make_request(i, [i % 5, i // 5]) for i in range(50)]
    random.Random(0).shuffle(requests)
    pool.add(requests)
    first_tokens = [request_id % 5 for request_id in take_all(pool)]
    assert len([1 for a, b in itertools.pairwise(first_tokens) if a != b]) == 4


def test_samples_run_first_and_correct_the_order() -> None:
    """Requests that begin with 1 turn out long: the density falls, and with it their place in the order."""
    pool = make_pool(sample_share=0.1)
    pool.add([make_request(i, [i % 2, i, *range(50)], 20_000) for i in range(400)])
    before = pool.density
    sampled = [take(pool).request_id for _ in range(40)]
    assert {request_id % 2 for request_id in sampled} == {0, 1}
    for request_id in sampled:
        pool.finish(request_id, 10_000 if request_id % 2 else 10)
    assert pool.density < before / 10
    next_two = [take(pool) for _ in range(2)]
    assert [each.request_id % 2 for each in next_two] == [0, 1]
    assert [each.expected_output_tokens for each in next_two] == [10, 10_000]


def test_a_small_addition_does_not_plan_a_large_pool_again() -> None:
    pool = make_pool()
    pool.add([make_request(i, [i]) for i in range(100)])
    pool.add([make_request(200, [1])])
    assert [len(run.entries) for run in pool._runs] == [100, 1]


def test_what_is_remembered_under_a_steady_backlog_is_bounded() -> None:
    """And estimates are those of all that has finished."""
    pool, num_waiting = make_pool(), 300
    rng, ids, running = random.Random(0), itertools.count(), deque[int]()

    def add(num: int) -> None:
        pool.add([make_request(next(ids), [rng.randrange(4), rng.randrange(1000)], 1000) for _ in range(num)])

    add(num_waiting)
    for _ in range(60):
        add(40)
        running.extend(take(pool).request_id for _ in range(40))
        for request_id in running:
            pool.note_progress(request_id, 5)
        while len(running) > 64:
            pool.finish(running.popleft(), rng.randrange(50, 150))
    assert sum(len(run.entries) for run in pool._runs) <= 3 * (num_waiting + len(running))
    expected = [take(pool).expected_output_tokens for _ in range(pool.num_waiting)]
    assert sum(expected) / len(expected) == pytest.approx(99.5, rel=0.05)


def test_a_cancelled_batch_leaves_no_samples() -> None:
    pool = make_pool("blend", sample_share=0.5)
    pool.add([make_request(i, [i]) for i in range(100)])
    pool.add([make_request(i, [i], group="other") for i in range(100, 200)])
    pool.cancel(range(100))
    assert sum(each.request_id < 100 for samples in pool._samples.values() for each in samples) == 0
    assert {take(pool).request_id for _ in range(100)} == set(range(100, 200))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_output_tokens": 0}, "at least 1 output token"),
        ({"known_output_tokens": 101}, "from 1 to 100"),
        ({"complete_by_s": float("inf")}, "finite"),
        ({"prompt": []}, "empty"),
    ],
)
def test_malformed_requests_are_refused_and_nothing_is_added(fields: dict[str, object], message: str) -> None:
    pool = make_pool()
    with pytest.raises(RequestError, match=message):
        pool.add([make_request(1), make_request(2, **fields)])  # type: ignore[arg-type]
    assert pool.num_waiting == 0
    pool.add([make_request(1)])
    with pytest.raises(RequestError, match="request id 1 is in use"):
        pool.add([make_request(3), make_request(1)])
    with pytest.raises(RequestError, match="not in flight"):
        pool.finish(1, 10)
    assert pool.num_waiting == 1


def test_token_ids_must_be_uint32() -> None:
    pool = make_pool()
    with pytest.raises(RequestError, match="uint32"):
        pool.add([PoolRequest(1, b"12345", 10)])
    pool.add([PoolRequest(1, b"12345678", 10), PoolRequest(2, bytearray(b"1234"), 10)])
    assert [take(pool).reused_tokens for _ in range(2)] == [1, 0]


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="order"):
        make_pool("best")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="sample_share"):
        make_pool(sample_share=1.5)
    with pytest.raises(ConfigError, match="kv_tokens"):
        OfflinePool("blend", LLAMA_8B_ON_A100, kv_tokens=0)
