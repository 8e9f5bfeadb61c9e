"""Ranges of a download, and the responses for errors of the job store."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from backfill.http.downloads import DownloadResponse, parse_range
from backfill.http.errors import error_response
from backfill.jobs.blobs import CHUNK_BYTES, Download, StoredFile
from backfill.jobs.errors import StorageFull, TooMany
from backfill.jobs.threads import ThreadPool

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

        opened = await Download.open(lambda: file, ThreadPool("downloads", 1))
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
