"""The child's end of the sockets."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import msgspec
import zmq

Incoming = TypeVar("Incoming")
Outgoing = TypeVar("Outgoing")

_POLL_MS = 200


class Channel(Generic[Incoming, Outgoing]):
    """Messages instead of bytes. One thread receives; any thread sends."""

    def __init__(
        self,
        commands: zmq.Socket[bytes],
        reports: zmq.Socket[bytes],
        incoming: Any,  # the type of messages to decode: a union is no type object
    ) -> None:
        self._commands = commands
        self._reports = reports
        self._decoder: msgspec.msgpack.Decoder[Incoming] = msgspec.msgpack.Decoder(incoming)
        self._sending = threading.Lock()
        self._is_closed = False

    def send(self, message: Outgoing) -> None:
        data = msgspec.msgpack.encode(message)
        with self._sending:
            self._reports.send(data)

    def receive(self, between: Callable[[], None] = lambda: None) -> Incoming | None:
        """The next message, once there is one; None after ``close``. ``between`` is called now and then."""
        while not self._is_closed:
            between()
            if self._commands.poll(_POLL_MS):
                return self._decoder.decode(self._commands.recv())
        return None

    def close(self) -> None:
        """Let ``receive`` return."""
        self._is_closed = True


@contextmanager
def open_channel(
    name: str, incoming: Any, commands_url: str, reports_url: str
) -> Iterator[Channel[Any, Any]]:
    """The channel of this child process.

    ``name``, of at most 15 characters, is what ``ps`` and ``top`` call the process.
    """
    _name_process(name)
    with zmq.Context() as context:
        commands, reports = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        for socket in (commands, reports):
            socket.set_hwm(0)  # nothing is dropped, and nothing blocks on a slow reader
        reports.setsockopt(zmq.LINGER, 1000)
        commands.connect(commands_url)
        reports.connect(reports_url)
        try:
            yield Channel(commands, reports, incoming)
        finally:
            commands.close()
            reports.close()


def _name_process(name: str) -> None:
    if sys.platform.startswith("linux"):
        set_name = 15
        ctypes.CDLL(None).prctl(set_name, name.encode(), 0, 0, 0)
