"""Two owners of API keys on one server: one floods it, the first tokens and the part of the other.

    python benchmarks/tenants.py [--seconds 60] [--limits "concurrency=32"] [--server-args ...]

The tenant sends online chats at --rate and keeps --flex offline requests open, first alone, then beside the
adversary. That one keeps --flood requests of each kind open all the time: online ones of an urgent priority,
some with many choices, some with long prompts; offline ones; bodies that are refused; and uploads of batches.
What is refused it sends again at once. --limits is its line in the key file; without it turns alone divide
the engine.

Prints the first tokens, how many chats were refused, the ratio of both P99, and the part of the tenant in the
flex tokens of both. The last line of output is a JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shlex
import statistics
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from served import served

from backfill.bench.client import BenchClient, Endpoint
from backfill.bench.record import BenchRequest, Outcome
from backfill.bench.runner import send_load

KEYS = {"tenant": "key-of-the-tenant", "adversary": "key-of-the-adversary"}
_LINES = 200  # of a batch


@dataclass(slots=True)
class Client:
    """An owner's requests that are no measured chats."""

    session: aiohttp.ClientSession
    random: random.Random
    num_offline_tokens: int = 0
    statuses: dict[int, int] = field(default_factory=dict)

    async def post(self, path: str, **body: Any) -> dict[str, Any]:
        async with self.session.post(path, json=body) as response:
            return await self._body_of(response)

    async def complete(self, input_len: int, output_len: int, **fields: Any) -> int:
        """Returns: output tokens; 0 where it is refused."""
        prompt = [self.random.randrange(100, 40_000) for _ in range(input_len)]
        answer = await self.post(
            "/v1/completions", prompt=prompt, max_tokens=output_len, ignore_eos=True, **fields
        )
        return int(answer.get("usage", {}).get("completion_tokens", 0))

    async def flex(self) -> None:
        self.num_offline_tokens += await self.complete(128, 32, service_tier="flex")

    async def urgent(self) -> None:
        await self.complete(self.random.choice((16, 64, 512)), 32, priority=-100)

    async def choices(self) -> None:
        await self.complete(32, 32, n=16, priority=-100)

    async def long(self) -> None:
        await self.complete(1500, 1)

    async def refused(self) -> None:
        await self.post("/v1/completions", prompt="a" * 200_000, max_tokens=-1)

    async def batch(self) -> None:
        lines = []
        for number in range(_LINES):
            body = {"prompt": [self.random.randrange(100, 40_000) for _ in range(128)], "max_tokens": 32}
            line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
            lines.append(json.dumps(line))
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", "\n".join(lines), filename="lines.jsonl")
        async with self.session.post("/v1/files", data=form) as response:
            file_id = (await self._body_of(response)).get("id", "")
        await self.post(
            "/v1/batches", input_file_id=file_id, endpoint="/v1/completions", completion_window="24h"
        )

    async def _body_of(self, response: aiohttp.ClientResponse) -> dict[str, Any]:
        self.statuses[response.status] = self.statuses.get(response.status, 0) + 1
        body: dict[str, Any] = await response.json()
        return body


async def keep_open(send: Callable[[], Awaitable[None]], count: int) -> None:
    """So many at any time, until it is cancelled."""

    async def again_and_again() -> None:
        while True:
            await send()
            await asyncio.sleep(0)

    await asyncio.gather(*(again_and_again() for _ in range(count)))


async def measure(url: str, args: argparse.Namespace, *, is_flooded: bool) -> dict[str, Any]:
    """One phase."""
    endpoint = Endpoint(url, "/v1/completions", args.model, ignore_eos=True, headers=_header("tenant"))
    rng = np.random.default_rng(is_flooded)
    due_at_s = np.cumsum(rng.exponential(1 / args.rate, int(args.rate * args.seconds)))
    prompts = rng.integers(100, 40_000, (len(due_at_s), args.input_len)).tolist()
    chats = [
        BenchRequest(prompt, args.input_len, args.output_len, float(at_s))
        for prompt, at_s in zip(prompts, due_at_s, strict=True)
    ]
    async with (
        aiohttp.ClientSession(url, headers=_header("tenant")) as own,
        aiohttp.ClientSession(
            url, headers=_header("adversary"), connector=aiohttp.TCPConnector(limit=0)
        ) as others,
    ):
        tenant, adversary = Client(own, random.Random(1)), Client(others, random.Random(2))
        background = [keep_open(tenant.flex, args.flex)]
        if is_flooded:
            kinds = (adversary.urgent, adversary.choices, adversary.long, adversary.refused, adversary.flex)
            background += [keep_open(kind, args.flood) for kind in kinds]
            background.append(keep_open(adversary.batch, 2))
        tasks = [asyncio.create_task(each) for each in background]
        async with BenchClient(endpoint) as client:
            records = (await send_load(client, chats, stop=asyncio.Event())).records
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    ttft_s = [each.ttft_s for each in records if each.outcome is Outcome.COMPLETED]
    if not ttft_s:
        raise SystemExit(f"no chat of the tenant has ended: {records[0].error}")
    offline = {"tenant": tenant.num_offline_tokens, "adversary": adversary.num_offline_tokens}
    return {
        "num_refused": sum(each.outcome is Outcome.FAILED for each in records),
        "ttft_p50_s": statistics.median(ttft_s),
        "ttft_p99_s": float(np.quantile(ttft_s, 0.99)),
        "offline_tokens": offline,
        "statuses_of_the_adversary": dict(sorted(adversary.statuses.items())),
    }


def _header(owner: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[owner]}"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each phase")
    parser.add_argument("--rate", type=float, default=1.0, help="chats of the tenant a second")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--flex", type=int, default=16, help="offline requests of the tenant at once")
    parser.add_argument(
        "--flood", type=int, default=64, help="requests of the adversary of each kind at once"
    )
    parser.add_argument("--limits", default="", help="of the adversary, as in the key file")
    parser.add_argument("--server-args", default="", help="more options of `backfill serve`")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        key_file = Path(folder) / "keys"
        lines = [f"{owner}={key}" for owner, key in KEYS.items()]
        key_file.write_text("\n".join([*lines, f"adversary {args.limits}" if args.limits else ""]))
        key_file.chmod(0o600)
        with served(args.model, "--api-key-file", str(key_file), *shlex.split(args.server_args)) as port:
            url = f"http://127.0.0.1:{port}"
            phases = {
                name: asyncio.run(measure(url, args, is_flooded=is_flooded))
                for name, is_flooded in (("alone", False), ("beside", True))
            }
    for name, phase in phases.items():
        print(name, phase)
    ratio = phases["beside"]["ttft_p99_s"] / phases["alone"]["ttft_p99_s"]
    tokens = phases["beside"]["offline_tokens"]
    part = tokens["tenant"] / max(1, sum(tokens.values()))
    print(f"TTFT P99 beside over alone: {ratio:.2f}; the tenant's part of flex tokens: {part:.0%}")
    shown = {"benchmark": "tenants", "cores": len(os.sched_getaffinity(0)), **vars(args), **phases}
    print(json.dumps({**shown, "ttft_p99_ratio": ratio, "part": part}))


if __name__ == "__main__":
    main()
