"""What schemas of online answers cost under co-serving: gaps between tokens and first tokens, over HTTP.

Starts a server with its defaults and a flood of offline requests. Chats arrive at a constant rate beside it,
in phases by turns: without a schema, and each with a schema of its own. Prints a table with the pooled gaps
of both, and one JSON object as the last line. The exit status is 1 if a whole answer is no JSON that its
schema allows, or a request fails. jsonschema comes with install-dev.

Usage: schema_gaps.py [--seconds 45] [--rounds 2] [--rate 1.5] [--flood 64]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import jsonschema
import numpy as np
from machine_limits import processor_name
from served import served

from backfill.bench.client import SseDecoder

_WARMUP_S = 20.0
_TPOT_S = 0.15  # objective of servers started here
_OUTPUT_LEN = 64


@dataclass
class Figures:
    """Of the phases of one kind, pooled: seconds, answers, and tokens of offline requests that ended."""

    gaps_s: list[float] = field(default_factory=list)
    ttfts_s: list[float] = field(default_factory=list)
    answers: list[tuple[dict[str, Any] | None, str, bool]] = field(default_factory=list)
    offline_tokens: int = 0
    seconds: float = 0.0

    def summary(self) -> dict[str, float]:
        gaps = np.array(self.gaps_s)
        return {
            "requests": len(self.ttfts_s),
            "ttft_p99_s": float(np.quantile(self.ttfts_s, 0.99)),
            "gap_p50_s": float(np.quantile(gaps, 0.5)),
            "gap_p99_s": float(np.quantile(gaps, 0.99)),
            "gaps_in_time": float((gaps <= _TPOT_S).mean()),
            "offline_tok_s": self.offline_tokens / self.seconds,
        }


class Load:
    def __init__(self, session: aiohttp.ClientSession, seed: int) -> None:
        self.phase: Figures | None = None
        self._session = session
        self._random = random.Random(seed)

    async def flood(self) -> None:
        while True:
            body = {
                "prompt": self._prompt(self._random.randint(256, 512)),
                "max_tokens": self._random.randint(32, 128),
                "ignore_eos": True,
                "service_tier": "flex",
            }
            async with self._session.post("/v1/completions", json=body) as response:
                response.raise_for_status()
                usage = (await response.json())["usage"]
            if self.phase is not None:
                self.phase.offline_tokens += usage["total_tokens"]

    async def run_phase(self, figures: Figures, seconds: float, rate: float, has_schema: bool) -> None:
        self.phase = figures
        started_at_s = time.perf_counter()
        tasks = []
        for number in range(round(seconds * rate)):
            await asyncio.sleep(max(0.0, started_at_s + number / rate - time.perf_counter()))
            tasks.append(
                asyncio.create_task(self._chat(figures, _schema(self._random) if has_schema else None))
            )
        await asyncio.sleep(max(0.0, started_at_s + seconds - time.perf_counter()))
        self.phase = None
        figures.seconds += seconds
        await asyncio.gather(*tasks)

    async def _chat(self, figures: Figures, schema: dict[str, Any] | None) -> None:
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": f"Describe somebody. {self._prompt(200)}"}],
            "max_tokens": _OUTPUT_LEN,
            "stream": True,
        }
        if schema is None:
            body["ignore_eos"] = True
        else:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        sent_at_s = last_at_s = time.perf_counter()
        text, is_first, is_whole, decoder = "", True, False, SseDecoder()
        async with self._session.post("/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            async for received in response.content.iter_any():
                for event in decoder.feed(received):
                    if event == b"[DONE]":
                        continue
                    choice = json.loads(event)["choices"][0]
                    is_whole |= choice["finish_reason"] == "stop"
                    if not choice["delta"].get("content"):
                        continue
                    now_s = time.perf_counter()
                    if is_first:
                        figures.ttfts_s.append(now_s - sent_at_s)
                    else:
                        figures.gaps_s.append(now_s - last_at_s)
                    is_first, last_at_s = False, now_s
                    text += choice["delta"]["content"]
        figures.answers.append((schema, text, is_whole))

    def _prompt(self, num_words: int) -> str:
        return " ".join(self._random.choice(_WORDS) for _ in range(num_words))


_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school")


def _schema(rng: random.Random) -> dict[str, Any]:
    """Of an object whose names are drawn, so that no two are compiled as one."""
    names = [f"{word}_{rng.randrange(1000)}" for word in rng.sample(_WORDS, 4)]
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": 24},
        {"type": "integer", "minimum": 0, "maximum": 120},
        {"enum": rng.sample(_WORDS, 5)},
        {"type": "array", "items": {"type": "boolean"}, "maxItems": 4},
    ]
    return {
        "type": "object",
        "properties": dict(zip(names, kinds, strict=True)),
        "required": names,
        "additionalProperties": False,
    }


def num_wrong(figures: Figures) -> int:
    """Answers that ended of themselves and are not what their schema allows."""
    wrong = 0
    for schema, text, is_whole in figures.answers:
        if schema is None or not is_whole:
            continue
        try:
            jsonschema.validate(json.loads(text), schema)
        except (json.JSONDecodeError, jsonschema.ValidationError):
            wrong += 1
    return wrong


async def measure(port: int, args: argparse.Namespace) -> dict[str, Figures]:
    kinds = {"without": Figures(), "with": Figures()}
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        f"http://127.0.0.1:{port}", timeout=timeout, connector=connector
    ) as session:
        load = Load(session, args.seed)
        floods = [asyncio.create_task(load.flood()) for _ in range(args.flood)]
        try:
            for has_schema in (False, True):
                await load.run_phase(Figures(), _WARMUP_S / 2, args.rate, has_schema)
            for number in range(args.rounds):
                for name in ("without", "with") if number % 2 == 0 else ("with", "without"):
                    await load.run_phase(kinds[name], args.seconds, args.rate, name == "with")
        finally:
            for flood in floods:
                flood.cancel()
            ended = await asyncio.gather(*floods, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception):
            raise error
    return kinds


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=45.0, help="of a phase")
    parser.add_argument("--rounds", type=int, default=2, help="phases of each kind")
    parser.add_argument("--rate", type=float, default=1.5, help="chats per second")
    parser.add_argument("--flood", type=int, default=64, help="offline requests at a time")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with served() as port:
        kinds = asyncio.run(measure(port, args))
    summaries = {name: figures.summary() for name, figures in kinds.items()}
    columns = list(next(iter(summaries.values())))
    print(f"| schema | {' | '.join(columns)} |\n| --- {'| --- ' * len(columns)}|")
    for name, summary in summaries.items():
        print(f"| {name} | {' | '.join(f'{summary[column]:.3f}' for column in columns)} |")
    answers = kinds["with"].answers
    wrong, whole = num_wrong(kinds["with"]), sum(is_whole for _, _, is_whole in answers)
    print(f"{whole} of {len(answers)} answers with a schema ended of themselves, {wrong} wrong")
    result = {"benchmark": "schema_gaps", "processor": processor_name(), **vars(args), "figures": summaries}
    print(json.dumps({**result, "whole": whole, "wrong": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
