"""The child's end of the sockets to its parent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from backfill.ipc.python_process import name_process

Incoming = TypeVar("Incoming")
Outgoing = TypeVar("Outgoing")

_POLL_MS = 200


class Channel(Generic[Incoming, Outgoing]):
    """Sends and receives messages. One thread receives; any thread sends."""

    def __init__(
        self,
        commands: zmq.Socket[bytes],
        reports: zmq.Socket[bytes],
        incoming: Any,  # type of the messages to decode; a union is not a ``type``
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
        """Wait for the next message; None after ``close``. ``between`` is called at least every 200 ms."""
        while not self._is_closed:
            between()
            if self._commands.poll(_POLL_MS):
                return self._decoder.decode(self._commands.recv())
        return None

    def close(self) -> None:
        """Make ``receive`` return."""
        self._is_closed = True


@contextmanager
def open_channel(
    name: str, incoming: Any, commands_url: str, reports_url: str
) -> Iterator[Channel[Any, Any]]:
    """The channel of this child process.

    Args:
        name: shown by ``ps`` and ``top``; at most 15 characters.
    """
    name_process(name)
    with zmq.Context() as context:
        commands, reports = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        for socket in (commands, reports):
            socket.set_hwm(0)  # no message is dropped, and no sender waits for a slow reader
        reports.setsockopt(zmq.LINGER, 1000)
        commands.connect(commands_url)
        reports.connect(reports_url)
        try:
            yield Channel(commands, reports, incoming)
        finally:
            commands.close()
            reports.close()
