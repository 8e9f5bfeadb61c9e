"""Looks at the state of an engine, and what may be wrong with it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

import aiohttp
import msgspec

from backfill.core.errors import BackfillError
from backfill.http.errors import why_not_connected
from backfill.protocol.replica_state import ReplicaState, parse_state

Result = TypeVar("Result")

_MAX_STATE_BYTES = 1 << 16
_NUM_TICKS = 20  # of a timeout


class EngineLost(Exception):
    """The connection to an engine, or the engine, ended before its answer did.

    Attributes:
        was_reached: the engine may have begun the request.
        had_others: the engine had other requests beside it, those of other routers as far as looks show them.
    """

    def __init__(self, message: str, *, was_reached: bool = True, had_others: bool = True) -> None:
        super().__init__(message)
        self.was_reached = was_reached
        self.had_others = had_others


class EngineRefused(BackfillError):
    """A server that cannot be one of the router's engines."""


async def ask(
    session: aiohttp.ClientSession, url: str, headers: Mapping[str, str], timeout_s: float
) -> ReplicaState:
    """Raises: EngineLost, EngineRefused."""
    try:
        status, body = await within(timeout_s, _get(session, f"{url}/state", headers))
    except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
        raise EngineLost(reason_of(error)) from error
    if status == 401:
        raise EngineRefused(f"The engine {url} asks for an API key: give the router --engine-api-key.")
    if status >= 500:
        raise EngineLost(f"it answers with status {status}")
    refusal = f"{url} is not a Backfill server, or one of another version"
    if status != 200:
        raise EngineRefused(f"{refusal}: it has no /state.")
    try:
        return parse_state(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise EngineRefused(f"{refusal}: its /state is not understood: {error}.") from None


async def within(timeout_s: float, work: Coroutine[Any, Any, Result]) -> Result:
    """As ``asyncio.wait_for``, but a pause of this process counts little: what came meanwhile is read first.

    Raises: TimeoutError.
    """
    loop, task, left_s = asyncio.get_running_loop(), asyncio.ensure_future(work), timeout_s
    tick_s = timeout_s / _NUM_TICKS
    try:
        while not task.done() and left_s > 0:
            since_s = loop.time()
            await asyncio.wait({task}, timeout=tick_s)
            took_s = loop.time() - since_s
            left_s -= min(took_s, tick_s)
        if not task.done():
            raise TimeoutError
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def reason_of(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return why_not_connected(error.os_error)
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    return str(error) or type(error).__name__


async def _get(session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
    """Status and body."""
    async with session.get(url, headers=headers, allow_redirects=False) as response:
        return response.status, await response.content.read(_MAX_STATE_BYTES)
