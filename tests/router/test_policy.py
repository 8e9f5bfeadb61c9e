"""Which engine gets a request, when one counts as failing, and how much is spent on retries."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backfill.core.clock import VirtualClock
from backfill.core.prefixes import CHUNK_TOKENS
from backfill.protocol.replica_state import ReplicaState
from backfill.router.health import MOST_RETRIES, Health, RetryBudget
from backfill.router.looks import within
from backfill.router.policy import ReplicaSet, RoutedRequest, create_policy


def report(**changes: float) -> ReplicaState:
    values: dict[str, float] = {"prefill_tokens_per_s": 1000.0, "max_num_seqs": 8, "kv_tokens": 100_000}
    known = {"instance": "i", "phase": "ready", "models": ("m",), "digest": "d"}
    return ReplicaState(**(known | values | changes))  # type: ignore[arg-type]


def replica_set(policy: str = "slo", names: str = "ab", **changes: float) -> tuple[ReplicaSet, VirtualClock]:
    clock = VirtualClock()
    replicas = ReplicaSet(create_policy(policy), clock)
    for name in names:
        replicas.report(name, report(**changes))
    return replicas, clock


def place(replicas: ReplicaSet, num_chunks: int, first_key: int = 0, ttft_s: float | None = None) -> str:
    keys = [hash((first_key, each)) for each in range(num_chunks)]
    placement = replicas.place(RoutedRequest(num_chunks * CHUNK_TOKENS, keys, ttft_s))
    assert placement is not None
    return placement.replica.name


def test_no_replica_is_none() -> None:
    replicas, _ = replica_set(names="")
    assert replicas.place(RoutedRequest(10)) is None
    assert replicas.place_line(RoutedRequest(10), may_exceed=True) is None


def test_the_least_wait_is_chosen_for_new_prefixes() -> None:
    replicas, _ = replica_set()
    first = place(replicas, 10, 1)
    second = place(replicas, 5, 2)
    assert {first, second} == {"a", "b"}
    assert place(replicas, 5, 3) == second


def test_a_wait_shrinks_while_the_prompt_is_computed_and_ends_with_its_token() -> None:
    replicas, clock = replica_set(names="a")
    placements = [replicas.place(RoutedRequest(500)) for _ in range(2)]
    assert placements[0] is not None and placements[1] is not None
    replica = placements[0].replica
    assert replica.wait_s(clock.now_s()) == pytest.approx(1.0)
    assert placements[1].predicted_s == pytest.approx(1.0)
    clock.advance(0.3)
    assert replica.wait_s(clock.now_s()) == pytest.approx(0.7)
    clock.advance(9.0)  # later than predicted: the second one waits in any case
    assert replica.wait_s(clock.now_s()) == pytest.approx(0.5)
    placements[1].on_end()
    placements[1].on_end()
    assert replica.num_online == 1
    placements[0].on_first_token(clock.now_s())
    assert replica.wait_s(clock.now_s()) == 0.0
    assert replica.correction > 1.0


def test_requests_of_other_clients_count_as_reported() -> None:
    replicas, _ = replica_set()
    replica = replicas.report("a", report(waiting_prompt_tokens=400, num_online=3, online_tokens=400))
    assert replica.wait_s(0.0) == pytest.approx(0.4)
    replicas.place(RoutedRequest(100), besides={"b"})
    assert replica.wait_s(0.0) == pytest.approx(0.5)
    assert replica.num_online == 4
    # The next report has this router's request too, which does not count twice.
    replicas.report("a", report(waiting_prompt_tokens=100, num_online=1, online_tokens=100))
    assert replica.wait_s(0.0) == pytest.approx(0.1)
    assert replica.num_online == 1


def test_a_known_prefix_is_followed_while_it_costs_no_objective() -> None:
    replicas, _ = replica_set()
    home = place(replicas, 4, 1)
    assert place(replicas, 4, 1, ttft_s=10.0) == home
    for _ in range(40):
        place(replicas, 4, 1)
    waits = [replica.wait_s(0.0) for replica in replicas.replicas]
    assert max(waits) - min(waits) < 0.3, "the hot prefix has spread"


def test_a_replica_without_a_place_is_passed_over() -> None:
    replicas, _ = replica_set(max_num_seqs=1)
    home = place(replicas, 4, 1, ttft_s=100.0)
    assert place(replicas, 4, 1, ttft_s=100.0) != home
    assert place(replicas, 4, 1, ttft_s=100.0)  # where none has a place, it waits


def test_new_prefixes_fill_all_caches_evenly() -> None:
    replicas, clock = replica_set(names="abcd")
    for key in range(40):
        keys = [hash((key, each)) for each in range(4)]
        placement = replicas.place(RoutedRequest(4 * CHUNK_TOKENS, keys))
        assert placement is not None
        clock.advance(1.0)
        placement.on_end()
    found = Counter(place(replicas, 4, key, ttft_s=1000.0) for key in range(40))
    assert set(found.values()) == {10}


def test_the_baselines() -> None:
    replicas, _ = replica_set("round-robin", "abc")
    assert [place(replicas, 4, 1) for _ in range(4)] == list("abca")
    replicas, _ = replica_set("least-loaded", "ab")
    assert sorted(place(replicas, 4, 1) for _ in range(4)) == list("aabb")
    replicas, _ = replica_set("prefix", "ab")
    assert len({place(replicas, 4, 1) for _ in range(6)}) == 1


def test_lines_go_where_online_requests_leave_room() -> None:
    replicas, _ = replica_set()
    replica = replicas.report("a", report(num_online=7))
    assert replica.line_headroom == 2
    placements = [replicas.place_line(RoutedRequest(10)) for _ in range(18)]
    assert Counter(each.replica.name for each in placements if each is not None) == {"a": 2, "b": 16}
    assert replicas.place_line(RoutedRequest(10)) is None
    more = replicas.place_line(RoutedRequest(10), may_exceed=True)
    assert more is not None and more.replica is replica
    for _ in range(2):
        more.on_end()
    assert replica.num_lines == 2
    replicas.report("a", report(num_online=7, is_offline_suspended=True))
    assert replicas.place_line(RoutedRequest(10), besides={"b"}) is None
    refusing = replicas.place_line(RoutedRequest(10), besides={"b"}, may_exceed=True)
    assert refusing is not None and refusing.replica is replica
    replicas.report("a", report(is_offline_quarantined=True))
    assert replicas.place_line(RoutedRequest(10), besides={"b"}) is None
    assert replicas.takes_lines("a"), "it will"


def test_a_replica_that_left_gets_nothing_and_its_requests_may_end() -> None:
    replicas, _ = replica_set()
    placement = replicas.place(RoutedRequest(10), besides={"a"})
    assert placement is not None
    replicas.remove("b")
    placement.on_end()
    assert {place(replicas, 1, key) for key in range(4)} == {"a"}
    replicas.report("b", report())
    assert place(replicas, 1, 9) == "b"


def lose_and_open(health: Health, now_s: float, num_periods: int, *, may_eject: bool = True) -> bool:
    opens = True
    for _ in range(num_periods):
        for _ in range(100):  # a process that dies loses all its requests
            health.note_loss()
        opens = health.opens(now_s, may_eject=may_eject)
    return opens


def test_an_engine_that_loses_requests_again_and_again_is_ejected_for_longer_and_longer() -> None:
    health = Health()
    assert lose_and_open(health, 0.0, 4)
    health.note_answer()
    assert lose_and_open(health, 0.0, 4)
    assert not lose_and_open(health, 0.0, 1)
    assert not health.opens(29.9, may_eject=True) and health.opens(30.0, may_eject=True)
    assert lose_and_open(health, 30.0, 5, may_eject=False), "too few others"
    assert not lose_and_open(health, 30.0, 1)
    assert health.is_ejected(89.9) and not health.is_ejected(90.0)
    health.note_answer()
    assert not lose_and_open(health, 100.0, 5)
    assert not health.is_ejected(130.0)


def test_failed_looks_within_a_moment_are_no_dead_engine() -> None:
    health = Health()
    assert not any(health.note_failed_look(10.0 + 0.1 * number, 0.25) for number in range(10))
    assert health.note_failed_look(12.0, 0.25)
    health.num_failed_looks = 0  # it has answered one
    assert not any(health.note_failed_look(at_s, 0.25) for at_s in (20.0, 25.0)), "two are too few"
    assert health.note_failed_look(26.0, 0.25)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 2000), st.floats(0.0, 10.0)), max_size=30))
def test_retries_are_at_most_a_share_of_requests_beside_ten_a_second(
    events: list[tuple[int, int, float]],
) -> None:
    budget, now_s, num_requests, num_taken = RetryBudget(), 0.0, 0, 0
    for num_new, num_lost, seconds in events:
        now_s += seconds
        num_requests += num_new
        for _ in range(num_new):
            budget.note_request()
        taken = sum(budget.take(now_s) for _ in range(num_lost))
        num_taken += taken
        assert taken >= min(num_lost, int(min(MOST_RETRIES, 10.0 * seconds))), "none is starved for long"
        assert num_taken <= MOST_RETRIES + 0.2 * num_requests + 10.0 * now_s + 1e-6


def test_a_pause_of_this_process_is_no_time_that_an_engine_took() -> None:
    async def answer(pause_s: float) -> int:
        await asyncio.sleep(0.0)
        time.sleep(pause_s)
        await asyncio.sleep(0.01)
        return 1

    async def hang() -> None:
        await asyncio.sleep(1000.0)

    assert asyncio.run(within(0.2, answer(0.5))) == 1
    with pytest.raises(TimeoutError):
        asyncio.run(within(0.05, hang()))
