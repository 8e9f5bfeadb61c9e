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
        request = Request({"type": "http", "method": "POST", "headers": headers}, receive)
        async with json_body(request, BodyBudget(1000, 1000), 1000) as body:
            assert (body.raw, body.num_bytes) == (b"x" * 500, 500)
            assert NotingPart.num_alive == 0

    left = list(range(5))
    asyncio.run(run())


def test_bodies_share_the_budget_until_they_are_done() -> None:
    budget = BodyBudget(100, 100)
    with budget.hold() as one, budget.hold() as two:
        one.add(60)
        two.add(40)
        with pytest.raises(Unavailable):
            two.add(1)
        assert budget.num_bytes == 100
    assert budget.num_bytes == 0


def test_a_failed_body_releases_its_bytes() -> None:
    budget = BodyBudget(10, 10)

    def fail() -> None:
        with budget.hold() as held:
            held.add(10)
            held.add(1)

    with pytest.raises(Unavailable):
        fail()
    assert budget.num_bytes == 0


def test_offline_bodies_hold_at_most_a_quarter() -> None:
    budget = BodyBudget(16 * MIB, MIB)
    with budget.hold() as offline, budget.hold() as refused, budget.hold() as online:
        offline.add(4 * MIB)
        offline.mark_offline()
        refused.add(1)
        with pytest.raises(OfflineUnavailable):
            refused.mark_offline()
        online.add(11 * MIB - 1)
    assert (budget.num_bytes, budget.num_offline_bytes) == (0, 0)
    with budget.hold() as offline:
        offline.add(MIB)
        offline.mark_offline()


def test_small_bodies_are_accepted_when_large_ones_fill_their_part() -> None:
    budget = BodyBudget(16 * MIB, MIB)
    with budget.hold() as large, budget.hold() as small:
        large.add(15 * MIB)
        with pytest.raises(Unavailable):
            large.add(1)
        small.add(SMALL_BODY_BYTES)
        with pytest.raises(Unavailable):
            small.add(1)
        assert budget.num_bytes == 15 * MIB + SMALL_BODY_BYTES


def test_a_budget_of_one_body_fits_one_of_either_class() -> None:
    budget = BodyBudget(MIB, MIB)
    for _ in range(2):
        with budget.hold() as held:
            held.add(MIB)
            held.mark_offline()
