"""A child process of an asyncio program: sends and receives bytes, and notices its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import zmq
import zmq.asyncio

from backfill.ipc.python_process import PythonProcess
from backfill.ipc.socket_folder import SocketFolder

_REAP_S = 2.0  # a killed process ends in milliseconds, unless the kernel holds it

_open_children: set[ChildProcess] = set()


def abandon_children() -> None:
    """Kill all child processes and remove their folders, for a caller that is about to exit."""
    for child in _open_children:
        child.abandon()


class ChildProcess:
    """A process and two sockets to it. One event loop owns it; it is started once.

    Args:
        target: runs in the child as ``target(*args, commands_url, reports_url)``; see ``ipc.channel``.
    """

    def __init__(self, name: str, target: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._folder = SocketFolder()
        urls = [self._folder.url(name) for name in ("commands", "reports")]
        self._context = zmq.asyncio.Context()
        # Not an asyncio socket: sending never waits, so it can neither hang nor be cancelled.
        self._commands: zmq.Socket[bytes] = zmq.Context(self._context).socket(zmq.PUSH)
        self._reports: zmq.asyncio.Socket = self._context.socket(zmq.PULL)
        for socket, url in zip((self._commands, self._reports), urls, strict=True):
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(url)
        self._process = PythonProcess(name, target, (*args, *urls))
        self._has_ended = asyncio.Event()
        self._is_closed = False
        _open_children.add(self)

    def start(self) -> None:
        """Raises: OSError if no process can be created."""
        self._process.start()
        asyncio.get_running_loop().add_reader(self._process.sentinel, self._has_ended.set)

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def send(self, message: bytes) -> bool:
        """Send a message; False if no process can receive it."""
        if self._is_closed:
            return False
        try:
            self._commands.send(message, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    async def receive(self) -> bytes | None:
        """The next message; None once the process has ended."""
        ending: asyncio.Future[Any] = asyncio.ensure_future(self._has_ended.wait())
        arrival: asyncio.Future[Any] = asyncio.ensure_future(self._reports.recv())
        try:
            await asyncio.wait({arrival, ending}, return_when=asyncio.FIRST_COMPLETED)
            return cast(bytes, arrival.result()) if arrival.done() else None
        finally:
            for future in (ending, arrival):
                future.cancel()

    def abandon(self) -> None:
        """Kill the process and remove its folder, without waiting."""
        self._process.kill()
        self._folder.remove()

    async def close(self) -> None:
        """Kill the process if it still runs, reap it, and release sockets and folder."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._process.pid is not None:
            self._process.kill()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_ended.wait(), _REAP_S)
            asyncio.get_running_loop().remove_reader(self._process.sentinel)
            # Its end of the sentinel closes a moment before it can be reaped.
            self._process.join(_REAP_S if self._has_ended.is_set() else 0)
        for socket in (self._commands, self._reports):
            socket.close()
        self._context.term()
        self._folder.remove()
        _open_children.discard(self)

    def how_it_ended(self) -> str:
        """For messages, once the process has ended."""
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"was killed by signal {-code}"
        return f"ended with exit code {code}"
