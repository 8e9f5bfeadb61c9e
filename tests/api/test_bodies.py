from __future__ import annotations

import asyncio

import pytest
from fastapi import Request

from backfill.api.bodies import json_body, peek
from backfill.api.body_budget import BodyBudget
from backfill.core.request import ServiceClass

ONLINE, OFFLINE = ServiceClass.ONLINE, ServiceClass.OFFLINE


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b'{"prompt": "a"}', (ONLINE, 1)),
        (b'{"n": 5, "service_tier": "flex", "messages": [{}]}', (OFFLINE, 5)),
        (b'{"n": null, "service_tier": null}', (ONLINE, 1)),
        (b'{"service_tier": "auto", "n": 3}', (ONLINE, 3)),
        (b'{"n": 100000}', (ONLINE, 128)),
        (b'{"n": ' + b"9" * 5000 + b"}", (ONLINE, 128)),
        (b'{"n": -2}', (ONLINE, 1)),
        (b'{"n": 1.5, "service_tier": 7}', (ONLINE, 1)),
        (b'{"n": 0}', (ONLINE, 1)),
        (b'{"n": 4', (ONLINE, 1)),
        (b"[]", (ONLINE, 1)),
        (b"", (ONLINE, 1)),
        (b"\xff", (ONLINE, 1)),
        (b'{"a": ' + b"[" * 100_000, (ONLINE, 1)),
    ],
    ids=lambda value: str(value)[:30],
)
def test_class_and_choices_are_read_without_parsing(raw: bytes, expected: tuple[ServiceClass, int]) -> None:
    assert peek(raw) == expected


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
            assert (body.raw, body.held.num_bytes) == (b"x" * 500, 500)
            assert NotingPart.num_alive == 0

    left = list(range(5))
    asyncio.run(run())
