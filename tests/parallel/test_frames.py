"""What comes over the connections between a driver and its ranks, as nobody sends it."""

from __future__ import annotations

import socket
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backfill.core.block import BlockRef
from backfill.core.errors import ExecutorDead
from backfill.core.plan import AdmittedRequest, Compute, ScheduledSlice, StepPlan
from backfill.core.request import RequestId
from backfill.core.sampling import SamplingParams
from backfill.parallel.messages import (
    MAX_FRAME_BYTES,
    FrameReader,
    FromRank,
    Moved,
    RunPlan,
    StepDone,
    StepRaised,
    ToRank,
    encode_frame,
)
from backfill.parallel.plan_codec import BadMessage, PlanDecoder, PlanEncoder, Sampled
from backfill.parallel.ranks import Ranks

MOST_ALLOCATED = 1 << 20  # of what has at most some hundred bytes
A, B = RequestId("a"), RequestId("b")


def plans() -> list[bytes]:
    encoder = PlanEncoder()
    slices = (
        ScheduledSlice(A, 0, 3, (BlockRef(1), BlockRef(2)), True, True),
        ScheduledSlice(B, 4, 1, (BlockRef(9),), True, False),
    )
    admitted = (AdmittedRequest(A, (1, 2, 3), SamplingParams(max_tokens=4)),)
    return [
        encoder.encode(StepPlan(1, Compute(slices), admitted), Sampled()),
        encoder.encode(StepPlan(2, Compute(slices), released=(B,)), Sampled((A, B), (5, 6))),
    ]


PLANS = plans()
FRAMES = [
    encode_frame(message)
    for message in (RunPlan(PLANS[0]), StepDone(1, (5, 6)), StepRaised(1, "no"), Moved(bytes(24)))
]
# Of MessagePack: long arrays, maps, strings and bytes that do not follow.
ANNOUNCED = [head + b"\xff" * 4 for head in (b"\xdd", b"\xdf", b"\xdb", b"\xc6")]


@st.composite
def changed(draw: st.DrawFn, known: list[bytes]) -> bytes:
    """Bytes of what is sent, some of them replaced, left out or added."""
    data = draw(st.sampled_from(known))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        instead = draw(st.binary(max_size=6) | st.sampled_from(ANNOUNCED))
        data = data[:at] + instead + data[at + draw(st.integers(0, 6)) :]
    return data


@contextmanager
def little_memory() -> Iterator[None]:
    """What is allocated in it, of which nothing is traced outside: that is slow."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MOST_ALLOCATED
    finally:
        tracemalloc.stop()


@given(st.lists(changed(PLANS) | st.binary(max_size=40), min_size=1, max_size=3))
def test_whatever_comes_is_a_plan_or_an_error_of_who_sent_it(messages: list[bytes]) -> None:
    decoder = PlanDecoder()
    with little_memory(), suppress(BadMessage):
        for data in messages:
            plan, _ = decoder.decode(data)
            assert isinstance(plan, StepPlan)


@pytest.mark.parametrize("kind", [FromRank, ToRank])
@given(data=st.lists(changed(FRAMES) | st.binary(max_size=40), max_size=3).map(b"".join))
def test_whatever_comes_is_a_message_or_an_error_of_who_sent_it(kind: object, data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        frames: FrameReader[FromRank | ToRank] = FrameReader(ours, kind)
        with little_memory(), suppress(BadMessage):
            while (messages := frames.take()) is not None:
                assert all(isinstance(message, kind) for message in messages)  # type: ignore[arg-type]


def test_a_message_that_is_too_long_is_refused_before_it_has_come() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(struct.pack("<I", MAX_FRAME_BYTES + 1))
        frames: FrameReader[FromRank] = FrameReader(ours, FromRank)
        with pytest.raises(BadMessage, match="announces"):
            frames.take()


class OneRank(Ranks):
    def __init__(self, link: socket.socket) -> None:
        super().__init__(1)
        self._add(0, link)

    def stop(self, step: int) -> None:
        raise AssertionError

    def _send(self, plan: bytes) -> None:
        raise AssertionError

    def _how_it_ended(self, rank: int) -> str:
        return "it has ended"


@pytest.mark.parametrize("data", [b"\x01\0\0\0\xc1", encode_frame(Moved(bytes(7))), b"\xff" * 4])
def test_a_rank_that_sends_no_message_ends_the_executor(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    ranks = OneRank(ours)
    with theirs:
        theirs.sendall(data)
        for _ in range(2):  # and stays so
            with pytest.raises(ExecutorDead, match="rank 0 of 1 has sent no message"):
                ranks.check()
