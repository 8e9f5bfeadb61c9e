"""Two owners of API keys, one of which floods the servers: first tokens of the other, and its offline tokens.

    PYTHONPATH=. python benchmarks/tenants.py [--servers 2] [--seconds 60] [--limits "concurrency=32"]

The tenant sends online chats at --rate, keeps --flex offline requests open and has batches of --lines lines,
in phases: ``alone``, ``beside`` the adversary, and beside its ``offline`` requests alone, as online ones of
any owner go before all offline work. The adversary keeps --flood requests of each kind open at each server
all the time: online ones of an urgent priority, some with many choices, some with long prompts; offline ones;
bodies that are refused; and uploads of batches. What is refused it sends again at once. --limits is its line
in the key file; without it turns alone divide the engine. Its process has a low priority, so that on the
servers' own machine it takes little of their processors: those of an adversary are elsewhere.

Several servers divide the cores, and share one PostgreSQL (of ``tests/postgres.py``).

Prints for each phase the first tokens, how many chats were refused, and the tokens of flex requests and of
lines; the ratio of both P99; and the part of the tenant. The last line of output is a JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import shlex
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from served import served

from backfill.bench.client import BenchClient, Endpoint
from backfill.bench.record import BenchRequest, Outcome, RequestRecord
from backfill.bench.runner import send_load

KEYS = {"tenant": "key-of-the-tenant", "adversary": "key-of-the-adversary"}
PHASES = ("alone", "beside", "offline")
_LINES = 200  # of a batch of the adversary
_OUTPUT_LEN = 32  # of an offline request
_NICENESS = 15
_START_S = 5.0  # of the flood, before the chats, and before tokens count


@dataclass(slots=True)
class Client:
    """An owner's requests that are no measured chats, to one server."""

    session: aiohttp.ClientSession
    random: random.Random
    num_flex_tokens: int = 0
    statuses: Counter[int] = field(default_factory=Counter)

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
        self.num_flex_tokens += await self.complete(128, _OUTPUT_LEN, service_tier="flex")

    async def urgent(self) -> None:
        await self.complete(self.random.choice((16, 64, 512)), 32, priority=-100)

    async def choices(self) -> None:
        await self.complete(32, 32, n=16, priority=-100)

    async def long(self) -> None:
        await self.complete(1500, 1)

    async def refused(self) -> None:
        await self.post("/v1/completions", prompt="a" * 200_000, max_tokens=-1)

    async def batch(self, num_lines: int = _LINES) -> None:
        lines = []
        for number in range(num_lines):
            prompt = [self.random.randrange(100, 40_000) for _ in range(128)]
            body = {"prompt": prompt, "max_tokens": _OUTPUT_LEN, "ignore_eos": True}
            line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
            lines.append(json.dumps(line))
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", "\n".join(lines), filename="lines.jsonl")
        async with self.session.post("/v1/files", data=form) as response:
            file_id = (await self._body_of(response)).get("id", "")
        await self.post(
            "/v1/batches", input_file_id=file_id, endpoint="/v1/completions", completion_window="24h"
        )

    async def batches(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while True:
            after = {"after": found[-1]["id"]} if found else {}
            async with self.session.get("/v1/batches", params={"limit": "100", **after}) as response:
                page = await response.json()
            found += page["data"]
            if not page["has_more"]:
                return found

    async def num_line_tokens(self) -> int:
        """Output tokens of finished lines."""
        batches = await self.batches()
        return sum(_OUTPUT_LEN * int(each["request_counts"]["completed"]) for each in batches)

    async def cancel_batches(self) -> None:
        for each in await self.batches():
            if each["status"] in ("validating", "in_progress"):
                await self.post(f"/v1/batches/{each['id']}/cancel")

    async def _body_of(self, response: aiohttp.ClientResponse) -> dict[str, Any]:
        self.statuses[response.status] += 1
        body: dict[str, Any] = await response.json()
        return body


async def keep_open(send: Callable[[], Awaitable[None]], count: int) -> None:
    """So many at any time, until it is cancelled."""

    async def again_and_again() -> None:
        while True:
            await send()
            await asyncio.sleep(0)

    await asyncio.gather(*(again_and_again() for _ in range(count)))


async def opened(stack: AsyncExitStack, owner: str, urls: list[str]) -> list[Client]:
    """A client of an owner for each server."""
    clients = []
    for number, url in enumerate(urls):
        session = aiohttp.ClientSession(url, headers=_header(owner), connector=aiohttp.TCPConnector(limit=0))
        clients.append(Client(await stack.enter_async_context(session), random.Random(number)))
    return clients


def flood(urls: list[str], num_open: int, seconds: float, phase: str) -> dict[str, Any]:
    """What the adversary does in a phase, in a process of its own. Returns: what it got."""
    os.nice(_NICENESS)
    return asyncio.run(_flood(urls, num_open, seconds, phase))


async def _flood(urls: list[str], num_open: int, seconds: float, phase: str) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        clients = await opened(stack, "adversary", urls)
        background = []
        for client in clients:
            kinds = [client.refused, client.flex]
            if phase == "beside":
                kinds += [client.urgent, client.choices, client.long]
            background += [keep_open(kind, num_open) for kind in kinds]
            background.append(keep_open(client.batch, 2))
        await run_for(seconds, background)
        return {
            "flex_tokens": sum(client.num_flex_tokens for client in clients),
            "statuses": dict(sorted(sum((client.statuses for client in clients), Counter[int]()).items())),
            "processor_s": time.process_time(),
        }


async def run_for(seconds: float, work: list[Awaitable[None]]) -> None:
    tasks = [asyncio.ensure_future(each) for each in work]
    await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks:
        if task.done():
            task.result()
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def measure(
    urls: list[str], args: argparse.Namespace, phase: str, pool: ProcessPoolExecutor
) -> dict[str, Any]:
    """One phase. ``pool``: of the adversary's process, which has started."""
    seconds = args.seconds + _START_S
    async with AsyncExitStack() as stack:
        tenants = await opened(stack, "tenant", urls)
        owners = [tenants[0], (await opened(stack, "adversary", urls))[0]]
        for number in range(args.lines // _LINES):
            await tenants[number % len(tenants)].batch()
        background = [asyncio.create_task(keep_open(each.flex, args.flex)) for each in tenants]
        adversary: asyncio.Future[dict[str, Any]] | None = None
        if phase != "alone":
            adversary = asyncio.get_running_loop().run_in_executor(
                pool, flood, urls, args.flood, seconds, phase
            )
        await asyncio.sleep(_START_S)
        before, used_s = [await each.num_line_tokens() for each in owners], time.process_time()
        records = await chats_of(urls, args, PHASES.index(phase))
        line_tokens = [
            await each.num_line_tokens() - tokens for each, tokens in zip(owners, before, strict=True)
        ]
        used_s = time.process_time() - used_s
        got = {} if adversary is None else await adversary
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        flex_tokens = sum(each.num_flex_tokens for each in tenants)
        await tenants[0].cancel_batches()
    ttft_s = [each.ttft_s for each in records if each.outcome is Outcome.COMPLETED]
    if not ttft_s:
        raise SystemExit(f"no chat of the tenant has ended: {records[0].error}")
    return {
        "num_chats": len(records),
        "num_refused": sum(each.outcome is Outcome.FAILED for each in records),
        "ttft_p50_s": statistics.median(ttft_s),
        "ttft_p99_s": float(np.quantile(ttft_s, 0.99)),
        "tenant": {"line_tokens": line_tokens[0], "flex_tokens": flex_tokens, "processor_s": used_s},
        "adversary": {"line_tokens": line_tokens[1], **got},
    }


async def chats_of(urls: list[str], args: argparse.Namespace, seed: int) -> list[RequestRecord]:
    """Each server gets its part of them."""
    rng = np.random.default_rng(seed)
    rate = args.rate / len(urls)
    loads = []
    async with AsyncExitStack() as stack:
        for url in urls:
            due_at_s = np.cumsum(rng.exponential(1 / rate, int(rate * args.seconds)))
            due_at_s *= min(1.0, args.seconds / due_at_s[-1])
            prompts = rng.integers(100, 40_000, (len(due_at_s), args.input_len)).tolist()
            chats = [
                BenchRequest(prompt, args.input_len, args.output_len, float(at_s))
                for prompt, at_s in zip(prompts, due_at_s, strict=True)
            ]
            endpoint = Endpoint(
                url, "/v1/completions", args.model, ignore_eos=True, headers=_header("tenant")
            )
            client = await stack.enter_async_context(BenchClient(endpoint))
            loads.append(send_load(client, chats, stop=asyncio.Event()))
        return [record for run in await asyncio.gather(*loads) for record in run.records]


def _header(owner: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[owner]}"}


def part_of(phase: dict[str, Any], kind: str) -> float:
    """Of the tenant, in what both got."""
    tenant, adversary = phase["tenant"][kind], phase["adversary"].get(kind, 0)
    return float(tenant / max(1, tenant + adversary))


@contextmanager
def serving(args: argparse.Namespace, folder: Path) -> Iterator[list[str]]:
    """The URLs of the servers."""
    key_file = folder / "keys"
    lines = [f"{owner}={key}" for owner, key in KEYS.items()]
    key_file.write_text("\n".join([*lines, f"adversary {args.limits}" if args.limits else ""]))
    key_file.chmod(0o600)
    options = [args.model, "--api-key-file", str(key_file), *shlex.split(args.server_args)]
    with ExitStack() as stack:
        if args.servers > 1:
            from tests.postgres import PostgresServer

            database = PostgresServer()
            stack.callback(database.close)
            threads = max(1, len(os.sched_getaffinity(0)) // args.servers)
            options += ["--batch-database-url", database.url, "--batch-file-store", str(folder / "files")]
            options += ["--threads", str(threads)]
        ports = [stack.enter_context(served(*options)) for _ in range(args.servers)]
        yield [f"http://127.0.0.1:{port}" for port in ports]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each phase")
    parser.add_argument("--rate", type=float, default=1.0, help="chats of the tenant a second")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--flex", type=int, default=16, help="offline requests of the tenant at once")
    parser.add_argument("--lines", type=int, default=4000, help="of the tenant's batches in each phase")
    parser.add_argument(
        "--flood", type=int, default=64, help="requests of the adversary of each kind at once"
    )
    parser.add_argument("--limits", default="", help="of the adversary, as in the key file")
    parser.add_argument("--server-args", default="", help="more options of `backfill serve`")
    args = parser.parse_args()
    with (
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool,
        tempfile.TemporaryDirectory() as folder,
        serving(args, Path(folder)) as urls,
    ):
        pool.submit(os.getpid).result()
        phases = {name: asyncio.run(measure(urls, args, name, pool)) for name in args.phases}
    shown: dict[str, Any] = {}
    for name, phase in phases.items():
        print(name, phase)
        if name != "alone":
            parts = {kind: part_of(phase, kind) for kind in ("flex_tokens", "line_tokens")}
            shown[f"parts_{name}"] = parts
            print(
                f"the tenant's part, {name}: " + ", ".join(f"{kind} {of:.0%}" for kind, of in parts.items())
            )
    if "alone" in phases:
        for name in args.phases:
            ratio = phases[name]["ttft_p99_s"] / phases["alone"]["ttft_p99_s"]
            shown[f"ttft_p99_ratio_{name}"] = ratio
            print(f"TTFT P99 {name} over alone: {ratio:.2f}")
    print(
        json.dumps(
            {"benchmark": "tenants", "cores": len(os.sched_getaffinity(0)), **vars(args), **phases, **shown}
        )
    )


if __name__ == "__main__":
    main()
