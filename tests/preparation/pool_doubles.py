"""Input files of prompts given as token ids, and pools of their lines, without a process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backfill.blending.memory_forecast import MemoryForecast
from backfill.blending.pool import OfflinePool
from backfill.blending.requests import OrderName
from backfill.blending.resources import ResourceModel
from backfill.core.errors import RequestError
from backfill.core.request import ServiceClass
from backfill.core.sampling import SamplingParams
from backfill.preparation.line_file import LineFile, Prepare
from backfill.preparation.line_pool import LinePool
from backfill.preparation.lines import BatchLine
from backfill.preparation.messages import START, LineSelection, OpenLines
from backfill.protocol.generation import Generation, GenerationEndpoint
from backfill.protocol.preparer import RequestContext
from tests.jobs.doubles import input_line
from tests.protocol.builders import make_generation

KV_TOKENS = 10_000
RESOURCES = ResourceModel(token_s=1e-4, prompt_pair_s=1e-9, cached_token_s=1e-7)


def prepare(endpoint: GenerationEndpoint, raw: bytes, context: RequestContext) -> Generation:
    """The body's ``prompt`` is token ids. Its other fields are the sampling's, but ``salt`` and ``stop``."""
    body = json.loads(raw)
    prompt, num_choices = body.pop("prompt"), body.pop("n", 1)
    if prompt == "refused":
        raise RequestError("No.", param="prompt")
    generation = make_generation(
        prompts=[prompt],
        service_class=ServiceClass.OFFLINE,
        owner=context.owner,
        complete_by_s=context.complete_by_s,
        cache_salt=body.pop("salt", ""),
    )
    sampling = SamplingParams(**{"max_tokens": 4, **body})
    generation.request.samplings[:] = [sampling] * num_choices
    return generation


def lines_of(*bodies: dict[str, Any]) -> bytes:
    return b"".join(input_line(index, body=body) for index, body in enumerate(bodies))


def prompts(*prompts: Sequence[int]) -> bytes:
    return lines_of(*({"prompt": list(prompt)} for prompt in prompts))


def selection_of(path: Path, **fields: Any) -> LineSelection:
    return LineSelection(path=str(path), max_line_bytes=1 << 20, **fields)


def make_pool(order: OrderName = "fcfs", resources: ResourceModel = RESOURCES) -> LinePool:
    return LinePool(
        lambda learned: (
            OfflinePool(order, resources, kv_tokens=KV_TOKENS, learned=learned),
            MemoryForecast(KV_TOKENS, 32) if order == "blend" else None,
        )
    )


def open_file(
    pool: LinePool,
    path: Path,
    content: bytes,
    reader_id: int = 0,
    *,
    prepare_with: Prepare = prepare,
    **fields: Any,
) -> None:
    path.write_bytes(content)
    selection = selection_of(path, **fields)
    pool.open(OpenLines(reader_id, selection), LineFile(selection, prepare_with))


def index_all(pool: LinePool, reader_id: int = 0, group: int = 7) -> int:
    """Index to the end, or until the pool holds as many lines as it may; returns how many lines."""
    position, num_lines = START, 0
    while (indexed := pool.index(reader_id, position, group)).num_lines:
        position = indexed.position
        num_lines += indexed.num_lines
    return num_lines


def take_all(pool: LinePool, owner: str = "", group: int = 3) -> list[tuple[int, BatchLine]]:
    found = []
    while taken := pool.take(owner, group).lines:
        found += [(each.reader_id, each.line) for each in taken]
    return found
