"""Processes of a simulated world: each an event loop and threads on one virtual clock.

A seeded random source chooses whose callback runs next and how long calls in threads take. A process can be
paused, as by SIGSTOP, and killed. What it runs is the product's own code.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from functools import partial
from typing import Any

from backfill.core.clock import VirtualClock
from backfill.jobs.threads import ThreadPool

# Seconds that a call takes in a thread, and until the loop has its answer.
CALL_S = 0.02


class Scheduler:
    """Runs callbacks of all processes, one at a time.

    Attributes:
        errors: that reached a loop's exception handler.
        trace: grows by what happens, in order; the same seed has the same.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.clock = VirtualClock()
        self.processes: list[Process] = []
        self.errors: list[str] = []
        self.trace: list[str] = []
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def note(self, text: str) -> None:
        self.trace.append(f"{self.clock.now_s():9.3f} {text}")

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        at_s = self.clock.now_s() + seconds
        heapq.heappush(self._events, (at_s, next(self._numbers), event))

    def run_until(self, is_over: Callable[[], bool], at_most_s: float) -> bool:
        """Returns: whether it was over within ``at_most_s``."""
        ends_at_s = self.clock.now_s() + at_most_s
        while not is_over():
            if not self._step(ends_at_s):
                return is_over()
        return True

    def run_for(self, seconds: float) -> None:
        self.run_until(lambda: False, seconds)

    def _step(self, ends_at_s: float) -> bool:
        now_s = self.clock.now_s()
        if self._events and self._events[0][0] <= now_s:
            heapq.heappop(self._events)[2]()
            return True
        ready = [process for process in self.processes if process.is_running and process.loop.is_ready(now_s)]
        if ready:
            self.random.choice(ready).loop.run_one()
            return True
        times_s = [process.loop.next_s for process in self.processes if process.is_running]
        next_s = min(times_s, default=float("inf"))
        if self._events:
            next_s = min(next_s, self._events[0][0])
        self.clock.advance(max(0.0, min(next_s, ends_at_s) - now_s))
        return next_s <= ends_at_s


class Process:
    """One that runs until it is killed, but for pauses."""

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        self.scheduler = scheduler
        self.name = name
        self.loop = Loop(self)
        self.is_dead = False
        self.is_paused = False
        self._after_pause: list[Callable[[], None]] = []
        scheduler.processes.append(self)

    @property
    def is_running(self) -> bool:
        return not (self.is_dead or self.is_paused)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self.loop.create_task(work)

    def pause(self, seconds: float) -> None:
        self.is_paused = True
        self.scheduler.after(seconds, self.resume)

    def resume(self) -> None:
        self.is_paused = False
        if self.is_dead:
            return
        calls, self._after_pause = self._after_pause, []
        for call in calls:
            call()

    def once_running(self, call: Callable[[], None]) -> None:
        """Now, or after the pause; in a process that is dead not before ``bury``."""
        if self.is_running:
            call()
        else:
            self._after_pause.append(call)

    def bury(self) -> None:
        """Cancel what is left of a dead process's tasks, so that their coroutines end in order."""
        self.is_dead = False
        self.resume()
        cancelled = set[asyncio.Task[Any]]()

        def have_ended() -> bool:
            for task in self.loop.tasks:
                if task not in cancelled:  # others may begin as they end
                    cancelled.add(task)
                    task.cancel()
            return all(task.done() for task in self.loop.tasks)

        if not self.scheduler.run_until(have_ended, 60.0):
            left = [repr(task) for task in self.loop.tasks if not task.done()]
            self.scheduler.errors.append(f"{self.name}: cancelled tasks do not end: {left}")
        self.is_dead = True


class Loop(asyncio.AbstractEventLoop):
    """The event loop of a process. The scheduler runs its callbacks."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._scheduler = process.scheduler
        self._ready = deque[asyncio.Handle]()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = itertools.count()
        self.tasks: list[asyncio.Task[Any]] = []  # that have not ended, and some that have
        self._most_tasks = 8

    # ---- For the scheduler ----

    @property
    def next_s(self) -> float:
        """When its next timer is due."""
        return self._timers[0][0] if self._timers else float("inf")

    def is_ready(self, now_s: float) -> bool:
        while self._timers and (self._timers[0][2].cancelled() or self._timers[0][0] <= now_s):
            self._ready.append(heapq.heappop(self._timers)[2])
        while self._ready and self._ready[0].cancelled():
            self._ready.popleft()
        return bool(self._ready)

    def run_one(self) -> None:
        asyncio._set_running_loop(self)
        try:
            self._ready.popleft()._run()
        finally:
            asyncio._set_running_loop(None)

    # ---- What asyncio asks of a loop ----

    def time(self) -> float:
        return self._scheduler.clock.now_s()

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """The answer of a thread, which takes its time."""
        return self.call_later(self._scheduler.random.uniform(0, CALL_S), callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Found when it is due."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        if len(self.tasks) >= self._most_tasks:
            self.tasks = [each for each in self.tasks if not each.done()]
            self._most_tasks = 2 * len(self.tasks) + 8
        self.tasks.append(task)
        return task

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:
        """Reads of files by ``asyncio.to_thread``."""
        future = self.create_future()

        def perform() -> None:
            if future.cancelled():
                return
            try:
                result = func(*args)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self.call_later(self._scheduler.random.uniform(0, CALL_S), perform)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._process.is_dead:
            self._scheduler.errors.append(f"{self._process.name}: {context}")

    def get_debug(self) -> bool:
        return False

    def is_closed(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True


class VirtualPool(ThreadPool):
    """Calls of a process: each is performed at once, some time after it was asked for.

    Args:
        delay_s: seconds that a call waits for what does not answer.
    """

    def __init__(self, process: Process, delay_s: Callable[[], float], name: str, max_threads: int) -> None:
        super().__init__(name, max_threads)
        self._process = process
        self._delay_s = delay_s
        self._waiting = deque[Callable[[], None]]()
        self._num_busy = 0

    def _submit(self, call: Callable[[], None]) -> None:
        self._waiting.append(call)
        self._begin()

    def _begin(self) -> None:
        while self._waiting and self._num_busy < self._max_threads:
            self._num_busy += 1
            scheduler = self._process.scheduler
            seconds = scheduler.random.uniform(0, CALL_S) + self._delay_s()
            perform = partial(self._perform, self._waiting.popleft())
            scheduler.after(seconds, partial(self._process.once_running, perform))

    def _perform(self, call: Callable[[], None]) -> None:
        call()
        self._num_busy -= 1
        self._begin()
