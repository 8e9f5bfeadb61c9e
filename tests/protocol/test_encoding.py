from __future__ import annotations

import json

import pytest

from backfill.protocol.encoding import EncodedBody, EncodedList


def encoded_list(entries: list[object], group: int) -> EncodedList:
    encoded = EncodedList()
    for start in range(0, len(entries), group):
        encoded.extend(entries[start : start + group])
    return encoded


def test_a_body_with_encoded_lists_is_the_body_with_those_lists() -> None:
    entries: list[object] = [{"token": 'a\0"\n', "bytes": [0, 34], "logprob": -0.1}, None, 1e-9, "é", [[]]]
    plain = {
        "id": "x\0y",
        "choices": [{"logprobs": {"content": entries}}, {"logprobs": None}],
        "end": [entries],
    }
    body = {
        "id": "x\0y",
        "choices": [{"logprobs": {"content": encoded_list(entries, 1)}}, {"logprobs": None}],
        "end": [encoded_list(entries, 3)],
    }
    encoded = EncodedBody(body)
    assert json.loads(bytes(encoded)) == plain
    assert b"".join(encoded.chunks()) == bytes(encoded)
    assert encoded.num_bytes == len(bytes(encoded))
    assert bytes(EncodedBody({"a": EncodedList()})) == b'{"a":[]}'


def test_a_long_body_comes_in_chunks() -> None:
    entries: list[object] = ["x" * 1000] * 2000
    chunks = list(EncodedBody({"a": encoded_list(entries, 1), "b": encoded_list(entries, 2)}).chunks())
    assert max(map(len, chunks)) < 300_000
    assert json.loads(b"".join(chunks)) == {"a": entries, "b": entries}
    with pytest.raises(TypeError):
        EncodedBody({"a": object()})
