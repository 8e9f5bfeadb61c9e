"""Parts of responses: bodies, streams, downloads."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from fastapi import Request

from backfill.http.bodies import SMALL_BODY_BYTES, BodyBudget, json_body
from backfill.http.downloads import DownloadResponse, parse_range
from backfill.http.error_responses import error_response
from backfill.http.errors import OfflineUnavailable, Unavailable
from backfill.http.server import default_max_connections, raise_open_files_limit
from backfill.http.streaming import WholeResponse
from backfill.jobs.blobs import CHUNK_BYTES, Download, StoredFile
from backfill.jobs.errors import StorageFull, TooMany
from backfill.jobs.threads import ThreadPool
from backfill.protocol.encoding import EncodedList

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


CONTENT = bytes(range(256)) * 10


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ("bytes=0-0", (0, 1)),
        ("bytes=5-", (5, 100)),
        ("bytes=90-200", (90, 100)),
        ("bytes=-7", (93, 100)),
        ("bytes=-200", (0, 100)),
        ("bytes=100-", (100, 100)),
        ("bytes=999-1000", (100, 100)),
        ("bytes=7-6", None),
        ("bytes=-", None),
        ("bytes=0-1,3-4", None),
        ("lines=0-1", None),
        ("bytes=" + "9" * 5000 + "-", None),
    ],
)
def test_ranges(header: str, found: tuple[int, int] | None) -> None:
    assert parse_range(header, 100) == found


def download(
    byte_range: str | None = None, *, content: bytes = CONTENT, leaves_after: int | None = None
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body; the client disconnects after ``leaves_after`` chunks."""
    file = StoredFile(len(content), lambda start, size: content[start : start + size], lambda: None)

    async def run() -> list[Any]:
        messages: list[Any] = []
        left = asyncio.Event()

        async def receive() -> Any:
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            messages.append(message)
            if len(messages) - 1 == leaves_after:
                left.set()
            await asyncio.sleep(0)

        opened = Download(file, ThreadPool("downloads", 1))
        await DownloadResponse(opened, "a b.jsonl", byte_range)({"type": "http"}, receive, send)
        return messages

    head, *rest = asyncio.run(run())
    headers = {name.decode(): value.decode() for name, value in head["headers"]}
    return head["status"], headers, b"".join(message["body"] for message in rest)


def test_a_whole_file() -> None:
    status, headers, body = download()
    assert (status, body) == (200, CONTENT)
    assert headers["content-length"] == str(len(CONTENT))
    assert headers["content-type"] == "application/octet-stream"
    assert headers["content-disposition"] == "attachment; filename*=utf-8''a%20b.jsonl"


def test_a_part_of_a_file() -> None:
    status, headers, body = download("bytes=250-259")
    assert (status, body) == (206, CONTENT[250:260])
    assert (headers["content-range"], headers["content-length"]) == ("bytes 250-259/2560", "10")


def test_a_range_beyond_the_file() -> None:
    status, headers, body = download("bytes=2560-")
    assert (status, body) == (416, b"")
    assert headers["content-range"] == "bytes */2560"


def test_no_more_is_read_for_a_client_that_has_left() -> None:
    _, _, body = download(content=bytes(5 * CHUNK_BYTES), leaves_after=2)
    assert len(body) == 2 * CHUNK_BYTES


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [(TooMany("full"), 429, "rate_limit_error"), (StorageFull("full"), 507, "server_error")],
)
def test_errors_without_a_quick_retry(error: Exception, status: int, kind: str) -> None:
    response = error_response(error)
    assert response.status_code == status
    assert response.headers["x-should-retry"] == "false"
    assert json.loads(bytes(response.body))["error"]["type"] == kind


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


def test_the_soft_limit_becomes_the_hard_one() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard, 300), hard))
        raised = raise_open_files_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == raised
        assert hard in (raised, resource.RLIM_INFINITY)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_connections_leave_descriptors_for_the_rest() -> None:
    assert default_max_connections(1024) == 768
    assert default_max_connections(1 << 20) == 8192
    assert default_max_connections(1) == 1
