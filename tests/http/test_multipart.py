"""Multipart bodies: as clients send them, split anywhere, malformed, oversized."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backfill.core.errors import RequestError
from backfill.http.multipart import (
    MAX_FIELD_BYTES,
    MAX_OVERHEAD_BYTES,
    MAX_PARTS,
    FileStart,
    FormEvent,
    FormField,
    read_form,
)

BOUNDARY = "x-9f"
CONTENT_TYPE = f"multipart/form-data; boundary={BOUNDARY}"


def part(disposition: str, content: bytes) -> bytes:
    return b"--%s\r\nContent-Disposition: form-data; %s\r\n\r\n%s\r\n" % (
        BOUNDARY.encode(),
        disposition.encode(),
        content,
    )


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--%s--\r\n" % BOUNDARY.encode()


def read(body: bytes, cuts: Sequence[int] = (), content_type: str = CONTENT_TYPE) -> list[FormEvent]:
    """The events of a body that arrives split at ``cuts``."""
    edges = [0, *sorted(cuts), len(body)]

    async def chunks() -> AsyncIterator[bytes]:
        for start, end in itertools.pairwise(edges):
            yield body[start:end]

    async def collect() -> list[FormEvent]:
        return [event async for event in read_form(chunks(), content_type)]

    return asyncio.run(collect())


def with_chunks_joined(events: list[FormEvent]) -> list[FormEvent]:
    joined: list[FormEvent] = []
    for event in events:
        if isinstance(event, bytearray) and joined and isinstance(joined[-1], bytearray):
            joined[-1] += event
        else:
            joined.append(event)
    return joined


@given(
    content=st.binary(max_size=200)
    | st.lists(st.sampled_from([b"\r", b"\n", b"--", b"\r\n--x-9", b"\r\n--x-9f", b"a"]), max_size=20).map(
        b"".join
    ),
    data=st.data(),
)
def test_a_file_arrives_whole_however_its_body_is_cut(content: bytes, data: st.DataObject) -> None:
    for suffix in (b"\r\n", b"--", b" ", b"\t"):
        if b"\r\n--x-9f" + suffix in content + b"\r\n":
            return  # contains the boundary itself
    body = form(
        part('name="purpose"', b"batch"),
        part('name="file"; filename="a.jsonl"', content),
        part('name="note"', "größer".encode()),
    )
    cuts = data.draw(st.lists(st.integers(0, len(body)), max_size=8))
    expected: list[FormEvent] = [FormField("purpose", "batch"), FileStart("file", "a.jsonl")]
    expected += [content] if content else []
    assert with_chunks_joined(read(body, cuts)) == [*expected, FormField("note", "größer")]


def test_large_files_come_in_chunks_of_a_megabyte_or_a_little_more() -> None:
    content = bytes(range(256)) * 20_000
    body = form(part('name="file"; filename="a"', content))
    chunks = [event for event in read(body, range(0, len(body), 65536)) if isinstance(event, bytearray)]
    assert b"".join(chunks) == content
    assert all((1 << 20) <= len(chunk) <= (1 << 20) + 65536 for chunk in chunks[:-1])


FILE = part('name="file"; filename="a"', b"x" * (2 * MAX_OVERHEAD_BYTES))


@pytest.mark.parametrize(
    "body",
    [
        b"\r\n" * MAX_OVERHEAD_BYTES + form(FILE),
        form(FILE) + b"x" * MAX_OVERHEAD_BYTES,
        form(*[part(f'name="f"; x="{"y" * 2500}"', b"") for _ in range(30)], FILE),
        form(FILE, *[part(f'name="f{number}"', b"x" * MAX_FIELD_BYTES) for number in range(17)]),
    ],
    ids=["preamble", "epilogue", "headers", "fields"],
)
def test_bytes_besides_the_file_are_limited(body: bytes) -> None:
    for cuts in ([], range(0, len(body), 1000)):
        with pytest.raises(RequestError, match=f"more than {MAX_OVERHEAD_BYTES} bytes beside"):
            read(body, cuts)


def test_a_whole_file_may_arrive_at_once_with_some_epilogue() -> None:
    events = read(form(FILE, part('name="purpose"', b"batch")) + b"\r\n" * 1000)
    assert events[-1] == FormField("purpose", "batch")


def test_names_are_what_the_client_wrote() -> None:
    body = form(
        part('name="file"; filename="../ä b.jsonl"', b"x"),
        part('name="file"; filename=""', b""),
    )
    assert read(body)[0] == FileStart("file", "../ä b.jsonl")
    assert read(body)[2] == FileStart("file", "")


@pytest.mark.parametrize(
    "content_type",
    [
        "",
        "application/json",
        "multipart/form-data",
        "multipart/form-data; boundary=",
        "multipart/mixed; boundary=x",
    ],
)
def test_another_content_type_is_refused(content_type: str) -> None:
    with pytest.raises(RequestError, match="Content-Type"):
        read(b"", content_type=content_type)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "ends before"),
        (b"no form at all", "malformed"),
        (form(part('name="file"; filename="a"', b"x"))[:-6], "ends before"),
        (b"--x-9f\r\nContent-Type: text/plain\r\n\r\nx\r\n--x-9f--", "no name"),
        (b"--x-9f\r\nBad Header\r\n\r\nx\r\n--x-9f--", "malformed"),
        (form(part('name="purpose"', b"x" * (MAX_FIELD_BYTES + 1))), "over 4096 bytes"),
        (form(*[part('name="a"', b"")] * (MAX_PARTS + 1)), "more than 32 parts"),
        (b"--x-9f\r\nX: " + b"y" * 100_000 + b"\r\n\r\n", "malformed"),
    ],
)
def test_an_incomplete_or_malformed_form_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read(body)
    with pytest.raises(RequestError, match=message):
        read(body, range(len(body)))


def test_a_boundary_that_is_too_long_is_refused() -> None:
    with pytest.raises(RequestError, match="too long"):
        read(b"", content_type=f"multipart/form-data; boundary={'x' * 500}")


PIECES = [
    b"--x-9f",
    b"--x-9f--",
    b"\r\n",
    b"\n",
    b'Content-Disposition: form-data; name="a"',
    b'; filename="b"',
]
PIECES += [b"Content-Disposition:", b": ", b"\0", b"\xff", b"form-data", b"name=", b"a" * 5000]


@given(st.lists(st.sampled_from(PIECES) | st.binary(max_size=9), max_size=20), st.data())
def test_whatever_arrives_is_a_form_or_an_error_of_the_request(
    pieces: list[bytes], data: st.DataObject
) -> None:
    body = b"".join(pieces)
    cuts = data.draw(st.lists(st.integers(0, len(body)), max_size=4))
    try:
        events = read(body, cuts)
    except RequestError:
        return
    sizes = [len(each) if isinstance(each, bytearray) else len(each.name) for each in events]
    assert sum(sizes) <= len(body) and len(events) <= MAX_PARTS + len(cuts) + 1
