"""Work that is cancelled when its client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

Result = TypeVar("Result")


async def while_connected(work: Coroutine[Any, Any, Result], receive: Receive) -> Result:
    """The result of ``work``, which is cancelled when the client disconnects.

    Args:
        receive: of a request whose body has been read.
    Raises: ClientDisconnect, and the errors of ``work``.
    """
    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(until_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    if task.cancelled():
        raise ClientDisconnect
    return task.result()


async def until_disconnect(receive: Receive) -> None:
    """Return when the client disconnects; the request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
