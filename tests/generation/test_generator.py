from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Hashable, Sequence
from typing import Any

import pytest

from backfill.api.streaming import _with_keep_alives
from backfill.core.errors import EngineDead
from backfill.core.request import FinishReason, Request
from backfill.engine.messages import TokenOutput
from backfill.generation.generator import Observer, TextDelta, TextGenerator, merge
from tests.protocol.builders import make_generation


class EndedTokens:
    """An engine's client where every request ends with its first token."""

    def __init__(self) -> None:
        self.groups: list[Hashable] = []

    async def generate(
        self, request: Request, *, group: Hashable, **callbacks: object
    ) -> AsyncGenerator[TokenOutput, None]:
        self.groups.append(group)
        yield TokenOutput(request.request_id, 7, finish_reason=FinishReason.STOP)


class NoText:
    """A tokenizer that decodes to empty text."""

    is_byte_level = True

    def decode(self, token_ids: Sequence[int], **options: object) -> str:
        return ""


def test_the_choices_of_one_request_are_one_group_and_no_other_request_is_in_it() -> None:
    client: Any = EndedTokens()
    tokenizer: Any = NoText()
    generator = TextGenerator(client, tokenizer, Observer())

    async def run() -> None:
        for _ in range(2):  # a client may send both with the same id
            async for _ in generator.stream(make_generation(num_choices=3).request, arrived_at_s=0.0):
                pass

    asyncio.run(run())
    first, second = (set(client.groups[at : at + 3]) for at in (0, 3))
    assert len(client.groups) == 6
    assert len(first) == len(second) == 1
    assert None not in first
    assert first != second


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
def test_an_error_in_one_stream_closes_all_and_is_raised(error: Exception) -> None:
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
