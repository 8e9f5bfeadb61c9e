from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Hashable, Sequence
from typing import Any
from unittest.mock import Mock

import pytest

from backfill.core.errors import BackfillError, EngineDead
from backfill.core.request import FinishReason, Request
from backfill.engine.messages import TokenOutput
from backfill.generation.generator import TextDelta, TextGenerator, merge
from backfill.generation.timeline import Observer, RequestRecord
from backfill.http.streaming import _with_keep_alives
from tests.api.test_fields import OK, make_tokenizer
from tests.engine.loaders import load_slow
from tests.engine.test_client import started
from tests.protocol.builders import make_generation


class ScriptedTokens:
    """An engine's client that yields the outputs of its script."""

    def __init__(self, script: Sequence[dict[str, Any]]) -> None:
        self.script = script
        self.requests: list[Request] = []
        self.groups: list[Hashable] = []

    async def generate(
        self, request: Request, *, group: Hashable, **_: object
    ) -> AsyncGenerator[TokenOutput, None]:
        self.requests.append(request)
        self.groups.append(group)
        for output in self.script:
            yield TokenOutput(**{"request_id": request.request_id, "token_id": OK, **output})


def run_script(
    script: Sequence[dict[str, Any]], **fields: Any
) -> tuple[list[TextDelta], RequestRecord, Request]:
    """The deltas of a request whose engine outputs are ``script``. ``fields``: of the GenerationRequest."""
    client: Any = ScriptedTokens(script)
    observer = Mock(Observer)
    generator = TextGenerator(client, make_tokenizer(), observer)

    async def run() -> list[TextDelta]:
        found = []
        with contextlib.suppress(BackfillError):
            async for _, delta in generator.stream(make_generation(**fields).request):
                found.append(delta)
        return found

    arrived = asyncio.run(run())
    (record,), (request,) = observer.on_finished.call_args.args, client.requests
    return arrived, record, request


LAST = [{"finish_reason": FinishReason.STOP}]


def test_the_choices_of_one_request_are_one_group_and_no_other_request_is_in_it() -> None:
    client: Any = ScriptedTokens(LAST)
    generator = TextGenerator(client, make_tokenizer(), Observer())

    async def run() -> None:
        for _ in range(2):  # a client may send both with the same id
            async for _ in generator.stream(make_generation(num_choices=3).request):
                pass

    asyncio.run(run())
    first, second = (set(client.groups[at : at + 3]) for at in (0, 3))
    assert len(client.groups) == 6 and len(first) == len(second) == 1
    assert None not in first and first != second


def test_a_listener_hears_how_far_a_long_prompt_is() -> None:
    class Listener:
        def __init__(self) -> None:
            self.heard: list[tuple[str, int] | tuple[str, int, int]] = []

        def on_prompt_progress(self, choice: int, num_computed_tokens: int) -> None:
            self.heard.append(("progress", choice, num_computed_tokens))

        def on_first_token(self, choice: int) -> None:
            self.heard.append(("first", choice))

        def on_choice_end(self, choice: int) -> None:
            self.heard.append(("end", choice))

    async def run() -> list[tuple[str, int] | tuple[str, int, int]]:
        listener = Listener()
        async with started(load_slow) as client:
            generator = TextGenerator(client, make_tokenizer(), Observer())
            request = make_generation(prompts=[[5] * 5000]).request
            async for _ in generator.stream(request, listener=listener):
                pass
        return listener.heard

    heard = [("progress", 0, 2048), ("progress", 0, 4096), ("first", 0), ("end", 0)]
    assert asyncio.run(run()) == heard


def test_an_engine_request_carries_owner_and_salt() -> None:
    request = run_script(LAST, owner="alice", cache_salt="salt")[2]
    assert (request.owner, request.cache_salt) == ("alice", "salt")
    assert "alice" not in repr(request) and "salt'" not in repr(request)
    plain = run_script(LAST)[2]
    assert (plain.owner, plain.cache_salt) == ("", "")


def test_cached_tokens_are_those_of_the_first_and_the_last_output() -> None:
    first = {"num_cached_tokens": 48, "num_preemptions": 1, "first_scheduled_at_s": 0.5}
    pauses = ((0.5, 0.75), (1.0, 2.0))
    last = {
        "num_cached_tokens": 32,
        "num_preemptions": 3,
        "pauses": pauses,
        "finish_reason": FinishReason.LENGTH,
    }
    arrived, record, _ = run_script([first, {}, {}, last])
    assert [delta.num_cached_tokens for delta in arrived] == [48, 48, 48, 32]
    assert (record.num_cached_tokens, record.num_preemptions, record.first_scheduled_at_s) == (32, 3, 0.5)
    assert record.pauses == pauses


def test_what_the_first_output_said_holds_if_there_is_no_whole_last_one() -> None:
    first = {"num_cached_tokens": 48, "num_preemptions": 1}
    failure = {"token_id": None, "finish_reason": FinishReason.ERROR, "message": "No."}
    arrived, record, _ = run_script([first, {}, failure])
    assert len(arrived) == 2
    assert (record.num_cached_tokens, record.num_preemptions) == (48, 1)
    assert record.finish_reason is FinishReason.ERROR


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


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (EngineDead("gone"), EngineDead),
        (ValueError("bug"), ValueError),
        (asyncio.CancelledError(), EngineDead),
    ],
)
def test_an_error_in_one_stream_closes_all_and_is_raised(error: BaseException, raised: type) -> None:
    closed: list[str] = []

    async def run() -> None:
        async for _ in merge([deltas([], closed), deltas(["x"], closed, error)]):
            pass

    with pytest.raises(raised):
        asyncio.run(asyncio.wait_for(run(), 60))
    assert sorted(closed) == ["", "x"]


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
