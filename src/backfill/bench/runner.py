"""Sends each request when it is due and keeps a record of each."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from backfill.bench.client import BenchClient
from backfill.bench.record import BenchRequest, Outcome, RequestRecord
from backfill.core.errors import ConfigError

_READY_RETRY_S = 1.0


@dataclass(slots=True)
class Run:
    """A run in progress or at its end.

    Attributes:
        num_requests: requests to send.
        started_at: ``time.perf_counter()`` of the start; the records' times count from it.
        records: one for each request that was sent, in order of arrival.
    """

    num_requests: int
    started_at: float = field(default_factory=time.perf_counter)
    records: list[RequestRecord] = field(default_factory=list)

    def count(self, outcome: Outcome) -> int:
        return sum(record.outcome is outcome for record in self.records)


async def wait_until_ready(client: BenchClient, request: BenchRequest, timeout_s: float) -> None:
    """Send ``request`` until it succeeds.

    Raises: ConfigError with the last failure when none succeeded within ``timeout_s``.
    """
    deadline_at = time.perf_counter() + timeout_s
    while True:
        record = RequestRecord(0.0, request.input_tokens)
        await client.send(request, record, time.perf_counter())
        if record.outcome is Outcome.COMPLETED:
            return
        if time.perf_counter() >= deadline_at:
            raise ConfigError(f"The server was not ready within {timeout_s:g} s: {record.error}.")
        await asyncio.sleep(min(_READY_RETRY_S, max(deadline_at - time.perf_counter(), 0)))


async def send_load(
    client: BenchClient, requests: Sequence[BenchRequest], *, stop: asyncio.Event, run: Run | None = None
) -> Run:
    """Send each request when it is due, whether or not earlier ones have ended (an open loop).

    Args:
        stop: once set, no more requests are sent, and those that run are cancelled and marked as interrupted.
        run: filled in as the run goes on, for a live display; a new one by default.
    """
    run = run or Run(len(requests))
    with _frozen_heap():
        run.started_at = time.perf_counter()
        stopping = asyncio.create_task(stop.wait())
        tasks: list[asyncio.Task[None]] = []
        for request in requests:
            if not await _sleep_until(run.started_at + request.due_at_s, stop):
                break
            record = RequestRecord(request.due_at_s, request.input_tokens)
            run.records.append(record)
            tasks.append(asyncio.create_task(client.send(request, record, run.started_at)))
        await _finish(tasks, stopping)
        for record in run.records:
            if record.outcome is Outcome.RUNNING:  # cancelled before its first turn
                record.outcome, record.error = Outcome.INTERRUPTED, "interrupted"
        await cancel([stopping])
    return run


async def _finish(tasks: Sequence[asyncio.Task[None]], stopping: asyncio.Task[bool]) -> None:
    """Wait for all tasks, or until told to stop; then cancel those that still run."""
    all_ended: asyncio.Future[Any] = asyncio.gather(*tasks, return_exceptions=True)
    waited: list[asyncio.Future[Any]] = [all_ended, stopping]
    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    await cancel(tasks)
    for result in await all_ended:
        if isinstance(result, Exception):
            raise result


async def _sleep_until(instant: float, stop: asyncio.Event) -> bool:
    """Sleep until ``time.perf_counter()`` reaches ``instant``; False if told to stop before."""
    # The requests before this one need a turn of the loop to be sent, even if this one is due.
    await asyncio.sleep(0)
    while not stop.is_set():
        remaining_s = instant - time.perf_counter()
        if remaining_s <= 0:
            return True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), remaining_s)
    return False


@contextlib.contextmanager
def stopped_by_ctrl_c() -> Iterator[asyncio.Event]:
    """An event that Ctrl-C sets within the block, in place of raising KeyboardInterrupt."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop.set)
    try:
        yield stop
    finally:
        loop.remove_signal_handler(signal.SIGINT)


async def cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks and wait for their end."""
    tasks = tuple(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def _frozen_heap() -> Iterator[None]:
    """Keep the garbage collector from walking all prompts during a measurement.

    Where objects were frozen before, all stay frozen: which ones were added is not known.
    """
    was_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()
