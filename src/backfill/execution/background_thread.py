"""A thread beside the steps, which copies or reads what they need next."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias, TypeVar

Result = TypeVar("Result")
_Call: TypeAlias = tuple[Future[Any], Callable[[], Any]]


class BackgroundThread:
    """Runs calls one after another.

    The thread ends with this object or with the process, whichever ends first; calls that are still queued
    then are dropped. An executor of the standard library would make them before the process can end.

    Args:
        on_end: called after the last call.
    """

    def __init__(self, name: str, on_end: Callable[[], None] = lambda: None) -> None:
        # The thread refers to this and not to the object, so that an unused one can be collected.
        self._queue: SimpleQueue[_Call | None] = SimpleQueue()
        thread = threading.Thread(target=_run_all, args=(self._queue,), name=name, daemon=True)
        # Also at exit: a thread that returns from C++ after the interpreter's end crashes the process.
        self._finalizer = weakref.finalize(self, _end, self._queue, thread, on_end)
        thread.start()

    def submit(self, call: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Queue a call."""
        future: Future[Result] = Future()
        self._queue.put((future, partial(call, *arguments)))
        return future

    def close(self) -> None:
        """Drop queued calls and end the thread. No other call may follow."""
        self._finalizer()


def _run_all(queue: SimpleQueue[_Call | None]) -> None:
    while (queued := queue.get()) is not None:
        future, call = queued
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)
            except BaseException as panic:  # in Rust: to its caller, who waits, an error as any other
                future.set_exception(RuntimeError(f"{type(panic).__name__}: {panic}"))
        del queued, future, call  # while it waits, the thread keeps nothing alive


def _end(queue: SimpleQueue[_Call | None], thread: threading.Thread, on_end: Callable[[], None]) -> None:
    with suppress(Empty):
        while (queued := queue.get_nowait()) is not None:
            queued[0].cancel()
    queue.put(None)
    if thread is not threading.current_thread():  # which may be the one that collects the object
        thread.join()
    on_end()
