"""An event loop in a thread, for callers that may already run in an event loop, as in a notebook."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class LoopThread:
    """Runs coroutines for other threads until it is closed. It does not keep the interpreter alive."""

    def __init__(self, name: str) -> None:
        self._loop = _new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Start a coroutine; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine and return its result. KeyboardInterrupt in this thread cancels it."""
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Stop the loop, which must be idle. Waits for its end, unless called in the loop's thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        if not self.is_current:
            self._thread.join()

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
