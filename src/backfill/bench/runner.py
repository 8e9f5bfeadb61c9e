"""Sends each request when it is due and keeps a record of each."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from backfill.bench.client import BenchClient
from backfill.bench.multi_turn import Conversation
from backfill.bench.record import BenchRequest, Outcome, RequestRecord
from backfill.core.errors import ConfigError

_READY_RETRY_S = 1.0


@dataclass(slots=True)
class Run:
    """A run in progress or at its end.

    Attributes:
        num_requests: requests to send; each turn of a conversation is one.
        started_at: ``time.perf_counter()`` of the start; the records' times count from it.
        records: one for each request that has arrived, in order of arrival.
        probes: records of the one-token requests sent beside the load.
    """

    num_requests: int
    started_at: float = field(default_factory=time.perf_counter)
    records: list[RequestRecord] = field(default_factory=list)
    probes: list[RequestRecord] = field(default_factory=list)
    duration_s: float = 0.0
    is_interrupted: bool = False

    def count(self, outcome: Outcome) -> int:
        return sum(record.outcome is outcome for record in self.records)


async def wait_until_ready(client: BenchClient, request: BenchRequest, timeout_s: float) -> None:
    """Send ``request`` until it succeeds.

    Raises: ConfigError with the last failure when none succeeded within ``timeout_s``.
    """
    deadline_at = time.perf_counter() + timeout_s
    while (record := await _send_once(client, request)).outcome is not Outcome.COMPLETED:
        if time.perf_counter() >= deadline_at:
            raise ConfigError(f"The server was not ready within {timeout_s:g} s: {record.error}.")
        await asyncio.sleep(min(_READY_RETRY_S, max(deadline_at - time.perf_counter(), 0)))


def unlike(request: BenchRequest) -> BenchRequest:
    """A request of about the same length that leaves nothing of ``request`` in the server's prefix cache."""
    half = len(request.prompt) // 2
    prompt = request.prompt[half:] + request.prompt[:half]  # type: ignore[operator]  # both of one type
    return dataclasses.replace(request, prompt=prompt, history=())


async def warm_up(client: BenchClient, requests: Sequence[BenchRequest], max_concurrency: int | None) -> None:
    """Send requests outside the measurement and ignore their failures, which the run will show."""
    limit = _limit(max_concurrency)

    async def send(request: BenchRequest) -> None:
        async with limit:
            await _send_once(client, request)

    await asyncio.gather(*(send(request) for request in requests))


async def send_load(
    client: BenchClient,
    requests: Sequence[BenchRequest | Conversation],
    *,
    stop: asyncio.Event,
    run: Run | None = None,
    max_concurrency: int | None = None,
    probe_rate_per_s: float = 0.0,
) -> Run:
    """Send each request when it is due, whether or not earlier ones have ended (an open loop).

    Only the turns of a conversation wait for one another. A turn that fails ends its conversation.

    Args:
        stop: once set, no more requests are sent, and those that run are cancelled and marked as interrupted.
        run: filled in as the run goes on, for a live display; a new one by default.
        max_concurrency: requests that may run at once. Others wait; their records count the wait apart.
        probe_rate_per_s: rate of one-token requests, which ignore ``max_concurrency``. Each is sent after the
            one before has ended. 0 sends none.
    """
    run = run or Run(count_requests(requests))
    limit = _limit(max_concurrency)
    with _frozen_heap():
        run.started_at = time.perf_counter()
        stopping = asyncio.create_task(stop.wait())
        probing = asyncio.create_task(_probe(client, run, probe_rate_per_s))
        tasks: list[asyncio.Task[None]] = []
        index = 0
        for request in requests:
            if not await _sleep_until(run.started_at + request.due_at_s, stop):
                break
            conversation = _as_conversation(request)
            tasks.append(asyncio.create_task(_converse(client, run, limit, index, conversation)))
            index += len(conversation.messages)
        await _finish(tasks, stopping)
        run.duration_s = time.perf_counter() - run.started_at
        run.is_interrupted = stop.is_set()
        await cancel([stopping, probing])
    return run


def count_requests(requests: Iterable[BenchRequest | Conversation]) -> int:
    """Each turn of a conversation is one."""
    return sum(len(_as_conversation(request).messages) for request in requests)


def _as_conversation(request: BenchRequest | Conversation) -> Conversation:
    return request if isinstance(request, Conversation) else Conversation((request,), ())


async def _converse(
    client: BenchClient,
    run: Run,
    limit: AbstractAsyncContextManager[None],
    index: int,
    conversation: Conversation,
) -> None:
    request = conversation.messages[0]
    record = await _send_one(client, run, limit, index, request)
    for turn in range(1, len(conversation.messages)):
        if record.outcome is not Outcome.COMPLETED:
            return
        request = conversation.next_turn(turn, request, record)
        await asyncio.sleep(run.started_at + request.due_at_s - time.perf_counter())
        record = await _send_one(client, run, limit, index, request, turn)


async def _send_one(
    client: BenchClient,
    run: Run,
    limit: AbstractAsyncContextManager[None],
    index: int,
    request: BenchRequest,
    turn: int = 0,
) -> RequestRecord:
    arrived_at_s = time.perf_counter() - run.started_at
    record = RequestRecord(index + turn, request.due_at_s, arrived_at_s, request.input_tokens, turn=turn + 1)
    run.records.append(record)
    try:
        async with limit:
            await client.send(request, record, run.started_at)
    except asyncio.CancelledError:
        record.outcome, record.error = Outcome.INTERRUPTED, "interrupted"
    record.shared_tokens = _shared_tokens(request, record)
    return record


def _shared_tokens(request: BenchRequest, record: RequestRecord) -> int | None:
    """What the server counts beyond the prompt is its template, which all requests share."""
    if request.shared_tokens is None:
        return None
    return request.shared_tokens + max(record.input_tokens - request.input_tokens, 0)


async def _finish(tasks: Sequence[asyncio.Task[None]], stopping: asyncio.Task[bool]) -> None:
    """Wait for all tasks, or until told to stop; then cancel those that still run."""
    all_ended: asyncio.Future[Any] = asyncio.gather(*tasks, return_exceptions=True)
    waited: list[asyncio.Future[Any]] = [all_ended, stopping]
    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    await cancel(tasks)
    for result in await all_ended:
        if isinstance(result, Exception):
            raise result


async def _probe(client: BenchClient, run: Run, rate_per_s: float) -> None:
    if rate_per_s <= 0:
        return
    request = BenchRequest(prompt="Hi", input_tokens=1, output_tokens=1)
    while True:
        at_s = time.perf_counter() - run.started_at
        record = RequestRecord(len(run.probes), at_s, at_s, 1)
        await client.send(request, record, run.started_at)
        run.probes.append(record)
        await asyncio.sleep(1 / rate_per_s)


async def _send_once(client: BenchClient, request: BenchRequest) -> RequestRecord:
    record = RequestRecord(0, 0.0, 0.0, request.input_tokens)
    await client.send(request, record, time.perf_counter())
    return record


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


def _limit(max_concurrency: int | None) -> AbstractAsyncContextManager[None]:
    """At most ``max_concurrency`` requests at once, in order of arrival."""
    return contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)


@contextlib.contextmanager
def _frozen_heap() -> Iterator[None]:
    """Keep the garbage collector from walking all prompts during a measurement."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
