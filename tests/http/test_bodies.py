from __future__ import annotations

import asyncio

import pytest
from fastapi import Request

from backfill.http.bodies import SMALL_BODY_BYTES, BodyBudget, json_body
from backfill.http.errors import OfflineUnavailable, Unavailable

MIB = 1 << 20


class NotingPart(bytes):
    num_alive = 0

    def __init__(self, *_: object) -> None:
        NotingPart.num_alive += 1

    def __del__(self) -> None:
        NotingPart.num_alive -= 1


def test_a_body_is_held_once() -> None:
    async def receive() -> dict[str, object]:
        left.pop()
        return {"type": "http.request", "body": NotingPart(b"x" * 100), "more_body": bool(left)}

    async def run() -> None:
        headers = [(b"content-type", b"application/json")]
        request = Request({"type": "http", "method": "POST", "headers": headers, "state": {}}, receive)
        async with json_body(request, BodyBudget(1000, 1000), 1000) as body:
            assert (body.raw, body.num_bytes) == (b"x" * 500, 500)
            assert NotingPart.num_alive == 0

    left = list(range(5))
    asyncio.run(run())


def test_bodies_share_the_budget_until_they_are_done() -> None:
    budget = BodyBudget(100, 100)
    with budget.hold("a") as one, budget.hold("a") as two:
        one.add(60)
        two.add(40)
        with pytest.raises(Unavailable):
            two.add(1)
        assert budget.all.total == 100
    assert budget.all.total == 0


def test_a_failed_body_releases_its_bytes() -> None:
    budget = BodyBudget(10, 10)

    def fail() -> None:
        with budget.hold("a") as held:
            held.add(10)
            held.add(1)

    with pytest.raises(Unavailable):
        fail()
    assert budget.all.total == 0


def test_offline_bodies_hold_at_most_a_quarter() -> None:
    budget = BodyBudget(16 * MIB, MIB)
    with budget.hold("a") as offline, budget.hold("a") as refused, budget.hold("a") as online:
        offline.add(4 * MIB)
        offline.mark_offline()
        refused.add(1)
        with pytest.raises(OfflineUnavailable):
            refused.mark_offline()
        online.add(11 * MIB - 1)
    assert (budget.all.total, budget.offline.total) == (0, 0)
    with budget.hold("a") as offline:
        offline.add(MIB)
        offline.mark_offline()


def test_small_bodies_are_accepted_when_large_ones_fill_their_part() -> None:
    budget = BodyBudget(16 * MIB, MIB)
    with budget.hold("a") as large, budget.hold("a") as small:
        large.add(15 * MIB)
        with pytest.raises(Unavailable):
            large.add(1)
        small.add(SMALL_BODY_BYTES)
        with pytest.raises(Unavailable):
            small.add(1)
        assert budget.all.total == 15 * MIB + SMALL_BODY_BYTES


def test_a_budget_of_one_body_fits_one_of_either_class() -> None:
    budget = BodyBudget(MIB, MIB)
    for _ in range(2):
        with budget.hold("a") as held:
            held.add(MIB)
            held.mark_offline()


def test_large_bodies_of_one_owner_leave_another_its_even_part() -> None:
    budget = BodyBudget(16 * MIB, MIB)
    with budget.hold("flood") as flood, budget.hold("other") as other:
        flood.add(15 * MIB)
        other.add(8 * MIB)
        with pytest.raises(Unavailable):
            other.add(1)
        with pytest.raises(Unavailable):
            flood.add(1)
        assert budget.all.total == 23 * MIB
    assert budget.all.total == 0


def test_offline_bodies_of_one_owner_leave_another_its_even_part() -> None:
    budget = BodyBudget(16 * MIB, MIB)
    with budget.hold("flood") as flood, budget.hold("other") as other, budget.hold("other") as more:
        flood.add(4 * MIB)
        flood.mark_offline()
        other.add(2 * MIB)
        other.mark_offline()
        more.add(1)
        with pytest.raises(OfflineUnavailable):
            more.mark_offline()
