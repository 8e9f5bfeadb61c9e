"""Batches of the soak: created, followed across kills, and compared with their files at the end."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import aiohttp
from soak_checks import BAD_LINE, BatchAnswers, faults_of
from soak_load import text_of

OPEN_STATUSES = frozenset({"validating", "in_progress", "finalizing", "cancelling"})
_RETRY_S = 0.5
_CALL_TIMEOUT_S = 300.0
_PIECE_BYTES = 1 << 18


def lines_of(seed: int, num_lines: int, max_tokens: int, label: str = "") -> Iterator[bytes]:
    """Unique lines; every tenth must fail when it runs, since its prompt exceeds the context.

    ``label`` begins every prompt: lines of equal seeds with other labels share no KV.
    """
    generator = random.Random(f"{seed} lines")
    for index in range(num_lines):
        is_bad = index % 10 == 9
        prompt = text_of(generator, 12_000 if is_bad else generator.randint(4, 150))
        body = {"prompt": f"{label}{seed} {index} {prompt}", "max_tokens": generator.randint(1, max_tokens)}
        yield batch_line(f"{BAD_LINE if is_bad else ''}{seed}-{index}", body)


def batch_line(custom_id: str, body: dict[str, Any]) -> bytes:
    line = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(line).encode() + b"\n"


class BatchClient:
    """Files and batches over HTTP. Calls are repeated until a server answers, for up to ``retry_s``.

    An async context manager.
    """

    def __init__(self, url: str, retry_s: float = 300.0) -> None:
        self._url = url
        self._retry_s = retry_s
        timeout = aiohttp.ClientTimeout(_CALL_TIMEOUT_S)
        self._session = aiohttp.ClientSession(timeout=timeout)

    async def __aenter__(self) -> BatchClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def upload(self, lines: Callable[[], Iterator[bytes]]) -> str:
        """The id of a file of ``lines``, which is called again for every attempt."""

        def form() -> aiohttp.FormData:
            data = aiohttp.FormData()
            data.add_field("purpose", "batch")
            data.add_field("file", _copy_groups(lines()), filename="soak.jsonl")
            return data

        answer = await self._json("POST", "/v1/files", form=form)
        return str(answer["id"])

    async def create(self, file_id: str) -> str:
        body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        return str((await self._json("POST", "/v1/batches", body=body))["id"])

    async def get(self, batch_id: str) -> dict[str, Any]:
        return await self._json("GET", f"/v1/batches/{batch_id}")

    async def cancel(self, batch_id: str) -> None:
        async with self._session.post(f"{self._url}/v1/batches/{batch_id}/cancel") as response:
            await response.read()

    async def wait(self, batch_id: str, statuses: frozenset[str], timeout_s: float) -> dict[str, Any]:
        """The batch once it is in none of ``statuses``. Raises: TimeoutError."""
        deadline_at_s = time.monotonic() + timeout_s
        while (batch := await self.get(batch_id))["status"] in statuses:
            if time.monotonic() > deadline_at_s:
                raise TimeoutError(f"{batch_id} is still {batch['status']} after {timeout_s:g} s: {batch}")
            await asyncio.sleep(_RETRY_S)
        return batch

    async def all_batches(self) -> list[dict[str, Any]]:
        """Including batches whose creation was never answered."""
        found: list[dict[str, Any]] = []
        after = ""
        while True:
            page = await self._json("GET", f"/v1/batches?limit=100{after}")
            found += page["data"]
            if not page["has_more"]:
                return found
            after = f"&after={page['data'][-1]['id']}"

    async def answers(self, batch: dict[str, Any]) -> BatchAnswers:
        counts = batch["request_counts"]
        asked, output, errors = [
            [json.loads(line)["custom_id"] for line in await self._lines(file_id)]
            for file_id in (batch["input_file_id"], batch["output_file_id"], batch["error_file_id"])
        ]
        return BatchAnswers(
            batch["id"],
            batch["status"],
            counts["total"],
            counts["completed"],
            counts["failed"],
            asked=asked,
            output=output,
            errors=errors,
        )

    async def _lines(self, file_id: str | None) -> list[bytes]:
        if file_id is None:
            return []
        async with self._session.get(f"{self._url}/v1/files/{file_id}/content") as response:
            response.raise_for_status()
            return (await response.read()).splitlines()

    async def _json(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        form: Callable[[], aiohttp.FormData] | None = None,
    ) -> dict[str, Any]:
        """Raises: TimeoutError when no call succeeds in time, RuntimeError for a 4xx other than 429."""
        deadline_at_s, last = time.monotonic() + self._retry_s, ""
        while time.monotonic() < deadline_at_s:
            try:
                data = None if form is None else form()
                async with self._session.request(method, self._url + path, json=body, data=data) as response:
                    if response.status == 200:
                        answer: dict[str, Any] = await response.json()
                        return answer
                    last = f"{response.status}: {(await response.text())[:300]}"
                    # 507, no space on the disk, is temporary here.
                    if response.status < 500 and response.status != 429:
                        raise RuntimeError(f"{method} {path}: {last}")
            except (aiohttp.ClientError, OSError) as error:
                last = repr(error)
            await asyncio.sleep(_RETRY_S)
        raise TimeoutError(f"{method} {path} did not succeed within {self._retry_s:g} s; last: {last}")


async def keep_batches_open(
    url: str, seed: int, num_open: int, num_lines: int, faults: list[str], label: str = ""
) -> None:
    """Keep ``num_open`` batches open until cancelled; failed calls are added to ``faults``."""

    async def repeat(index: int) -> None:
        async with BatchClient(url) as client:
            for number in itertools.count():
                name = seed * 1_000_000 + index * 10_000 + number

                def lines(name: int = name) -> Iterator[bytes]:
                    return lines_of(name, num_lines, max_tokens=24, label=label)

                try:
                    batch_id = await client.create(await client.upload(lines))
                    await client.wait(batch_id, OPEN_STATUSES, timeout_s=3600.0)
                except (RuntimeError, TimeoutError) as error:
                    faults.append(str(error))
                    await asyncio.sleep(_RETRY_S)

    async with asyncio.TaskGroup() as group:
        for index in range(num_open):
            group.create_task(repeat(index))


async def settle(url: str, timeout_s: float) -> None:
    """Wait until no batch is open. Raises: TimeoutError naming one that still is."""
    async with BatchClient(url) as client:
        for batch in await client.all_batches():
            await client.wait(batch["id"], OPEN_STATUSES, timeout_s)


async def audit(url: str) -> tuple[dict[str, int], list[str]]:
    """Totals over all batches, and violations of "each line is answered exactly once"."""
    totals = {"batches": 0, "lines": 0, "completed": 0, "failed": 0}
    faults: list[str] = []
    async with BatchClient(url) as client:
        for batch in await client.all_batches():
            try:
                answers = await client.answers(batch)
            except (aiohttp.ClientError, OSError, json.JSONDecodeError) as error:
                faults.append(f"{batch['id']}: its files cannot be read: {error!r}")
                continue
            faults += faults_of(answers)
            if answers.status == "failed" and batch.get("errors"):
                faults[-1] += f" ({json.dumps(batch['errors'])[:300]})"
            totals["batches"] += 1
            totals["lines"] += len(answers.asked)
            totals["completed"] += answers.completed
            totals["failed"] += answers.failed
    return totals, faults


async def _copy_groups(lines: Iterator[bytes]) -> AsyncIterator[bytes]:
    chunk = bytearray()
    for line in lines:
        chunk += line
        if len(chunk) >= _PIECE_BYTES:
            yield bytes(chunk)
            chunk.clear()
    yield bytes(chunk)
