"""Well-behaved traffic of the soak: online requests, streamed and not, and flex requests."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from soak_checks import Window, overlaps

from backfill.bench.client import SseDecoder

_REQUEST_TIMEOUT_S = 900.0  # flex requests wait long beside online ones
_TEXT = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work number night point home water"
)
_WORDS = _TEXT.split()
# A full queue and an objective that cannot be met are proper answers; 503 is not.
FINE = frozenset({"ok", "status 429", "objective refused"})


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request ended: one of ``FINE``, ``cut`` (no answer or part of one), or the error."""

    kind: str
    start_s: float
    end_s: float
    result: str


@dataclass
class Outcomes:
    """The outcomes of all requests of a run."""

    all: list[Outcome] = field(default_factory=list)

    async def note(self, kind: str, request: Callable[[], Awaitable[str]]) -> str:
        start_s = time.monotonic()
        try:
            result = await request()
        except (aiohttp.ClientError, OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            result = f"cut: {type(error).__name__}"
        self.all.append(Outcome(kind, start_s, time.monotonic(), result))
        return result

    def counts(self) -> dict[str, dict[str, int]]:
        found: dict[str, Counter[str]] = {}
        for outcome in self.all:
            found.setdefault(outcome.kind, Counter())[outcome.result] += 1
        return {kind: dict(counter.most_common()) for kind, counter in sorted(found.items())}

    def unexplained(self, windows: Sequence[Window]) -> list[str]:
        """Requests that failed outside all windows."""
        return [
            f"{outcome.kind}: {outcome.result} after {outcome.end_s - outcome.start_s:.1f} s"
            for outcome in self.all
            if outcome.result not in FINE and not overlaps(outcome.start_s, outcome.end_s, windows)
        ]


def text_of(generator: random.Random, num_words: int) -> str:
    return " ".join(generator.choices(_WORDS, k=num_words))


class Traffic:
    """Clients that send a request, read the answer, pause, and repeat until cancelled.

    Args:
        pause_s: mean pause between two requests of a client.
        label: begins every prompt. Equal seeds with other labels give equal traffic that shares no KV.
    """

    def __init__(
        self, url: str, outcomes: Outcomes, seed: int, pause_s: float = 0.5, label: str = ""
    ) -> None:
        self._url = url
        self._outcomes = outcomes
        self._seed = seed
        self._pause_s = pause_s
        self._label = label

    async def run(self, *, num_online: int, num_flex: int) -> None:
        timeout = aiohttp.ClientTimeout(_REQUEST_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            clients = [self._client(session, "online", index) for index in range(num_online)]
            clients += [self._client(session, "flex", index) for index in range(num_flex)]
            async with asyncio.TaskGroup() as group:
                for client in clients:
                    group.create_task(client)

    async def _client(self, session: aiohttp.ClientSession, kind: str, index: int) -> None:
        generator = random.Random(f"{self._seed} {kind} {index}")
        for number in itertools.count():
            path, body = request_of(generator, kind, f"{self._label} {kind} {index} {number}")
            name = f"{kind} stream" if body.get("stream") else kind

            async def send(path: str = path, body: dict[str, Any] = body) -> str:
                return await _send(session, self._url + path, body)

            result = await self._outcomes.note(name, send)
            pause_s = self._pause_s if result == "ok" else max(1.0, self._pause_s)
            await asyncio.sleep(generator.expovariate(1 / pause_s))


def request_of(generator: random.Random, kind: str, label: str) -> tuple[str, dict[str, Any]]:
    """Path and body of a request whose prompt begins with ``label``."""
    prompt = f"{label} {text_of(generator, generator.randint(4, 200))}"
    body: dict[str, Any] = {"max_tokens": generator.randint(1, 48), "temperature": generator.choice([0, 0.8])}
    if generator.random() < 0.5:
        body["stream"] = True
    if kind == "flex":
        body["service_tier"] = "flex"
    elif generator.random() < 0.5:
        body["slo"] = {"ttft": generator.choice([0.3, 1.0, 3.0]), "tpot": generator.choice([0.1, 0.25, 0.5])}
    if generator.random() < 0.5:
        return "/v1/completions", {**body, "prompt": prompt}
    return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": prompt}]}


async def _send(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> str:
    async with session.post(url, json=body) as response:
        if response.status != 200:
            text = await response.text()
            if response.status == 400 and "cannot be met" in text:
                return "objective refused"
            shown = "" if response.status in (429, 503) else f": {text[:100]}"
            return f"status {response.status}{shown}"
        if not body.get("stream"):
            answer = await response.json()
            return "ok" if answer["choices"][0]["finish_reason"] else "no finish_reason"
        decoder, last = SseDecoder(), b""
        async for data in response.content.iter_any():
            for event in decoder.feed(data):
                if event != b"[DONE]" and "error" in json.loads(event):
                    return f"error event: {event[:100].decode(errors='replace')}"
                last = event
        return "ok" if last == b"[DONE]" else "cut: no [DONE]"
