"""What is counted as online load, what is predicted for one request more, and what offline work is told."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from backfill.api.online_load import OnlineLoad, OpenChoice
from backfill.api.online_traffic import OnlineTrafficMeter
from backfill.api.predictions import AskedPrompts, Prediction
from backfill.core.config import SchedulerConfig
from backfill.core.counters import ClassCounters
from backfill.core.prefixes import token_keys
from backfill.core.slo import SLO
from backfill.engine.messages import ClassStats, EngineStats, StepKind, StepReport, StepStats
from backfill.preparation.messages import OnlineTraffic
from backfill.scheduling.first_tokens import most_in_time, shortest_first
from tests.builders import linear_cost, make_request
from tests.scheduling.test_first_tokens import NOW_S, TOKEN_S, ends_of, prompts_of, waiting_prompts
from tests.shared import examples

CONFIG = SchedulerConfig(
    policy="slo", max_num_seqs=8, max_num_batched_tokens=100, max_prefill_chunk_tokens=100
)
LONG_AGO_S = -1e9
# 0.1 s for a step of 100 tokens, and 0.05 s for every step.
COST = linear_cost(token_s=0.001, step_s=0.05)


def make_load(context_s: float = 0.0) -> OnlineLoad:
    return OnlineLoad(linear_cost(token_s=0.001, step_s=0.05, context_s=context_s), CONFIG)


def step_report(
    predicted_s: float, seconds: float, *, stopped: bool = False, kind: StepKind = "online"
) -> StepReport:
    idle = ClassStats(0, 0, ClassCounters())
    step = StepStats(kind, 10, seconds, predicted_s, stopped)
    return StepReport([], EngineStats(idle, idle, 0.0, 0, 0.0, 0, step))


def add(
    load: OnlineLoad,
    *prompt_tokens: int,
    priority: int = 0,
    owner: str = "",
    arrived_at_s: float = LONG_AGO_S,
    first_token_by_s: float = -LONG_AGO_S,
    bounds_steps: bool = True,
) -> list[OpenChoice]:
    """Prompts that came long ago let nobody pass any more."""
    asked = AskedPrompts(
        num_tokens=prompt_tokens,
        priority=priority,
        owner=owner,
        arrived_at_s=arrived_at_s,
        first_token_by_s=first_token_by_s,
    )
    return load.add(asked, bounds_steps=bounds_steps)


def end(choices: list[OpenChoice]) -> None:
    for choice in choices:
        choice.on_end()


def predict(
    load: OnlineLoad,
    *prompt_tokens: int,
    priority: int = 0,
    owner: str = "",
    waited_s: float = 0.0,
    ttft_slo_s: float = math.inf,
    now_s: float = 0.0,
) -> Prediction:
    arrived_at_s = now_s - waited_s
    asked = AskedPrompts(
        num_tokens=prompt_tokens,
        priority=priority,
        owner=owner,
        arrived_at_s=arrived_at_s,
        first_token_by_s=arrived_at_s + ttft_slo_s,
    )
    return load.predict(asked, now_s=now_s)


def test_a_flood_of_another_owner_counts_up_to_the_tokens_of_ones_own() -> None:
    load = make_load()
    flood = [add(load, 100, owner="flood", priority=-9, first_token_by_s=50.0) for _ in range(20)]
    assert predict(load, 100, owner="late").ttft_s == pytest.approx(2 * 0.15)
    assert predict(load, 100, owner="flood").ttft_s == pytest.approx(21 * 0.15)
    assert predict(load, 100, owner="late", ttft_slo_s=0.0).ttft_s == pytest.approx(2 * 0.15), "nor if late"
    assert predict(load, 100, owner="flood", ttft_slo_s=0.0).ttft_s == pytest.approx(21 * 0.15)
    add(load, 100, owner="late")
    assert predict(load, 100, owner="late").ttft_s == pytest.approx(4 * 0.15)
    for choices in flood[1:]:
        end(choices)
    assert predict(load, 100, owner="late").ttft_s == pytest.approx(3 * 0.15), "there is no more of it"


def test_a_prompt_counts_until_its_first_token_and_a_choice_until_its_end() -> None:
    load = make_load()
    request = add(load, 100, 250, 1, priority=3)

    def counted() -> tuple[int, float]:
        """Open choices, and the predicted TTFT of a prompt of 100 tokens behind them."""
        return load.num_open, round(predict(load, 100, priority=3).ttft_s, 9)

    assert counted() == (3, 0.701)
    for _ in range(2):
        request[1].on_first_token()
        assert counted() == (3, 0.351)
    for _ in range(2):
        request[0].on_end()
        assert counted() == (2, 0.201)
    for _ in range(2):
        end(request)
        assert counted() == (0, 0.15)
        assert load.num_context_tokens == 0
    request[2].on_first_token()
    assert counted() == (0, 0.15)


def test_the_first_token_waits_for_the_prompts_of_its_priority_and_better() -> None:
    load = make_load()
    for _ in range(10):
        add(load, 100, priority=1)
    assert predict(load, 100, waited_s=0.2).ttft_s == pytest.approx(0.2 + 0.15)
    behind = predict(load, 100, priority=1, waited_s=0.2)
    assert behind.ttft_s == pytest.approx(0.2 + 11 * 0.15)
    assert behind.ttft_alone_s == pytest.approx(0.2 + 0.15)


STEP = SLO(ttft_s=1.0, tpot_s=0.1)


def passing(load: OnlineLoad, *prompt_tokens: int, slo: SLO = STEP, now_s: float = 0.0, **more: Any) -> float:
    """Without the share for what cannot be known."""
    instants = {"arrived_at_s": now_s, "first_token_by_s": math.inf}
    asked = AskedPrompts(num_tokens=prompt_tokens, **{**instants, **more})
    return round(load.passing(asked, now_s=now_s, default=slo).ttft_s / 1.25, 9)


def waiting(load: OnlineLoad, num_tokens: int, ttft_s: float, **more: Any) -> OpenChoice:
    """A prompt that came at 0 s."""
    (choice,) = add(load, num_tokens, arrived_at_s=0.0, first_token_by_s=ttft_s, **more)
    return choice


def test_a_prompt_passes_longer_ones_that_can_wait() -> None:
    """A step has 100 tokens and takes 0.15 s. Some of those passed may be in the running step."""
    load = OnlineLoad(COST, CONFIG, kv_tokens=100_000)
    long = waiting(load, 1000, ttft_s=4.0)
    assert passing(load, 100) == 0.15 + 0.15, "it can come within its half, 2 s"
    assert passing(load, 100, slo=SLO(0.2, 0.1)) == 0.15 + 0.1, "a step takes half of it at most"
    assert passing(load, 1000) == 3.0, "it is not longer"
    assert passing(load, 100, 1000) == 3.15, "than all of its choices"
    assert passing(load, 100, priority=1) == 1.65, "it is more urgent"
    assert passing(load, 100, now_s=0.5) == 1.65, "it lets nobody pass any more"
    waiting(load, 50, ttft_s=9.0).on_first_token()
    assert passing(load, 100) == 0.25, "the objectives of decodes bound the step"
    waiting(load, 100, ttft_s=9.0)
    assert passing(load, 100) == 0.4, "as long, and first"
    waiting(load, 300, ttft_s=0.5)
    assert passing(load, 100) == 2.25, "with this one before it, it cannot wait"
    long.on_first_token()
    assert passing(load, 100) == 0.75


def test_a_retry_waits_for_what_is_in_the_way() -> None:
    """A prompt of 100 tokens takes 0.15 s, and the running step 0.15 s, of which 1.25 times count."""
    load = OnlineLoad(COST, CONFIG, kv_tokens=100_000)
    for num_tokens in (100, 1000):
        waiting(load, num_tokens, ttft_s=9.0)

    def retry_after_s(ttft_s: float) -> float:
        asked = AskedPrompts(num_tokens=[100], arrived_at_s=0.0, first_token_by_s=ttft_s)
        return load.passing(asked, now_s=0.0, default=STEP).retry_after_s

    assert retry_after_s(0.38) == pytest.approx(0.15), "for the prompt that it does not pass"
    assert retry_after_s(0.37) == pytest.approx(0.15 + 1.5), "the step may be of the one that it passes"


def test_a_prompt_passes_others_with_what_the_cache_lacks_of_them() -> None:
    load = OnlineLoad(COST, CONFIG, kv_tokens=100_000)
    keys = token_keys(tuple(range(1024)))
    asked = AskedPrompts(num_tokens=[1024], keys=[keys], arrived_at_s=0.0, first_token_by_s=9.0)
    for _ in range(2):
        (turn,) = load.add(asked)
        turn.on_first_token()
    waiting(load, 1, ttft_s=9.0).on_first_token()
    load.add(asked)
    assert passing(load, 100) == 0.201, "of which one token is left"


def test_a_prompt_counts_with_what_is_left_of_it() -> None:
    load = OnlineLoad(COST, CONFIG, kv_tokens=100_000)

    def ahead_s() -> float:
        ahead = predict(load, 100)
        return round(ahead.ttft_s - ahead.ttft_alone_s, 6)

    long, short = waiting(load, 1000, ttft_s=4.0), waiting(load, 100, ttft_s=9.0)
    assert ahead_s() == 11 * 0.15
    long.on_prompt_progress(700)
    assert ahead_s() == 4 * 0.15
    assert passing(load, 200) == 0.45 + 0.15, "300 tokens wait for 200, and 100 do not"
    assert passing(load, 300) == 1.05, "nor do 300"
    assert load.num_waiting_tokens == 1100, "a router takes off what it has sent"
    long.on_prompt_progress(100)
    assert ahead_s() == 10 * 0.15, "it was preempted and lost its KV"
    long.on_prompt_progress(1000)
    assert ahead_s() == pytest.approx(0.15 + 0.051), "its first token is not reported yet"
    assert load.num_relegated(now_s=3.9) == 0, "0.051 s are left of it"
    assert load.num_relegated(now_s=3.96) == 1
    long.on_prompt_progress(900)
    assert load.num_relegated(now_s=3.96) == 1
    end([long, short])
    long.on_prompt_progress(900)
    assert ahead_s() == load.num_waiting_tokens == load.num_relegated(now_s=9.9) == 0


def test_what_the_prompts_of_a_request_share_counts_once() -> None:
    load, prompt = OnlineLoad(COST, CONFIG, kv_tokens=100_000), tuple(range(1000))
    whole, half = token_keys(prompt), token_keys((*prompt[:500], *prompt[:500]))
    num_tokens, shared = [1000, 1000, 1000], 64 * 15 + 64 * 7
    instants = {"arrived_at_s": 0.0, "first_token_by_s": 99.0}
    asked = AskedPrompts(num_tokens=num_tokens, keys=[whole, whole, half], **instants)
    predicted = load.predict(asked, now_s=0.0)
    alone = load.predict(AskedPrompts(num_tokens=[3000 - shared], **instants), now_s=0.0)
    assert predicted.ttft_alone_s == pytest.approx(alone.ttft_alone_s, abs=0.051 * 3), "but for steps begun"
    load.add(asked)
    assert predict(load, 1).ttft_s == pytest.approx(alone.ttft_s, abs=0.051 * 4)
    assert load.num_relegated(now_s=98.0) == 3, "none of the prompts is there yet"


def test_nobody_is_passed_where_a_prompt_would_have_to_wait_for_more_than_a_step() -> None:
    def load_with(num_decodes: int = 1, *, kv_tokens: int = 2000, **more: Any) -> OnlineLoad:
        load = OnlineLoad(COST, CONFIG, kv_tokens=kv_tokens)
        waiting(load, 1000, ttft_s=99.0)
        for _ in range(num_decodes):
            waiting(load, 10, ttft_s=99.0, **more).on_first_token()
        return load

    assert passing(load_with(), 100) == 0.25
    assert passing(load_with(), 100, owner="other") == math.inf, "owners take turns"
    loose = load_with(bounds_steps=False)
    assert passing(loose, 100) == math.inf, "a step may take as long as the decodes let it"
    waiting(loose, 10, ttft_s=99.0).on_first_token()
    assert passing(loose, 100) == 0.25
    assert passing(load_with(CONFIG.max_num_seqs - 2), 100) == 0.25
    assert passing(load_with(CONFIG.max_num_seqs - 1), 100) == math.inf, "those passed have all places"
    assert passing(load_with(kv_tokens=1110), 100) == 0.25
    assert passing(load_with(kv_tokens=1109), 100) == math.inf, "or memory"
    late = load_with(0)
    chat = waiting(late, 10, ttft_s=0.01)
    assert late.num_relegated(1.0) == 1
    chat.on_first_token()
    assert passing(late, 100, now_s=1.0) == math.inf, "an answer that is late bounds no step"
    chat.on_end()
    assert passing(late, 100, now_s=1.0) == 0.3
    waiting(late, 10, ttft_s=0.01, owner="other")
    assert passing(late, 100, now_s=1.0) == math.inf, "a late prompt of another owner takes its turn"
    fcfs = OnlineLoad(COST, replace(CONFIG, policy="conserve"), kv_tokens=2000)
    waiting(fcfs, 1000, ttft_s=99.0)
    assert passing(fcfs, 100) == math.inf


@settings(max_examples=examples(200))
@given(waiting_prompts, st.integers(1, 60))
def test_a_prompt_that_passes_others_is_never_predicted_before_its_place(
    drawn: list[tuple[int, int, int]], num_tokens: int
) -> None:
    """As the scheduler orders prompts that can all be in time."""
    load = OnlineLoad(linear_cost(token_s=TOKEN_S), replace(CONFIG, max_num_batched_tokens=1000), 10_000)
    new = make_request(num_tokens, request_id="new", slo=SLO(500 * TOKEN_S, 1.0), arrived_at_s=NOW_S)
    # Without those that no order has in time, and those that have no time left to spare.
    drawn_and_new = sorted([*prompts_of(drawn), new], key=lambda each: each.next_token_by_s)
    in_time = most_in_time(drawn_and_new, NOW_S, TOKEN_S)
    assume(new.request_id in in_time)
    prompts = [
        each
        for each in drawn_and_new
        if each.request_id in in_time and NOW_S + each.num_prompt_tokens * TOKEN_S < each.next_token_by_s
    ]
    for each in prompts:
        if each is not new:
            add(
                load,
                each.num_prompt_tokens,
                arrived_at_s=each.arrived_at_s,
                first_token_by_s=each.next_token_by_s,
            )
    order = shortest_first(prompts, NOW_S, TOKEN_S)
    end_s = ends_of(order)[order.index(new)]
    behind_all_s = TOKEN_S * sum(each.num_prompt_tokens for each in prompts)
    no_step = SLO(0.0, 0.0)
    predicted_s = passing(load, num_tokens, slo=no_step, now_s=NOW_S)
    assert end_s - NOW_S <= predicted_s + 1e-6 <= behind_all_s + 2e-6


def test_relegated_prompts_are_served_after_it() -> None:
    load = make_load()
    burst = [add(load, 100, first_token_by_s=1.0) for _ in range(200)]
    add(load, 100, first_token_by_s=2.0)
    # 0.15 s each, so the burst cannot be in time from 0.85 s on.
    for now_s, num_ahead in ((0.0, 201), (0.849, 201), (0.851, 1), (1.849, 1), (1.851, 0)):
        predicted = predict(load, 100, now_s=now_s, ttft_slo_s=1.0).ttft_s
        assert predicted == pytest.approx((num_ahead + 1) * 0.15), now_s
    add(load, 100, priority=1, first_token_by_s=9.0)
    late = predict(load, 100, now_s=2.0, waited_s=0.9, ttft_slo_s=1.0)
    assert late.ttft_s == pytest.approx(0.9 + 203 * 0.15), "relegated itself: behind all, of any priority"
    assert load.num_relegated(2.0) == 201
    for request in burst:
        request[0].on_first_token()
    assert load.num_relegated(2.0) == 1
    late = predict(load, 100, now_s=2.0, waited_s=0.9, ttft_slo_s=1.0)
    assert late.ttft_s == pytest.approx(0.9 + 3 * 0.15)


def test_a_long_prompt_is_relegated_sooner() -> None:
    load = make_load()
    add(load, 400, 100, first_token_by_s=1.0)  # 0.6 s and 0.15 s alone
    for now_s, num_ahead in ((0.39, 5), (0.41, 1), (0.86, 0)):
        assert predict(load, 100, now_s=now_s).ttft_s == pytest.approx((num_ahead + 1) * 0.15), now_s


def test_other_policies_relegate_nothing() -> None:
    load = OnlineLoad(COST, replace(CONFIG, policy="conserve"))
    request = add(load, 100, first_token_by_s=1.0)
    assert predict(load, 100, now_s=9.0, ttft_slo_s=0.1).ttft_s == pytest.approx(0.3)
    end(request)
    assert predict(load, 100, now_s=9.0).ttft_s == pytest.approx(0.15)


def test_every_open_choice_is_a_decode_of_the_predicted_step() -> None:
    load = make_load()
    alone = predict(load, 30).decode_s
    assert alone == pytest.approx(0.05 + 0.001)
    first = add(load, 30, 30)
    add(load, 30, priority=5)
    assert predict(load, 30).decode_s == pytest.approx(0.05 + 4 * 0.001), "waiting ones too: they will decode"
    assert predict(load, 30, 30).decode_s == pytest.approx(0.05 + 5 * 0.001)
    assert predict(load, 30).decode_alone_s == alone
    first[1].on_end()
    assert predict(load, 30).decode_s == pytest.approx(0.05 + 3 * 0.001)


def test_a_step_decodes_at_most_max_num_seqs() -> None:
    load = make_load(context_s=0.0001)
    add(load, *[50] * 20)
    predicted = predict(load, 50)
    assert predicted.decode_s == pytest.approx(0.05 + 8 * 0.001 + 8 * 50 * 0.0001)


def test_contexts_grow_by_a_token_in_each_step_with_online_work() -> None:
    load = make_load(context_s=0.0001)
    early, late = add(load, 10), add(load, 20)
    early[0].on_first_token()
    for kind in ("online", "mixed", "offline", "none"):
        load.on_report(step_report(0.1, 0.1, kind=kind))  # type: ignore[arg-type]
    assert load.num_context_tokens == 10 + 2 + 20
    late[0].on_first_token()
    for _ in range(5):
        load.on_report(step_report(0.1, 0.1))
    assert load.num_context_tokens == 10 + 7 + 20 + 5
    assert predict(load, 8).decode_s == pytest.approx(0.05 + 3 * 0.001 + 50 * 0.0001)
    end(early)
    assert load.num_context_tokens == 25
    end(late)
    assert load.num_context_tokens == 0


def test_steps_correct_the_predictions() -> None:
    load = make_load()
    before = predict(load, 100)
    load.on_report(step_report(1.0, 50.0, stopped=True))
    assert predict(load, 100) == before
    for _ in range(100):
        load.on_report(step_report(0.1, 0.15))
    slower = predict(load, 100)
    assert slower.ttft_s == pytest.approx(1.5 * before.ttft_s, rel=0.01)
    assert slower.decode_s == pytest.approx(1.5 * before.decode_s, rel=0.01)
    load.set_cost_model(COST)
    assert predict(load, 100) == before


def test_it_says_how_many_must_end() -> None:
    load = make_load()
    add(load, 10, 10, 10, 10)
    # A row costs 1 ms, and the request itself is one.
    for limit_s, num in ((0.0555, 0), (0.0545, 1), (0.0535, 2), (0.0515, 4), (0.01, 4)):
        assert load.num_too_many([10], limit_s) == num
    assert make_load().num_too_many([10], 0.01) == 0


def computed(num_computed: int, kind: StepKind = "online") -> StepReport:
    online = ClassStats(1, 0, ClassCounters(num_computed_tokens=num_computed))
    idle = ClassStats(0, 0, ClassCounters())
    return StepReport([], EngineStats(online, idle, 0.0, 0, 0.0, 0, StepStats(kind, 10, 0.1, 0.1)))


def test_rates_are_means_of_about_a_second() -> None:
    load = OnlineLoad(COST, CONFIG)
    add(load, 300)
    meter = OnlineTrafficMeter(load)
    assert meter.on_report(computed(500), 10.0) is None, "what was computed before is not known in time"
    assert meter.on_report(computed(520), 10.5) is None
    assert meter.on_report(computed(520, "offline"), 10.8) is None
    assert meter.on_report(computed(540, "mixed"), 12.0) == OnlineTraffic(40 / 2.0, 2 * 300 / 2.0, 300)
    assert meter.on_report(computed(540, "none"), 14.0) == OnlineTraffic(0.0, 0.0, 300)


def test_a_new_engine_begins_again() -> None:
    meter = OnlineTrafficMeter(OnlineLoad(COST, CONFIG))
    assert meter.on_report(computed(500), 10.0) is None
    assert meter.on_report(computed(3), 15.0) is None
    assert meter.on_report(computed(5), 16.0) == OnlineTraffic(2.0, 0.0, 0)


def test_the_tokens_held_are_a_peak_that_decays_in_a_minute() -> None:
    load = OnlineLoad(COST, CONFIG)
    meter = OnlineTrafficMeter(load)
    few, many = (add(load, tokens) for tokens in (300, 5000))
    meter.on_report(computed(1), 10.0)
    end(many)
    found = [traffic for at_s in range(11, 252) if (traffic := meter.on_report(computed(1, "none"), at_s))]
    assert [found[after].held_tokens for after in (59, 119)] == [
        int(5300 * math.exp(-1)),
        int(5300 * math.exp(-2)),
    ]
    assert found[-1].held_tokens == 300, "what is held now"
    end(few)


def test_a_prompt_counts_with_what_the_prefix_cache_lacks_of_it() -> None:
    load = OnlineLoad(COST, CONFIG, kv_tokens=10_000)
    keys = token_keys(tuple(range(2992)))

    asked = AskedPrompts(num_tokens=[3000], keys=[keys], arrived_at_s=0.0, first_token_by_s=0.5)

    def predicted() -> Prediction:
        return load.predict(asked, now_s=0.0)

    def come() -> OpenChoice:
        (choice,) = load.add(asked)
        return choice

    whole_s = 30 * 0.15
    assert predicted().ttft_s == pytest.approx(whole_s)
    come().on_end()
    assert predicted().ttft_s == pytest.approx(whole_s), "it was aborted before its first token"
    first = come()
    first.on_first_token()
    rest_s = 0.05 + 0.056  # of 46 chunks of 64 tokens, the cache lacks nothing
    assert predicted().ttft_s == predicted().ttft_alone_s == pytest.approx(rest_s)
    second = come()
    assert load.num_waiting_tokens == 56
    assert predicted().ttft_s == pytest.approx(2 * rest_s, abs=0.05), "before a late one, as it is in time"
    end([first, second])
    assert load.num_waiting_tokens == 0
    load.on_new_engine()
    assert predicted().ttft_s == pytest.approx(whole_s), "its cache is empty"
