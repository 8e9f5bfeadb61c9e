from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from backfill.http.streaming import WholeResponse
from backfill.protocol.encoding import EncodedList


async def still_connected() -> dict[str, object]:
    await asyncio.Event().wait()
    raise AssertionError


def sent_by(body: dict[str, object], on_end: Callable[[], None] = lambda: None) -> list[dict[str, Any]]:
    async def work() -> dict[str, object]:
        return body

    async def send(message: Any) -> None:
        sent.append(message)

    sent: list[dict[str, Any]] = []
    asyncio.run(WholeResponse(work(), on_end)({"type": "http"}, still_connected, send))
    return sent


@pytest.mark.parametrize("value", ["\ud83d", object()])
def test_a_body_that_cannot_be_encoded_is_an_error_of_the_server(value: object) -> None:
    ends: list[None] = []
    start, message = sent_by({"id": "r", "content": value}, lambda: ends.append(None))
    assert start["status"] == 500 and len(ends) == 1
    assert msgspec.json.decode(message["body"])["error"]["type"] == "server_error"


@pytest.mark.parametrize(("num_entries", "least", "most"), [(3, 1, 1), (3000, 8, 20)])
def test_a_long_answer_is_written_in_chunks_and_a_short_one_at_once(
    num_entries: int, least: int, most: int
) -> None:
    entries = ["x" * 1000] * num_entries
    encoded = EncodedList()
    for entry in entries:
        encoded.extend([entry])
    start, *messages = sent_by({"id": "r", "content": encoded})
    assert least <= len(messages) <= most
    assert [message["more_body"] for message in messages] == [True] * (len(messages) - 1) + [False]
    data = b"".join(message["body"] for message in messages)
    assert dict(start["headers"])[b"content-length"] == str(len(data)).encode()
    assert msgspec.json.decode(data) == {"id": "r", "content": entries}
