"""A child process with messages to and from it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio

from backfill.ipc.interpreter import Interpreter
from backfill.ipc.python_process import PythonProcess
from backfill.ipc.socket_folder import SocketFolder

Incoming = TypeVar("Incoming")
Outgoing = TypeVar("Outgoing")

# A killed process ends in milliseconds, unless a driver delays it: then nobody waits for it any longer.
_REAP_S = 1.0
# The last message and the end of the process are noticed in any order.
_LAST_MESSAGE_S = 0.1

_open_children: set[ChildProcess[Any, Any]] = set()


def abandon_children() -> None:
    """Kill all child processes and remove their folders, for a caller that is about to exit."""
    for child in _open_children:
        child.abandon()


class ChildProcess(PythonProcess, Generic[Incoming, Outgoing]):
    """A process and two sockets to it. It is started once; only receiving and waiting need an event loop.

    Args:
        target: runs in the child as ``target(*args, commands_url, reports_url)``; see ``ipc.channel``.
        incoming: type of the messages to decode; a union is not a ``type``.
    Raises: OSError, zmq.ZMQError if there can be no sockets.
    """

    def __init__(
        self,
        name: str,
        target: Callable[..., None],
        args: tuple[Any, ...],
        incoming: Any,
        environment: Mapping[str, str] | None = None,
        interpreter: Interpreter | None = None,
    ) -> None:
        self._folder = SocketFolder()
        urls = [self._folder.url(name) for name in ("commands", "reports")]
        super().__init__(name, target, (*args, *urls), environment, interpreter=interpreter)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Incoming] = msgspec.msgpack.Decoder(incoming)
        self._ending: asyncio.Task[None] | None = None
        with ExitStack() as on_error:
            on_error.callback(self._folder.remove)
            self._context = zmq.asyncio.Context()
            # Not an asyncio socket: sending never waits, so it can neither hang nor be cancelled.
            self._commands: zmq.Socket[bytes] = zmq.Context(self._context).socket(zmq.PUSH)
            self._reports: zmq.asyncio.Socket = self._context.socket(zmq.PULL)
            for socket, url in zip((self._commands, self._reports), urls, strict=True):
                socket.set_hwm(0)
                socket.setsockopt(zmq.LINGER, 0)
                socket.bind(url)
            on_error.pop_all()
        self.is_open = True
        _open_children.add(self)

    def start(self) -> None:
        """Raises: OSError if no process can be created; it is closed then."""
        try:
            super().start()
        except BaseException:
            self.close()
            raise

    def send(self, message: Outgoing) -> bool:
        """Send a message; False if no process can receive it."""
        if not self.is_open:
            return False
        try:
            self._commands.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    async def receive(self) -> Incoming | None:
        """The next message; None once the process has ended, or is given up."""
        if self._ending is None:
            self._ending = asyncio.create_task(self.wait())
        arrival: asyncio.Future[Any] = asyncio.ensure_future(self._reports.recv())
        try:
            await asyncio.wait({arrival, self._ending}, return_when=asyncio.FIRST_COMPLETED)
            if not arrival.done():  # it may have sent why it ends
                await asyncio.wait({arrival}, timeout=_LAST_MESSAGE_S)
            return self._decoder.decode(arrival.result()) if arrival.done() else None
        finally:
            arrival.cancel()

    def kill(self) -> None:
        """Kill it and wait up to a second for its end."""
        super().kill()
        self.join(_REAP_S)

    async def give_up(self) -> None:
        """Kill it; ``receive`` waits no longer than a second for its end."""
        super().kill()
        await self.wait(_REAP_S)
        if self._ending is not None:
            self._ending.cancel()

    def abandon(self) -> None:
        """Kill it and remove its folder, for a caller that is about to exit."""
        self.kill()
        self._folder.remove()

    def close(self) -> None:
        """Kill it if it still runs, and release sockets and folder. May be called again."""
        if not self.is_open:
            return
        self.is_open = False
        self.kill()
        if self._ending is not None:
            self._ending.cancel()
        for socket in (self._commands, self._reports):
            socket.close()
        self._context.term()
        self._folder.remove()
        _open_children.discard(self)
