"""Who may connect to the processes of an engine."""

from __future__ import annotations

import errno
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from backfill.parallel import sockets
from backfill.parallel.sockets import (
    KEY_BYTES,
    Acceptor,
    ConnectionRefused,
    accept,
    address_of,
    connect_to,
    listen,
)

KEY, OTHER = bytes(KEY_BYTES), bytes([1] * KEY_BYTES)


def test_only_those_who_know_the_secret_are_connected() -> None:
    with listen("127.0.0.1") as listener, ThreadPoolExecutor(1) as thread:
        accepting = thread.submit(accept, listener, KEY, 60.0)
        address = address_of(listener)
        with pytest.raises(ConnectionRefused, match="does not belong to this engine"):
            connect_to(address, OTHER, 60.0)
        with socket.create_connection(address) as silent:
            silent.shutdown(socket.SHUT_WR)
            assert len(silent.recv(1, socket.MSG_WAITALL)) <= 1
        with connect_to(address, KEY, 60.0) as connected, accepting.result(60.0) as accepted:
            connected.sendall(b"plan")
            assert accepted.recv(4, socket.MSG_WAITALL) == b"plan"


def test_strangers_that_say_nothing_keep_nobody_out() -> None:
    with listen("127.0.0.1") as listener, ThreadPoolExecutor(2) as thread, ExitStack() as strangers:
        address = address_of(listener)
        for _ in range(3):
            strangers.enter_context(socket.create_connection(address))
        with Acceptor(listener, KEY) as acceptor:
            ours = [thread.submit(connect_to, address, KEY, 60.0) for _ in range(2)]
            for _ in ours:
                strangers.enter_context(acceptor.accept(sockets._HANDSHAKE_S / 2))
            for each in ours:
                strangers.enter_context(each.result())


def test_strangers_in_all_places_and_too_many_open_files_end_no_acceptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sockets, "_MAX_HANDSHAKES", 2)
    monkeypatch.setattr(sockets, "_HANDSHAKE_S", 0.2)

    class Listener(socket.socket):
        num_failures = 0

        def accept(self) -> tuple[socket.socket, object]:
            if self.num_failures < 3:
                self.num_failures += 1
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    with listen("127.0.0.1") as made, ThreadPoolExecutor(1) as thread, ExitStack() as strangers:
        listener = Listener(made.family, made.type, made.proto, os.dup(made.fileno()))
        address = address_of(listener)
        with listener:
            with Acceptor(listener, KEY) as acceptor:
                for _ in range(3):
                    strangers.enter_context(socket.create_connection(address))
                ours = thread.submit(connect_to, address, KEY, 60.0)
                strangers.enter_context(acceptor.accept(60.0))
                strangers.enter_context(ours.result())
            assert listener.num_failures == 3
            sockets._HANDSHAKE_S = 60.0
            for _ in range(3):
                strangers.enter_context(socket.create_connection(address))
            began_s = time.monotonic()
            with Acceptor(listener, KEY):
                time.sleep(0.2)
            assert time.monotonic() - began_s < 30.0, "it does not wait for them"


def test_a_stranger_cannot_use_the_proof_that_it_gets() -> None:
    """It sends back what it received: a proof of the other role."""
    with listen("127.0.0.1") as listener, ThreadPoolExecutor(1) as thread:
        accepting = thread.submit(accept, listener, KEY, 60.0)
        with socket.create_connection(address_of(listener)) as stranger:
            stranger.sendall(bytes(32))
            proof_and_number = stranger.recv(64, socket.MSG_WAITALL)
            stranger.sendall(proof_and_number[:32])
            assert stranger.recv(1) == b""
        with connect_to(address_of(listener), KEY, 60.0), accepting.result(60.0):
            pass


def test_bytes_that_trickle_in_do_not_extend_the_time_for_a_proof() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(bytes(8))
        with pytest.raises(TimeoutError):
            sockets.receive_exactly(ours, 8, time.monotonic())
        assert sockets.receive_exactly(ours, 8, time.monotonic() + 60.0) == bytes(8)


def test_nobody_comes() -> None:
    def give_up() -> None:
        raise ValueError("it has ended")

    with listen("127.0.0.1") as listener:
        with pytest.raises(ConnectionRefused, match=r"nobody has connected within 0\.01 s"):
            accept(listener, KEY, 0.01)
        with pytest.raises(ValueError, match="it has ended"):
            accept(listener, KEY, 60.0, give_up)
