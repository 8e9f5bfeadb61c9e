"""Whose body is prepared next."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class OwnerTurns:
    """Lets so many in at once; of those that wait, first an owner of whom the fewest are in.

    Of equals the one that waited longest since its last turn, so that owners alternate where one is let in.
    """

    def __init__(self, num_at_once: int) -> None:
        self._num_free = num_at_once
        self._num_in = Counter[str]()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by owner, in the order of turns

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncGenerator[None]:
        """Wait for a turn, which lasts until the block is left."""
        if not self._num_free:
            await self._wait(owner)
        else:
            self._enter(owner)
        try:
            yield
        finally:
            self._leave(owner)

    async def _wait(self, owner: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # let in, and cancelled before it ran
                self._leave(owner)
            else:
                self._forget(owner, turn)
            raise

    def _forget(self, owner: str, turn: asyncio.Future[None]) -> None:
        queue = self._waiting.get(owner)
        if queue and turn in queue:  # else its turn came after it was cancelled
            queue.remove(turn)
            if not queue:
                del self._waiting[owner]

    def _enter(self, owner: str) -> None:
        self._num_free -= 1
        self._num_in[owner] += 1

    def _leave(self, owner: str) -> None:
        self._num_free += 1
        self._num_in[owner] -= 1
        if not self._num_in[owner]:
            del self._num_in[owner]
        while self._waiting and self._num_free:
            following = min(self._waiting, key=self._num_in.__getitem__)
            queue = self._waiting.pop(following)
            turn = queue.popleft()
            if queue:
                self._waiting[following] = queue
            if not turn.done():  # else it is cancelled, and about to be forgotten
                self._enter(following)
                turn.set_result(None)
