"""Hidden states from one stage to the next."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from backfill.execution.collectives import Handover, PeerFailed, StageLink, Stop
from backfill.models.decoder import HiddenState
from backfill.parallel.shared_memory import create_memory, map_memory
from backfill.parallel.sockets import KEY_BYTES, accept, address_of, connect_to, listen
from backfill.parallel.stage_links import NUM_MESSAGES, NUM_VALUES, RowShape, SharedMemoryLink, SocketLink
from backfill.parallel.torch_group import TorchLink, create_process_group
from tests.parallel.test_groups import unseen

CPU = torch.device("cpu")
SHAPE = RowShape(6, 5, torch.float32)
Links = tuple[StageLink, StageLink]


def shared_memory_links() -> Links:
    fd = create_memory(SharedMemoryLink.num_bytes(SHAPE))
    ends = [SharedMemoryLink(map_memory(fd), SHAPE, unseen(), sends=sends) for sends in (True, False)]
    os.close(fd)
    return ends[0], ends[1]


def gloo_links() -> Links:
    store = dist.HashStore()  # type: ignore[attr-defined]

    def make(end: int) -> StageLink:
        group = create_process_group(store, "link", end, 2, CPU)
        return TorchLink(group, group, SHAPE, CPU, unseen())

    with ThreadPoolExecutor(2) as threads:
        sender, receiver = threads.map(make, range(2))
    return sender, receiver


def socket_links(
    sender_ahead_s: float = 0.0, receiver_ahead_s: float = 0.0, shape: RowShape = SHAPE
) -> Links:
    key = bytes(KEY_BYTES)
    with listen("127.0.0.1") as listener, ThreadPoolExecutor(1) as thread:
        accepting = thread.submit(accept, listener, key, 60.0)
        connection = connect_to(address_of(listener), key, 60.0)
        receiver = SocketLink(accepting.result(), shape, unseen(), receiver_ahead_s)
    return SocketLink(connection, shape, unseen(), sender_ahead_s), receiver


def message(number: int) -> tuple[int, Handover | None]:
    if number % 4 == 3:
        return number, None
    rows = torch.full((1 + number % 6, 5), float(number))
    stop = Stop(6, 1e9 + number / 8) if number % 2 else None
    return number, Handover(12, stop, HiddenState(rows, rows + 0.5 if number % 3 else None))


def assert_same(found: tuple[int, Handover | None], number: int) -> None:
    _, sent = message(number)
    _, received = found
    assert found[0] == number and (received is None) == (sent is None)
    if received is not None and sent is not None:
        assert received._replace(state=None) == sent._replace(state=None)
    rows, expected = SHAPE.rows_of(received), SHAPE.rows_of(sent)
    assert len(rows) == len(expected) and all(map(torch.equal, rows, expected))


@pytest.mark.parametrize("make", [shared_memory_links, gloo_links, socket_links])
def test_messages_arrive_in_order_and_the_sender_may_be_ahead(make: Callable[[], Links]) -> None:
    sender, receiver = make()
    num_messages, begins = 20, threading.Event()

    def send() -> None:
        for number in range(num_messages):
            _, handover = message(number)
            sender.send(number, handover)
            if handover is not None and handover.state is not None:
                handover.state.residual.fill_(-1.0)  # the sender may change what it has sent
            if number == NUM_MESSAGES - 1:
                begins.set()

    thread = threading.Thread(target=send)
    thread.start()
    assert begins.wait(60)  # nothing was received until then
    for number in range(num_messages):
        assert_same(receiver.receive(), number)
    thread.join(60)
    assert not thread.is_alive()
    sender.close()
    receiver.close()


def test_a_full_queue_blocks_the_sender_until_a_message_is_taken() -> None:
    sender, receiver = shared_memory_links()
    for number in range(NUM_MESSAGES):
        sender.send(*message(number))
    thread = threading.Thread(target=sender.send, args=message(NUM_MESSAGES))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    assert_same(receiver.receive(), 0)
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("make", [shared_memory_links, socket_links])
def test_the_sender_closes_while_the_receiver_waits(make: Callable[[], Links]) -> None:
    sender, receiver = make()
    closing = threading.Timer(0.05, sender.close)
    closing.start()
    with pytest.raises(PeerFailed, match="previous stage"):
        receiver.receive()
    closing.join()
    receiver.close()


def test_what_the_next_stage_does_not_read_is_sent_beside() -> None:
    """More than the kernel takes: the sender goes on until two messages wait."""
    sender, receiver = socket_links(shape=RowShape(1 << 16, 5, torch.float32))
    states = [HiddenState(torch.full((1 << 16, 5), float(number)), None) for number in range(12)]

    def send() -> None:
        for number, state in enumerate(states):
            sender.send(number, Handover(1, state=state))

    thread = threading.Thread(target=send)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    for number, expected in enumerate(states):
        found, handover = receiver.receive()
        assert found == number and handover is not None and handover.state is not None
        assert torch.equal(handover.state.residual, expected.residual)
    thread.join(60)
    assert not thread.is_alive()
    sender.close()
    receiver.close()


@pytest.mark.parametrize("make", [shared_memory_links, socket_links])
def test_a_sender_learns_that_the_next_stage_has_ended(make: Callable[[], Links]) -> None:
    sender, receiver = make()
    receiver.close()

    def send() -> None:
        for _ in range(1000):  # the kernel takes the first ones
            sender.send(*message(0))

    with pytest.raises(PeerFailed, match="next stage"):
        send()
    sender.close()


def test_times_of_stops_are_those_of_the_nodes_clock() -> None:
    sender, receiver = socket_links(100.0, -50.0)
    sender.send(0, Handover(12, Stop(6, 7.0)))
    assert receiver.receive() == (0, Handover(12, Stop(6, 157.0)))
    sender.close()
    receiver.close()


def test_a_message_that_does_not_fit_is_refused() -> None:
    sender, receiver = shared_memory_links()
    with pytest.raises(ValueError, match="7 tokens, and at most 6 fit"):
        sender.send(0, Handover(1, state=HiddenState(torch.zeros(7, 5), None)))
    sender.send(*message(1))  # nothing of the refused one was queued
    assert_same(receiver.receive(), 1)


VALUES = st.floats(width=64) | st.sampled_from([0.0, 1.0, 2.0, 3.0, 6.0, 7.0, -1.0, 1e9])


@given(st.lists(VALUES, min_size=NUM_VALUES, max_size=NUM_VALUES), st.binary(max_size=300))
def test_a_frame_that_no_stage_sends_is_an_error_of_the_stage(values: list[float], rows: bytes) -> None:
    """Whatever it announces, no more is allocated than what fits the link."""
    ours, theirs = socket.socketpair()
    link = SocketLink(ours, SHAPE, unseen(), 0.0)
    with theirs:
        theirs.sendall(struct.pack(f"<{NUM_VALUES}d", *values) + rows)
        theirs.shutdown(socket.SHUT_WR)
        try:
            _, handover = link.receive()
        except PeerFailed:
            handover = None
        state = None if handover is None else handover.state
        assert state is None or len(state.residual) <= SHAPE.num_rows
    link.close()
