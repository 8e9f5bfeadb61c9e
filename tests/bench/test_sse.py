from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from backfill.bench.client import SseDecoder

STREAM = (
    'data: {"a": "é"}\n\n: ping\n\ndata: two\r\n\r\nevent: x\ndata:three\ndata: lines\n\ndata: [DONE]\n\n'
)
EVENTS = ['{"a": "é"}', "two", "three\nlines", "[DONE]"]


@given(st.lists(st.integers(0, len(STREAM.encode())), max_size=12))
def test_any_cut_gives_the_same_events(cuts: list[int]) -> None:
    encoded, decoder, events = STREAM.encode(), SseDecoder(), []
    edges = [0, *sorted(cuts), len(encoded)]
    for start, end in itertools.pairwise(edges):
        events += decoder.feed(encoded[start:end])
    assert [event.decode() for event in events] == EVENTS
    assert decoder.finish() == []


def test_the_end_of_the_stream_ends_an_event() -> None:
    decoder = SseDecoder()
    assert decoder.feed(b"data: [DONE]") == []
    assert decoder.finish() == [b"[DONE]"]
