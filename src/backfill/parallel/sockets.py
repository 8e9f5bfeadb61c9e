"""TCP connections between the processes of one engine, which prove to each other that they belong to it.

Both ends know a secret that the driver has made for the engine. What follows is neither encrypted nor signed.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple

KEY_BYTES = 32
_DIGEST = "sha256"
_DIGEST_BYTES = 32
_NONCE_BYTES = 32
_HANDSHAKE_S = 10.0  # all of it: a stranger that sends a byte now and then keeps nobody out for longer
_MAX_HANDSHAKES = 64  # at once
_POLL_S = 0.2
_ACCEPT_POLL_S = 0.02
# A machine that vanishes says nothing: while nothing is on the way to it, its kernel is asked every second,
# and it is given up after these.
_MAX_UNANSWERED = 5


class Address(NamedTuple):
    host: str
    port: int


class ConnectionRefused(OSError):
    """The other end is not there in time, or does not know the secret."""


def listen(host: str) -> socket.socket:
    """On a free port of this address."""
    return socket.create_server((host, 0), family=_family(host))


def address_of(listener: socket.socket) -> Address:
    host, port = listener.getsockname()[:2]
    return Address(host, port)


def accept(
    listener: socket.socket, key: bytes, timeout_s: float, check: Callable[[], None] = lambda: None
) -> socket.socket:
    """The only peer. As ``Acceptor.accept``."""
    with Acceptor(listener, key) as acceptor:
        return acceptor.accept(timeout_s, check)


class Acceptor:
    """Accepts peers that know the secret; others are closed.

    Each proves it in a thread of its own: a stranger that says nothing keeps nobody out. A context manager,
    which leaves the listener open.
    """

    def __init__(self, listener: socket.socket, key: bytes) -> None:
        self._listener, self._key = listener, key
        self._proven: SimpleQueue[socket.socket] = SimpleQueue()
        self._places = threading.BoundedSemaphore(_MAX_HANDSHAKES)
        self._is_closed = False
        listener.settimeout(_ACCEPT_POLL_S)
        self._thread = threading.Thread(target=self._take_in, name="acceptor", daemon=True)

    def __enter__(self) -> Acceptor:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed = True
        self._thread.join()
        with suppress(Empty):
            while True:
                self._proven.get_nowait().close()

    def accept(self, timeout_s: float, check: Callable[[], None] = lambda: None) -> socket.socket:
        """The next peer.

        Args:
            check: called now and then; raises if nobody is going to connect.
        Raises: ConnectionRefused.
        """
        until_s = time.monotonic() + timeout_s
        while (left_s := until_s - time.monotonic()) > 0.0:
            check()
            with suppress(Empty):
                return self._proven.get(timeout=min(left_s, _POLL_S))
        raise ConnectionRefused(f"nobody has connected within {timeout_s:g} s")

    def _take_in(self) -> None:
        while not self._is_closed:
            if not self._places.acquire(timeout=_ACCEPT_POLL_S):
                continue  # strangers have all places, for as long as a handshake may take
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                self._places.release()
                if not isinstance(error, TimeoutError):  # such as too many open files, which may pass
                    time.sleep(_ACCEPT_POLL_S)
                continue
            threading.Thread(target=self._require, args=(connection,), daemon=True).start()

    def _require(self, connection: socket.socket) -> None:
        until_s = time.monotonic() + _HANDSHAKE_S
        try:
            _prove(connection, self._key, b"accepts", until_s)
            _require_proof(connection, self._key, b"connects", until_s)
            if self._is_closed:
                raise ConnectionRefused("all peers have connected")
            self._proven.put(_prepared(connection))
        except OSError:
            connection.close()
        finally:
            self._places.release()


def connect_to(address: Address, key: bytes, timeout_s: float) -> socket.socket:
    """Raises: OSError."""
    until_s = time.monotonic() + timeout_s
    connection = socket.create_connection(address, timeout_s)
    try:
        _require_proof(connection, key, b"accepts", until_s)
        _prove(connection, key, b"connects", until_s)
        return _prepared(connection)
    except BaseException:
        connection.close()
        raise


def receive_exactly(connection: socket.socket, num_bytes: int, until_s: float | None = None) -> bytes:
    """As ``fill_from``."""
    data = bytearray(num_bytes)
    fill_from(connection, memoryview(data), until_s)
    return bytes(data)


def fill_from(connection: socket.socket, memory: memoryview, until_s: float | None = None) -> None:
    """Fill the memory.

    Args:
        until_s: TimeoutError is raised at this time, also if bytes still come in.
    Raises: ConnectionRefused at the end of the stream, OSError.
    """
    while memory:
        if until_s is not None:
            left_s = until_s - time.monotonic()
            if left_s <= 0.0:
                raise TimeoutError("the other end does not prove in time that it belongs to this engine")
            connection.settimeout(left_s)
        count = connection.recv_into(memory)
        if count == 0:
            raise ConnectionRefused("the connection was closed")
        memory = memory[count:]


def _prove(connection: socket.socket, key: bytes, role: bytes, until_s: float) -> None:
    nonce = receive_exactly(connection, _NONCE_BYTES, until_s)
    connection.sendall(hmac.digest(key, role + nonce, _DIGEST))


def _require_proof(connection: socket.socket, key: bytes, role: bytes, until_s: float) -> None:
    nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(nonce)
    proof = receive_exactly(connection, _DIGEST_BYTES, until_s)
    if not hmac.compare_digest(proof, hmac.digest(key, role + nonce, _DIGEST)):
        raise ConnectionRefused("the other end does not belong to this engine")


def _prepared(connection: socket.socket) -> socket.socket:
    """Blocks without end, sends at once, and fails within seconds when the other machine is gone.

    It takes minutes while something is on the way to that machine, which the kernel sends again: whoever has
    sent it notices the end from others. Not by TCP_USER_TIMEOUT, which would also end a connection to a
    process that computes for long and does not read.
    """
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 1),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", _MAX_UNANSWERED),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
