from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from backfill.api.streaming import _with_keep_alives
from backfill.core.errors import EngineDead
from backfill.generation.generator import TextDelta, merge


async def deltas(
    texts: list[str], closed: list[str], error: BaseException | None = None
) -> AsyncGenerator[TextDelta, None]:
    try:
        for text in texts:
            await asyncio.sleep(0)
            yield TextDelta(text, 0, None)
        if error is not None:
            raise error
        if not texts:
            await asyncio.Event().wait()
    finally:
        closed.append("".join(texts))


def test_streams_interleave_and_keep_their_order() -> None:
    async def run() -> list[tuple[int, str]]:
        streams = [deltas(["a", "b"], []), deltas(["c"], []), deltas(["d", "e", "f"], [])]
        return [(index, delta.text) async for index, delta in merge(streams)]

    arrived = asyncio.run(run())
    joined = ["".join(text for i, text in arrived if i == index) for index in range(3)]
    assert joined == ["ab", "c", "def"]


@pytest.mark.parametrize("error", [EngineDead("gone"), ValueError("bug")])
def test_an_error_in_one_stream_closes_all_and_goes_on(error: Exception) -> None:
    closed: list[str] = []

    async def run() -> None:
        async for _ in merge([deltas([], closed), deltas(["x"], closed, error)]):
            pass

    with pytest.raises(type(error)):
        asyncio.run(asyncio.wait_for(run(), 60))
    assert sorted(closed) == ["", "x"]


def test_a_cancelled_stream_does_not_leave_the_others_waiting() -> None:
    async def run() -> None:
        async for _ in merge([deltas([], []), deltas(["x"], [], asyncio.CancelledError())]):
            pass

    with pytest.raises(EngineDead):
        asyncio.run(asyncio.wait_for(run(), 60))


def test_closing_early_closes_every_stream() -> None:
    closed: list[str] = []

    async def run() -> None:
        merged = merge([deltas(["a", "b"], closed), deltas([], closed)])
        await anext(merged)
        await merged.aclose()

    asyncio.run(run())
    assert sorted(closed) == ["", "ab"]


def test_pauses_are_filled_and_an_early_end_is_clean() -> None:
    async def slow() -> AsyncGenerator[list[dict[str, object]], None]:
        yield [{"n": 1}]
        await asyncio.sleep(0.2)
        yield [{"n": 2}]

    async def run() -> list[object]:
        return [item async for item in _with_keep_alives(slow(), 0.05)]

    async def leave_during_a_pause() -> None:
        inner = slow()
        paced = _with_keep_alives(inner, 0.02)
        await anext(paced)
        assert await anext(paced) is None
        await paced.aclose()
        await inner.aclose()

    items = asyncio.run(run())
    assert items[0] == [{"n": 1}]
    assert items[-1] == [{"n": 2}]
    assert None in items
    asyncio.run(leave_during_a_pause())
