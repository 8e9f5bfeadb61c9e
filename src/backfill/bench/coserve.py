"""Runs online and offline load against one server, and records it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import aiohttp
import numpy as np

from backfill.bench.client import BenchClient, Endpoint, ServerApi, find_model
from backfill.bench.coserve_load import CoserveLoad
from backfill.bench.offline import OfflineLoad, offline_load
from backfill.bench.runner import Run, cancel, send_load, wait_until_ready
from backfill.bench.scrape import Sample, num_present, parse_totals

# Half of the timeline's windows. A response of /metrics takes the server some milliseconds.
_SAMPLE_S = 2.5
# A second of which a hypervisor took more of one processor does not show how fast the server is.
_STOLEN_INTERVAL_S, _MOST_STOLEN = 1.0, 0.05
_RETRY_S = 0.5
_ATTEMPTS = 3
_READY_TIMEOUT_S = 60.0
_IDLE_TIMEOUT_S = 30.0


class Status(StrEnum):
    """How a run ended. Results are partial unless it is COMPLETE."""

    COMPLETE = "complete"
    INTERRUPTED = "interrupted"  # by the user
    SERVER_LOST = "server lost"  # it takes no more connections


@dataclass(slots=True)
class CoserveRun:
    """One run under one policy.

    Attributes:
        model: its name at the server.
        online: the online requests, also those of the warm-up.
        samples: the server's totals, in order of time; empty if it exposes none.
        ended_at_s: end of the measurement, or of the run if that was stopped before.
        stolen: start and end of the seconds of which a hypervisor took much.
    """

    load: CoserveLoad
    model: str
    online: Run
    offline: OfflineLoad
    samples: list[Sample] = field(default_factory=list)
    status: Status = Status.COMPLETE
    ended_at_s: float = 0.0
    stolen: list[tuple[float, float]] = field(default_factory=list)


async def run_coserve(
    endpoint: Endpoint,
    load: CoserveLoad,
    *,
    stop: asyncio.Event,
    watch: Callable[[Run], AbstractAsyncContextManager[Any]] | None = None,
    stolen_s: Callable[[], float] = lambda: 0.0,
) -> CoserveRun:
    """Send the load, and return when the last measured request has ended or the run was stopped.

    Args:
        endpoint: the server; an empty model is the server's first.
        stop: once set, the run ends and is marked as interrupted.
        watch: shows the online requests while the run goes on.
        stolen_s: what a hypervisor has taken of all processors of the server's machine until now.
    Raises: ConfigError when no server answers, it refuses the offline work, or the load exceeds its context.
    """
    model = await find_model(endpoint)
    if model.max_model_len is not None:
        load.check_fits(model.max_model_len)
    endpoint = dataclasses.replace(endpoint, model=model.name)
    requests = load.online_requests()
    offline = offline_load(load, endpoint)
    online_endpoint = dataclasses.replace(endpoint, body=load.online_fields())
    async with BenchClient(online_endpoint) as client, ServerApi(endpoint) as api:
        await wait_until_ready(client, load.ready_request(), _READY_TIMEOUT_S)
        await _wait_until_idle(api)
        await offline.prepare()
        run = CoserveRun(load, endpoint.model, Run(len(requests)), offline)
        ending = asyncio.Event()
        sending = asyncio.create_task(send_load(client, requests, stop=ending, run=run.online))
        await asyncio.sleep(0)  # sets the run's start, from which all times count
        async with watch(run.online) if watch else contextlib.nullcontext(), _ended(sending, ending):
            await _supervise(run, api, sending, stop, stolen_s)
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            await offline.finish()
            if run.status is not Status.SERVER_LOST:
                await _wait_until_idle(api)  # so that the next run begins on an idle server
    return run


async def _supervise(
    run: CoserveRun,
    api: ServerApi,
    sending: asyncio.Task[Run],
    stop: asyncio.Event,
    stolen_s: Callable[[], float],
) -> None:
    """Fill in the run's samples, stolen seconds, status and end; return when the load is over."""
    load = run.load
    offline = asyncio.create_task(run.offline.run(run.online))
    sampling = asyncio.create_task(_sample(run, api))
    stopping = asyncio.create_task(stop.wait())
    measuring = asyncio.create_task(_until_measured(run, sending))
    noting = asyncio.create_task(_note_stolen(run, stolen_s))
    tasks: tuple[asyncio.Task[Any], ...] = (offline, sampling, stopping, measuring, noting)
    try:
        await asyncio.wait(
            tasks, timeout=load.end_s + load.drain_timeout, return_when=asyncio.FIRST_COMPLETED
        )
        run.ended_at_s = min(time.perf_counter() - run.online.started_at, load.end_s)
        if stopping.done():
            run.status = Status.INTERRUPTED
        elif sampling.done():
            sampling.result()
            run.status = Status.SERVER_LOST
            # The server's end is not known exactly. It was still there at the last sample.
            run.ended_at_s = min(run.ended_at_s, run.samples[-1].at_s if run.samples else 0.0)
        for task in (offline, measuring):
            if task.done():
                task.result()
    finally:
        await cancel(tasks)


async def _until_measured(run: CoserveRun, sending: asyncio.Task[Run]) -> None:
    """Wait until every online request has ended and the last sample is taken."""
    await asyncio.shield(sending)
    while time.perf_counter() - run.online.started_at < run.load.end_s or (
        run.samples and run.samples[-1].at_s < run.load.end_s
    ):
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def _ended(sending: asyncio.Task[Run], ending: asyncio.Event) -> AsyncIterator[None]:
    """End the sending after the block. Requests that still run are marked as interrupted."""
    try:
        yield
    finally:
        ending.set()
        await sending


async def _sample(run: CoserveRun, api: ServerApi) -> None:
    """Read the server's totals at instants that include both ends of the measurement.

    Continues after the measurement until cancelled. Returns only when the server takes no more connections.
    """
    num_refused = 0
    for at_s in _instants(run.load):
        await asyncio.sleep(max(run.online.started_at + at_s - time.perf_counter(), 0.0))
        while True:
            before = time.perf_counter()
            try:
                text = await api.get_text("/metrics")
                break
            except TimeoutError:
                text = None
                break
            except aiohttp.ClientConnectionError:
                num_refused += 1
                if num_refused == _ATTEMPTS:
                    return
                await asyncio.sleep(_RETRY_S)
        num_refused = 0
        between = (before + time.perf_counter()) / 2 - run.online.started_at
        if text is not None and (totals := parse_totals(text)):
            run.samples.append(Sample(between, totals))
    await asyncio.Event().wait()


async def _note_stolen(run: CoserveRun, stolen_s: Callable[[], float]) -> None:
    """Note the seconds of which a hypervisor took much, until cancelled."""
    began_at, taken_s = time.perf_counter(), stolen_s()
    while True:
        await asyncio.sleep(_STOLEN_INTERVAL_S)
        ended_at, before_s, taken_s = time.perf_counter(), taken_s, stolen_s()
        if taken_s - before_s > _MOST_STOLEN * (ended_at - began_at):
            run.stolen.append((began_at - run.online.started_at, ended_at - run.online.started_at))
        began_at = ended_at


def _instants(load: CoserveLoad) -> Sequence[float]:
    """Sampling times, evenly spaced in the warm-up, in the measurement and in the drain after it."""
    instants: list[float] = []
    start_s = 0.0
    for end_s in (load.warmup, load.end_s, load.end_s + load.drain_timeout):
        steps = max(round((end_s - start_s) / _SAMPLE_S), 1)
        if end_s > start_s:
            instants += np.linspace(start_s, end_s, steps, endpoint=False).tolist()
        start_s = end_s
    return sorted({*instants, load.end_s})


async def _wait_until_idle(api: ServerApi) -> None:
    """Wait until no request runs or waits at the server, at most ``_IDLE_TIMEOUT_S``.

    Returns at once if the server does not expose these numbers.
    """
    deadline_at = time.perf_counter() + _IDLE_TIMEOUT_S
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        while time.perf_counter() < deadline_at:
            text = await api.get_text("/metrics")
            if not (text and num_present(parse_totals(text))):
                return
            await asyncio.sleep(_RETRY_S)
