from __future__ import annotations

import math

import pytest
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from backfill.core.clock import VirtualClock
from backfill.core.errors import RequestError
from backfill.http.limits import OwnerLimited, OwnerLimiter, OwnerLimits, OwnerSlot

LIMITS = {
    "a": OwnerLimits(concurrency=3, queued_tokens=20),
    "b": OwnerLimits(requests_per_minute=4),
    "c": OwnerLimits(),
}


def make_limiter(**limits: int) -> tuple[OwnerLimiter, VirtualClock]:
    clock = VirtualClock()
    return OwnerLimiter(lambda _: OwnerLimits(**limits), clock), clock


class Limiter(RuleBasedStateMachine):
    """Owners beside a model that counts what each has, from all that was ever let in."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = VirtualClock()
        self.limiter = OwnerLimiter(LIMITS.__getitem__, self.clock)
        self.open: list[tuple[str, OwnerSlot, list[int]]] = []  # with the prompt of each choice that is open
        self.entered_at_s: dict[str, list[float]] = {owner: [] for owner in LIMITS}
        self.refused_at_s: dict[str, list[float]] = {owner: [] for owner in LIMITS}

    def num_choices(self, owner: str) -> int:
        return sum(len(prompts) for each, _, prompts in self.open if each == owner)

    @rule(owner=st.sampled_from("abc"), prompts=st.lists(st.integers(1, 9), min_size=1, max_size=4))
    def ask(self, owner: str, prompts: list[int]) -> None:
        limits, num_open, now_s = LIMITS[owner], self.num_choices(owner), self.clock.now_s()
        queued = sum(sum(each) for other, _, each in self.open if other == owner)
        most_choices = limits.concurrency or math.inf
        if num_open >= most_choices:
            with pytest.raises(OwnerLimited):
                self.limiter.enter(owner)
            return
        try:
            slot = self.limiter.enter(owner)
        except OwnerLimited:
            event(f"{owner} asked too often")
            self.refused_at_s[owner].append(now_s)
            return
        self.entered_at_s[owner].append(now_s)
        if num_open + len(prompts) > most_choices:
            with pytest.raises(RequestError if len(prompts) > most_choices else OwnerLimited):
                slot.resize(len(prompts))
            slot.release()
            return
        slot.resize(len(prompts))
        most_tokens = limits.queued_tokens or math.inf
        if queued + sum(prompts) > most_tokens:
            with pytest.raises(RequestError if sum(prompts) > most_tokens else OwnerLimited):
                slot.queue(prompts)
            slot.release()
            return
        slot.queue(prompts)
        self.open.append((owner, slot, list(prompts)))

    @rule(data=st.data(), ends=st.booleans())
    def get_on(self, data: st.DataObject, ends: bool) -> None:
        if not self.open:
            return
        owner, slot, prompts = data.draw(st.sampled_from(self.open))
        if ends:
            slot.on_choice_end(len(prompts) - 1)
            prompts.pop()
        else:
            slot.on_first_token(0)
            prompts[0] = 0
        if not prompts:
            slot.release()
            self.open.remove((owner, slot, prompts))

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.open:
            owner, slot, prompts = data.draw(st.sampled_from(self.open))
            self.open.remove((owner, slot, prompts))
            for _ in range(2):
                slot.release()

    @rule(seconds=st.floats(0.1, 40))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def none_has_more_than_it_may(self) -> None:
        for owner, limits in LIMITS.items():
            queued = sum(sum(prompts) for other, _, prompts in self.open if other == owner)
            assert self.num_choices(owner) <= (limits.concurrency or math.inf)
            assert queued <= (limits.queued_tokens or math.inf)
            if (most := limits.requests_per_minute) is not None:
                for first, at_s in enumerate(self.entered_at_s[owner]):
                    for number, later_s in enumerate(self.entered_at_s[owner][first:], start=1):
                        assert number <= most + (later_s - at_s) * most / 60 + 1e-3
            for refused_at_s in self.refused_at_s[owner]:
                last_minute = [at_s for at_s in self.entered_at_s[owner] if at_s > refused_at_s - 60]
                assert len(last_minute) >= (limits.requests_per_minute or math.inf) - 1, "it had some left"

    def teardown(self) -> None:
        for _, slot, _ in self.open:
            slot.release()
        self.clock.advance(60)
        for owner in LIMITS:
            self.limiter.enter(owner).release()
        self.clock.advance(60)
        for owner in LIMITS:
            self.limiter.leave(owner)
        assert not self.limiter._uses, "nothing is kept of those that have left"


TestLimiter = Limiter.TestCase


def test_who_asks_too_often_hears_when_to_come_back() -> None:
    limiter, clock = make_limiter(requests_per_minute=30)
    for _ in range(30):
        limiter.enter("a").release()
    with pytest.raises(OwnerLimited) as refused:
        limiter.enter("a")
    assert refused.value.retry_after_s == 2
    assert refused.value.headers == {
        "x-ratelimit-limit-requests": "30",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "60.000s",
    }
    limiter.enter("b").release()
    clock.advance(2.0)
    limiter.enter("a").release()
    with pytest.raises(OwnerLimited):
        limiter.enter("a")


def test_every_answer_says_how_many_requests_are_left() -> None:
    limiter, clock = make_limiter(requests_per_minute=30)
    for _ in range(30):
        slot = limiter.enter("a")
        slot.release()
    for seconds, left, reset in [(0.0, "0", "60.000s"), (20.0, "10", "40.000s"), (50.0, "30", "0.000s")]:
        clock.advance(seconds)
        assert slot.headers() == {
            "x-ratelimit-limit-requests": "30",
            "x-ratelimit-remaining-requests": left,
            "x-ratelimit-reset-requests": reset,
        }


def test_who_has_too_much_comes_back_at_the_rate_of_its_own_ends() -> None:
    limiter, clock = make_limiter(concurrency=4)
    slot = limiter.enter("a")
    slot.resize(4)
    slot.queue([1, 1, 1, 1])
    for choice in range(2):
        clock.advance(10.0)
        slot.on_choice_end(choice)
    others = [limiter.enter("a") for _ in range(2)]
    clock.advance(10.0)
    with pytest.raises(OwnerLimited) as refused:
        limiter.enter("a")
    assert refused.value.retry_after_s == 10  # 2 ended in the 20 s since the first did
    others[0].release()
    limiter.enter("a")


def test_what_can_never_be_let_in_is_an_error_of_the_request() -> None:
    limiter, _ = make_limiter(concurrency=4, queued_tokens=100)
    slot = limiter.enter("a")
    with pytest.raises(RequestError, match="at most 4 choices at once, got 5") as caught:
        slot.resize(5)
    assert caught.value.param == "n"
    with pytest.raises(RequestError, match="got 6 of 3 prompts") as caught:
        slot.resize(6, 3)
    assert caught.value.param == "prompt"
    with pytest.raises(RequestError, match="at most 100 prompt tokens at once, got 101"):
        slot.queue([101])
    slot.queue([60])
    assert slot.headers() == {"x-ratelimit-limit-tokens": "100", "x-ratelimit-remaining-tokens": "40"}
    with pytest.raises(OwnerLimited) as refused:
        limiter.enter("a").queue([60])
    assert refused.value.headers["x-ratelimit-remaining-tokens"] == "40"


def test_what_a_router_sends_was_counted_by_it_and_keeps_its_weight() -> None:
    limiter = OwnerLimiter(lambda _: OwnerLimits(1, 3, 1, weight=0.5), VirtualClock())
    slots = [limiter.enter("a", is_routed=True) for _ in range(5)]
    for slot in slots:
        slot.resize(4)
        slot.queue([100] * 4)
        assert slot.headers() == {}
    assert {slot.weight for slot in slots} == {0.5}
    for slot in slots:
        slot.release()
    assert not limiter._uses


def test_refusals_of_an_owner_that_asks_again_at_once_are_answered_later() -> None:
    clock = VirtualClock()
    limiter = OwnerLimiter(lambda _: OwnerLimits(), clock)
    assert max(limiter.refuse("flood") for _ in range(50)) == pytest.approx(0.0)
    waits_s = [limiter.refuse("flood") for _ in range(200)]
    assert waits_s[:2] == pytest.approx([0.02, 0.04])
    assert waits_s[-1] == 1.0
    assert limiter.refuse("other") == 0.0
    clock.advance(1.0)
    assert limiter.refuse("flood") == pytest.approx(0.02)
    clock.advance(10.0)
    limiter.enter("flood").release()
    limiter.enter("other").release()
    assert not limiter._uses
