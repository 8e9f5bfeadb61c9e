"""A server with the routes that online and offline load use, as fast as asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Json = dict[str, Any]


class FakeServer:
    """Streams a token every ``gap_s``; answers offline completions after ``offline_s``.

    Args:
        has_metrics: counts computed tokens as ours does.
        refuses: status with which it answers offline work, 0 takes it.
        batch_lines: lines of a batch that complete with each look at it.
    """

    def __init__(
        self,
        *,
        gap_s: float = 0.01,
        offline_s: float = 0.05,
        has_metrics: bool = True,
        refuses: int = 0,
        batch_lines: int = 2,
    ) -> None:
        self._gap_s, self._offline_s = gap_s, offline_s
        self._has_metrics, self._refuses, self._batch_lines = has_metrics, refuses, batch_lines
        self.bodies: list[Json] = []
        self.num_running = self.most_offline = 0
        self.num_tokens = self.num_first_tokens = 0
        self.files: list[list[Json]] = []  # of lines
        self.batches: dict[str, Json] = {}
        self.deleted: list[str] = []
        self.url = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[FakeServer]:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/files", self._upload)
        app.router.add_delete("/v1/files/{name}", self._delete)
        app.router.add_post("/v1/batches", self._create)
        app.router.add_get("/v1/batches/{name}", self._retrieve)
        app.router.add_post("/v1/batches/{name}/cancel", self._cancel)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await self.die()

    async def die(self) -> None:
        await self._runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake", "max_model_len": 4096}]})

    async def _metrics(self, request: web.Request) -> web.Response:
        if not self._has_metrics:
            return web.Response(status=404)
        computed = self.num_tokens - self.num_first_tokens
        lines = [
            f'backfill:iteration_tokens_total_sum{{engine="0"}} {computed}',
            f'backfill:time_to_first_token_seconds_count{{class="online"}} {self.num_first_tokens}',
            'backfill:recomputed_tokens_total{class="offline"} 0.0',
        ]
        return web.Response(text="\n".join(lines))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        num_in, num_out = len(body["prompt"]), body["max_tokens"]
        usage: Json = {"prompt_tokens": num_in, "completion_tokens": num_out}
        if not body.get("stream"):
            if self._refuses:
                return web.json_response({"error": {"message": "no"}}, status=self._refuses)
            self.num_running += 1
            self.most_offline = max(self.most_offline, self.num_running)
            try:
                await asyncio.sleep(self._offline_s)
            finally:
                self.num_running -= 1
            self._count(num_in + num_out)
            choices = [{"text": "x", "finish_reason": "length"}]
            return web.json_response({"choices": choices, "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self._count(num_in + num_out)
        for index in range(num_out):
            await asyncio.sleep(self._gap_s)
            reason = "length" if index == num_out - 1 else None
            await self._send(response, {"choices": [{"text": "x", "finish_reason": reason}]})
        await self._send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    def _count(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self.num_first_tokens += 1

    async def _send(self, response: web.StreamResponse, data: Json) -> None:
        await response.write(b"data: " + json.dumps(data).encode() + b"\n\n")

    async def _upload(self, request: web.Request) -> web.Response:
        form = await request.post()
        assert form["purpose"] == "batch"
        content = form["file"]
        assert isinstance(content, web.FileField)
        self.files.append([json.loads(line) for line in content.file.read().splitlines()])
        return web.json_response({"id": f"file-{len(self.files)}"})

    async def _delete(self, request: web.Request) -> web.Response:
        self.deleted.append(request.match_info["name"])
        return web.json_response({"deleted": True})

    async def _create(self, request: web.Request) -> web.Response:
        if self._refuses:
            return web.json_response({"error": {"message": "no batches here"}}, status=self._refuses)
        batch = {
            "id": f"batch-{len(self.batches)}",
            "status": "in_progress",
            "input_file_id": (await request.json())["input_file_id"],
            "request_counts": {"total": len(self.files[-1]), "completed": 0, "failed": 0},
            "usage": {"total_tokens": 0},
        }
        self.batches[str(batch["id"])] = batch
        return web.json_response(batch)

    async def _retrieve(self, request: web.Request) -> web.Response:
        batch = self.batches[request.match_info["name"]]
        counts = batch["request_counts"]
        if batch["status"] == "in_progress":
            counts["completed"] = min(counts["completed"] + self._batch_lines, counts["total"])
            batch["usage"]["total_tokens"] = 10 * counts["completed"]
            if counts["completed"] == counts["total"]:
                batch["status"] = "completed"
        elif batch["status"] == "cancelling":
            batch["status"] = "cancelled"
        return web.json_response(batch)

    async def _cancel(self, request: web.Request) -> web.Response:
        batch = self.batches[request.match_info["name"]]
        batch["status"] = "cancelling"
        return web.json_response(batch)
