from __future__ import annotations

import asyncio

from backfill.preparation.turns import OwnerTurns


async def work(turns: OwnerTurns, owner: str, done: list[str]) -> None:
    async with turns.turn(owner):
        done.append(owner)


def test_who_stops_waiting_is_forgotten_and_the_next_owner_has_the_turn() -> None:
    async def run() -> None:
        turns, done = OwnerTurns(1), list[str]()
        async with turns.turn("first"):
            owners = ("flood", "flood", "gone", "other")
            waiting = [asyncio.create_task(work(turns, owner, done)) for owner in owners]
            await asyncio.sleep(0)
            for each in waiting[1:3]:
                each.cancel()
            await asyncio.wait(waiting[1:3])
            assert {owner: len(queue) for owner, queue in turns._waiting.items()} == {"flood": 1, "other": 1}
        await asyncio.gather(*waiting, return_exceptions=True)
        assert done == ["flood", "other"]

    asyncio.run(run())


def test_a_turn_that_comes_as_its_task_is_cancelled_goes_to_the_next() -> None:
    async def run() -> None:
        turns, done = OwnerTurns(1), list[str]()
        async with turns.turn("first"):
            gone, other = (asyncio.create_task(work(turns, owner, done)) for owner in ("gone", "other"))
            await asyncio.sleep(0)
            gone.cancel()  # it has not run when the turn ends
        await asyncio.gather(gone, other, return_exceptions=True)
        assert done == ["other"]
        assert not turns._waiting

    asyncio.run(run())
