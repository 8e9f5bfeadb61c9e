from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from backfill.core.request import Request
from backfill.core.slo import SLO
from backfill.scheduling.first_tokens import most_in_time, shortest_first
from tests.builders import make_request
from tests.shared import examples

TOKEN_S = 1 / 64  # sums of these are exact
# Of each: its tokens, its TTFT objective and its age in the time of tokens.
waiting_prompts = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 300), st.integers(0, 150)), min_size=1, max_size=6
)
NOW_S = 5.0


def prompts_of(drawn: Sequence[tuple[int, int, int]]) -> list[Request]:
    """By deadline, as a policy has them."""
    prompts = [
        make_request(
            size,
            request_id=f"r{i}",
            slo=SLO(ttft_s=tokens * TOKEN_S, tpot_s=1.0),
            arrived_at_s=NOW_S - age * TOKEN_S,
        )
        for i, (size, tokens, age) in enumerate(drawn)
    ]
    return sorted(prompts, key=lambda each: each.next_token_by_s)


def ends_of(prompts: Sequence[Request]) -> list[float]:
    return [NOW_S + end * TOKEN_S for end in itertools.accumulate(each.num_prompt_tokens for each in prompts)]


def are_in_time(prompts: Sequence[Request], share: float = 1.0) -> bool:
    by_s = [each.arrived_at_s + share * (each.next_token_by_s - each.arrived_at_s) for each in prompts]
    return all(end_s <= each + 1e-9 for end_s, each in zip(ends_of(prompts), by_s, strict=True))


def ids(prompts: Sequence[Request]) -> list[str]:
    return [each.request_id for each in prompts]


def ordered(*sizes_and_objectives: tuple[int, int]) -> list[str]:
    return ids(shortest_first(prompts_of([(*each, 0) for each in sizes_and_objectives]), NOW_S, TOKEN_S))


@settings(max_examples=examples(200))
@given(waiting_prompts)
def test_as_many_are_in_time_as_in_any_order(drawn: list[tuple[int, int, int]]) -> None:
    prompts = prompts_of(drawn)
    in_time = most_in_time(prompts, NOW_S, TOKEN_S)
    assert are_in_time([each for each in prompts if each.request_id in in_time])
    more = itertools.combinations(prompts, len(in_time) + 1)
    assert not any(are_in_time(some) for some in more), "one more by deadline, in which order is best"


@settings(max_examples=examples(200))
@given(waiting_prompts)
def test_those_in_time_stay_so_and_wait_least_in_the_mean(drawn: list[tuple[int, int, int]]) -> None:
    prompts = prompts_of(drawn)
    in_time = most_in_time(prompts, NOW_S, TOKEN_S)
    prompts = [each for each in prompts if each.request_id in in_time]
    order = shortest_first(prompts, NOW_S, TOKEN_S)
    assert sorted(ids(order)) == sorted(ids(prompts))
    assert are_in_time(order)
    within_half = [sum(ends_of(some)) for some in itertools.permutations(prompts) if are_in_time(some, 0.5)]
    if within_half:
        assert are_in_time(order, 0.5), "the rest of the objective is left"
        assert sum(ends_of(order)) <= min(within_half) + 1e-6


def test_a_prompt_past_its_half_keeps_no_other_from_waiting() -> None:
    """By deadline it is the last one; of the others the longest still goes last."""
    prompts = prompts_of([(60, 280, 0), (9, 290, 0), (20, 600, 305)])
    assert ids(shortest_first(prompts, NOW_S, TOKEN_S)) == ["r2", "r1", "r0"]


def test_a_prompt_lets_shorter_ones_pass_until_half_of_its_objective_has_gone() -> None:
    assert ordered((50, 200), (20, 210), (30, 220)) == ["r1", "r2", "r0"]
    assert ordered((50, 180), (20, 210), (30, 220)) == ["r1", "r0", "r2"]
    assert ordered((50, 100), (20, 210), (30, 220)) == ["r0", "r1", "r2"]


def test_of_equal_prompts_the_earlier_deadline_is_first() -> None:
    assert ordered((9, 150), (9, 120), (9, 170)) == ["r1", "r0", "r2"]


def test_the_objective_counts_from_the_arrival_and_tokens_that_are_left() -> None:
    slo = SLO(ttft_s=2.0, tpot_s=1.0)
    long = make_request(90, request_id="long", slo=slo, arrived_at_s=5.0)
    short = make_request(20, request_id="short", slo=slo, arrived_at_s=5.1)
    assert ids(shortest_first([long, short], 4.8, 0.01)) == ["short", "long"]
    assert ids(shortest_first([long, short], 5.0, 0.01)) == ["long", "short"], "it would end at 6.1"
    long.num_computed_tokens = 75
    assert ids(shortest_first([long, short], 5.7, 0.01)) == ["long", "short"], "15 are left"


def test_answers_that_compute_lost_kv_again_come_first_and_take_their_time() -> None:
    long, short = prompts_of([(50, 200, 0), (20, 210, 0)])
    for num_tokens, rest in ((20, [short, long]), (40, [long, short])):
        lost = make_request(num_tokens)
        lost.last_token_at_s = 0.0
        assert shortest_first([long, lost, short], NOW_S, TOKEN_S) == [lost, *rest]


def test_what_clients_call_urgent_comes_before_shorter_prompts_and_takes_its_time() -> None:
    slo = SLO(ttft_s=2.0, tpot_s=1.0)
    for num_tokens, rest in ((20, ["short", "long"]), (40, ["long", "short"])):
        urgent = make_request(num_tokens, request_id="urgent", slo=slo, priority=-1)
        long = make_request(60, request_id="long", slo=slo)
        short = make_request(19, request_id="short", slo=slo)
        assert ids(shortest_first([urgent, long, short], 0.0, 0.01)) == ["urgent", *rest]


def test_no_prompt_passes_one_of_another_owner() -> None:
    long = make_request(60, request_id="long", owner="a")
    short = make_request(9, request_id="short", owner="b")
    assert ids(shortest_first([long, short], 0.0, 0.01)) == ["long", "short"]
