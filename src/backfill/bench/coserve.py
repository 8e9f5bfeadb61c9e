"""Runs online and offline load against one server and keeps what happened."""

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

from backfill.bench.client import BenchClient, Endpoint, ServerApi
from backfill.bench.coserve_load import CoserveLoad
from backfill.bench.offline import OfflineLoad, offline_load
from backfill.bench.runner import Run, new_run, send_load, wait_until_ready
from backfill.bench.scrape import Sample, num_present, parse_totals
from backfill.core.errors import ConfigError

# Often enough for a timeline of windows of 5 s; an answer of /metrics takes the server some milliseconds.
_SAMPLE_S = 2.5
_RETRY_S = 0.5
_ATTEMPTS = 3
_READY_TIMEOUT_S = 60.0
_IDLE_TIMEOUT_S = 30.0


class Status(StrEnum):
    """How a run ended; all but COMPLETE leave partial results."""

    COMPLETE = "complete"
    INTERRUPTED = "interrupted"  # by the user
    SERVER_LOST = "server lost"  # it no longer takes connections


@dataclass(slots=True)
class CoserveRun:
    """One run under one policy.

    Args:
        model: the name it has at the server.
        online: every online request's record, those of the warm-up too.
        samples: the server's totals, in order of time; empty where it exposes none.
        ended_at_s: end of what can be measured: that of the load, or when the run broke off.
    """

    load: CoserveLoad
    model: str
    online: Run
    offline: OfflineLoad
    samples: list[Sample] = field(default_factory=list)
    status: Status = Status.COMPLETE
    ended_at_s: float = 0.0


async def run_coserve(
    endpoint: Endpoint,
    load: CoserveLoad,
    *,
    stop: asyncio.Event,
    watch: Callable[[Run], AbstractAsyncContextManager[Any]] | None = None,
) -> CoserveRun:
    """Send the load and return when its last measured request has ended, or cannot any more.

    Args:
        endpoint: where; an empty model stands for the server's first.
        stop: once set, the run is broken off and marked as interrupted.
        watch: shows the online requests while the run goes on.
    Raises: ConfigError when no server answers, the load does not fit it, or it refuses the offline work.
    """
    endpoint = await _with_model(endpoint, load)
    requests = load.online_requests()
    offline = offline_load(load, endpoint)
    online_endpoint = dataclasses.replace(endpoint, body=load.online_fields())
    api = ServerApi(endpoint.base_url, endpoint.headers, verifies_tls=endpoint.verifies_tls)
    async with BenchClient(online_endpoint) as client, api:
        await wait_until_ready(client, load.ready_request(), _READY_TIMEOUT_S)
        await _wait_until_idle(api)
        await offline.prepare()
        run = CoserveRun(load, endpoint.model, new_run(len(requests)), offline)
        ending = asyncio.Event()
        sending = asyncio.create_task(send_load(client, requests, stop=ending, run=run.online))
        await asyncio.sleep(0)  # its first turn sets the start from which all instants count
        async with watch(run.online) if watch else contextlib.nullcontext(), _cancelled(sending, ending):
            await _supervise(run, api, sending, stop)
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            await offline.finish()
            if run.status is not Status.SERVER_LOST:
                await _wait_until_idle(api)  # the next run begins with an empty server
    return run


async def _supervise(
    run: CoserveRun, api: ServerApi, sending: asyncio.Task[Run], stop: asyncio.Event
) -> None:
    """Return once the load is over; fills in the run's samples, status and end."""
    load = run.load
    flooding = asyncio.create_task(run.offline.run(run.online))
    sampling = asyncio.create_task(_sample(run, api))
    stopping = asyncio.create_task(stop.wait())
    measuring = asyncio.create_task(_until_measured(run, sending))
    tasks: tuple[asyncio.Task[Any], ...] = (flooding, sampling, stopping, measuring)
    try:
        await asyncio.wait(tasks, timeout=load.end_s + load.drain_s, return_when=asyncio.FIRST_COMPLETED)
        run.ended_at_s = min(time.perf_counter() - run.online.started_at, load.end_s)
        if stopping.done():
            run.status = Status.INTERRUPTED
        elif sampling.done():
            sampling.result()
            run.status = Status.SERVER_LOST
            # When it went is not known to the second, but then it was still there.
            run.ended_at_s = min(run.ended_at_s, run.samples[-1].at_s if run.samples else 0.0)
        for task in (flooding, measuring):
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _until_measured(run: CoserveRun, sending: asyncio.Task[Run]) -> None:
    """Until every online request has ended, and the last sample is taken."""
    await asyncio.shield(sending)
    while time.perf_counter() - run.online.started_at < run.load.end_s or _lacks_last_sample(run):
        await asyncio.sleep(0.02)


def _lacks_last_sample(run: CoserveRun) -> bool:
    return bool(run.samples) and run.samples[-1].at_s < run.load.end_s


@contextlib.asynccontextmanager
async def _cancelled(sending: asyncio.Task[Run], ending: asyncio.Event) -> AsyncIterator[None]:
    """Afterwards nothing is sent any more, and what runs is marked as interrupted."""
    try:
        yield
    finally:
        ending.set()
        await sending


async def _sample(run: CoserveRun, api: ServerApi) -> None:
    """Read the server's totals at instants that include both ends of the measurement.

    Goes on after them only to notice a server that is gone, and returns when it is.
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


def _instants(load: CoserveLoad) -> Sequence[float]:
    """Evenly spaced in the warm-up, in the measurement and in the time its last requests may take."""
    instants: list[float] = []
    start_s = 0.0
    for end_s in (load.warmup_s, load.end_s, load.end_s + load.drain_s):
        steps = max(round((end_s - start_s) / _SAMPLE_S), 1)
        if end_s > start_s:
            instants += np.linspace(start_s, end_s, steps, endpoint=False).tolist()
        start_s = end_s
    return sorted({*instants, load.end_s})


async def _with_model(endpoint: Endpoint, load: CoserveLoad) -> Endpoint:
    """The endpoint with the name of its model. Raises: ConfigError."""
    async with BenchClient(endpoint) as client:
        entries = await client.get_models()
    named = [entry for entry in entries if entry["id"] == endpoint.model]
    entry = next(iter(named or entries), {})
    name = endpoint.model or str(entry.get("id", ""))
    if not name:
        raise ConfigError(f"{endpoint.base_url}/v1/models names no model; give --model.")
    limit = entry.get("max_model_len")
    if isinstance(limit, int):
        load.check_fits(limit)
    return dataclasses.replace(endpoint, model=name)


async def _wait_until_idle(api: ServerApi) -> None:
    """Wait until nothing runs or waits at the server, where it says so, but not for ever."""
    deadline_at = time.perf_counter() + _IDLE_TIMEOUT_S
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        while time.perf_counter() < deadline_at:
            text = await api.get_text("/metrics")
            if not (text and num_present(parse_totals(text))):
                return
            await asyncio.sleep(_RETRY_S)
