"""Offline load: completions kept in flight, or a batch, until cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import aiohttp
import msgspec
import numpy as np

from backfill.bench.client import BenchClient, Endpoint, ServerApi, StreamError, describe, request_body
from backfill.bench.coserve_load import CoserveLoad
from backfill.bench.record import BenchRequest, Outcome, RequestRecord
from backfill.bench.runner import Run
from backfill.core.errors import ConfigError

# After a refusal, so that the client does not flood the server with requests it refuses.
_RETRY_S = 0.5
_POLL_S = 1.0
# For a cancelled batch to reach its final status.
_CANCEL_TIMEOUT_S = 30.0
_CALL_ERRORS = (StreamError, aiohttp.ClientError, TimeoutError)
_FINAL = ("completed", "failed", "expired", "cancelled")


class OfflineLoad:
    """Work beside the online requests, with the client's counts. This one has none."""

    def __init__(self) -> None:
        self.errors: Counter[str] = Counter()

    @property
    def num_completed(self) -> int:
        return 0

    @property
    def num_failed(self) -> int:
        return self.errors.total()

    async def prepare(self) -> None:
        """Prepare the server before the run. Raises: ConfigError when it refuses."""

    async def run(self, run: Run) -> None:
        """Load the server until cancelled. Times count from the start of ``run``."""
        await asyncio.Event().wait()

    async def finish(self) -> None:
        """Clean up after the run."""

    def tokens_between(self, start_s: float, end_s: float) -> float | None:
        """Tokens of prompts and outputs completed within [start_s, end_s]; None if unknown."""
        return 0.0


def offline_load(load: CoserveLoad, endpoint: Endpoint) -> OfflineLoad:
    """The load of ``load.offline_mode``, at the endpoint of the online requests."""
    if load.offline_mode == "none":
        return OfflineLoad()
    endpoint = dataclasses.replace(endpoint, is_streaming=False, body=load.offline_fields())
    if load.offline_mode == "batch":
        return BatchLoad(load, endpoint)
    return Flood(load, endpoint)


class Flood(OfflineLoad):
    """Keeps a fixed number of completions at the server."""

    def __init__(self, load: CoserveLoad, endpoint: Endpoint) -> None:
        super().__init__()
        self._requests: Iterator[BenchRequest] = load.offline_requests()
        self._concurrency = load.offline_concurrency
        self._endpoint = endpoint
        self._completed: list[RequestRecord] = []

    @property
    def num_completed(self) -> int:
        return len(self._completed)

    async def run(self, run: Run) -> None:
        async with BenchClient(self._endpoint) as client, asyncio.TaskGroup() as workers:
            for _ in range(self._concurrency):
                workers.create_task(self._work(client, run))

    def tokens_between(self, start_s: float, end_s: float) -> float | None:
        return float(
            sum(
                record.input_tokens + record.output_tokens
                for record in self._completed
                if start_s <= (record.sent_at_s or 0.0) + record.ended_after_s <= end_s
            )
        )

    async def _work(self, client: BenchClient, run: Run) -> None:
        while True:
            request = next(self._requests)
            record = RequestRecord(time.perf_counter() - run.started_at, request.input_tokens)
            await client.send(request, record, run.started_at)
            if record.outcome is Outcome.COMPLETED:
                self._completed.append(record)
            else:
                self.errors[record.error] += 1
                await asyncio.sleep(_RETRY_S)


class BatchLoad(OfflineLoad):
    """Batches, one after another until the run ends. The server chooses how many lines run at once.

    Each has a file of its own: with equal lines, all but the first would measure a prefix cache.
    """

    def __init__(self, load: CoserveLoad, endpoint: Endpoint) -> None:
        super().__init__()
        self._load = load
        self._endpoint = endpoint
        self._requests: Iterator[BenchRequest] = load.offline_requests()
        self._file_ids: list[str] = []  # one for each batch, and at first one more
        self._batches: dict[str, dict[str, Any]] = {}
        # Times, from the start of the run, and the lines completed by then, over all batches.
        self._progress: list[tuple[float, int]] = []

    @property
    def num_completed(self) -> int:
        return sum(_count(batch, "completed") for batch in self._batches.values())

    @property
    def num_failed(self) -> int:
        """Lines that failed, without those of a cancelled batch."""
        return sum(
            _count(batch, "failed") for batch in self._batches.values() if batch["status"] != "cancelled"
        )

    async def prepare(self) -> None:
        async with ServerApi(self._endpoint) as api:
            await self._upload(api)

    async def run(self, run: Run) -> None:
        """Raises: ConfigError when the server refuses a batch or its file."""
        async with ServerApi(self._endpoint) as api:
            while True:
                batch_id = await self._create(api)
                while self._batches[batch_id]["status"] not in _FINAL:
                    await asyncio.sleep(_POLL_S)
                    with contextlib.suppress(*_CALL_ERRORS):
                        await self._poll(api, batch_id)
                    self._progress.append((time.perf_counter() - run.started_at, self.num_completed))
                self._check_ran(batch_id)

    async def finish(self) -> None:
        """Cancel the batches, wait for their counts, and delete all files."""
        async with ServerApi(self._endpoint) as api:
            with contextlib.suppress(*_CALL_ERRORS):
                await asyncio.wait_for(self._cancel(api), _CANCEL_TIMEOUT_S)
            results = [
                batch.get(kind)
                for batch in self._batches.values()
                for kind in ("output_file_id", "error_file_id")
            ]
            for file_id in filter(None, (*results, *self._file_ids)):
                with contextlib.suppress(*_CALL_ERRORS):
                    await api.call("DELETE", f"/v1/files/{file_id}")

    def tokens_between(self, start_s: float, end_s: float) -> float | None:
        """Lines completed within the time, times the mean tokens of a completed line."""
        used = [_tokens(batch) for batch in self._batches.values()]
        if not self._progress or not self.num_completed or None in used:
            return None
        at_s, completed = zip(*self._progress, strict=True)
        first, last = np.interp([start_s, end_s], at_s, completed)
        mean_tokens = sum(tokens or 0 for tokens in used) / self.num_completed
        return float((last - first) * mean_tokens)

    def _lines(self) -> bytes:
        requests = itertools.islice(self._requests, self._load.offline_lines)
        return b"\n".join(self._line(number, request) for number, request in enumerate(requests))

    def _line(self, number: int, request: BenchRequest) -> bytes:
        body = request_body(self._endpoint, request)
        line = {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body}
        return msgspec.json.encode(line)

    async def _create(self, api: ServerApi) -> str:
        posting = asyncio.ensure_future(self._post(api))
        try:
            return await asyncio.shield(posting)
        finally:
            await asyncio.wait([posting])  # when cancelled too: the ids are needed to clean up

    async def _upload(self, api: ServerApi) -> None:
        form = aiohttp.FormData()
        form.add_field("purpose", "batch")
        form.add_field("file", self._lines(), filename="coserve.jsonl", content_type="application/jsonl")
        try:
            self._file_ids.append(str((await api.call("POST", "/v1/files", form))["id"]))
        except (*_CALL_ERRORS, KeyError) as error:
            raise ConfigError(f"The server takes no batch file: {_reason(error)}.") from error

    async def _post(self, api: ServerApi) -> str:
        if len(self._file_ids) == len(self._batches):
            await self._upload(api)
        body = {
            "input_file_id": self._file_ids[-1],
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        try:
            batch = await api.call("POST", "/v1/batches", body)
            batch_id = str(batch["id"])
        except (*_CALL_ERRORS, KeyError) as error:
            raise ConfigError(f"The server takes no batch: {_reason(error)}.") from error
        self._batches[batch_id] = {"status": "validating", **batch}
        return batch_id

    async def _poll(self, api: ServerApi, batch_id: str) -> None:
        self._batches[batch_id] |= await api.call("GET", f"/v1/batches/{batch_id}")

    def _check_ran(self, batch_id: str) -> None:
        batch = self._batches[batch_id]
        if batch["status"] == "completed" and _count(batch, "completed"):
            return
        listed = (batch.get("errors") or {}).get("data") or [{}]
        reason = listed[0].get("message", "no line completed")
        raise ConfigError(f"The batch ended as {batch['status']}: {reason}")

    async def _cancel(self, api: ServerApi) -> None:
        for batch_id, batch in self._batches.items():
            if batch["status"] not in _FINAL:
                with contextlib.suppress(StreamError):  # it may have ended just now
                    await api.call("POST", f"/v1/batches/{batch_id}/cancel")
                while self._batches[batch_id]["status"] not in _FINAL:
                    await asyncio.sleep(_POLL_S / 4)
                    await self._poll(api, batch_id)


def _count(batch: dict[str, Any], kind: str) -> int:
    return int((batch.get("request_counts") or {}).get(kind) or 0)


def _tokens(batch: dict[str, Any]) -> int | None:
    usage = batch.get("usage")
    return int(usage["total_tokens"]) if isinstance(usage, dict) and "total_tokens" in usage else None


def _reason(error: BaseException) -> str:
    return describe(error).rstrip(".")
