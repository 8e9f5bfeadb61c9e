"""Requests and trees for tests of the pool."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import get_args

import numpy as np
from hypothesis import strategies as st

from backfill.blending.pool import OfflinePool
from backfill.blending.requests import OrderName, PlannedRequest, PoolRequest
from backfill.blending.resources import ResourceModel
from backfill.blending.tree import PrefixTree

LLAMA_8B_ON_A100 = ResourceModel.from_dimensions(
    parameters=8.03e9,
    hidden_size=4096,
    kv_size=8 * 128,
    num_layers=32,
    flops_per_s=312e12,
    bytes_per_s=2.039e12,
)
KV_TOKENS = 450_000
ORDERS: tuple[OrderName, ...] = get_args(OrderName)

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=6)
"""Token ids of short prompts over few tokens, so that many share prefixes and some are equal."""


def make_pool(order: OrderName = "blend", *, sample_share: float = 0.0, seed: int = 0) -> OfflinePool:
    return OfflinePool(order, LLAMA_8B_ON_A100, kv_tokens=KV_TOKENS, sample_share=sample_share, seed=seed)


def take(pool: OfflinePool, group: str | None = None, **arguments: float) -> PlannedRequest:
    """The next request, of a pool in which one waits."""
    taken = pool.take(group, **arguments)
    assert taken is not None
    return taken


def make_request(
    request_id: int,
    prompt: Sequence[int] = (1,),
    max_output_tokens: int = 100,
    known_output_tokens: int | None = None,
    group: str = "",
    complete_by_s: float | None = None,
) -> PoolRequest:
    return PoolRequest(
        request_id, array("I", prompt), max_output_tokens, known_output_tokens, group, complete_by_s
    )


def known(request_id: int, num_prompt_tokens: int, num_output_tokens: int, **fields: object) -> PoolRequest:
    """A request of known length, whose prompt shares nothing with those of other ids."""
    prompt = [1_000_000 + request_id, *range(num_prompt_tokens - 1)]
    return make_request(request_id, prompt, num_output_tokens, num_output_tokens, **fields)  # type: ignore[arg-type]


def as_bytes(prompt: Sequence[int]) -> bytes:
    return np.array(prompt, np.uint32).tobytes()


def sorted_prompts(token_ids: Sequence[Sequence[int]]) -> list[bytes]:
    return sorted(map(as_bytes, token_ids))


def make_tree(token_ids: Sequence[Sequence[int]]) -> PrefixTree:
    return PrefixTree.build(sorted_prompts(token_ids))


def num_shared(a: bytes, b: bytes) -> int:
    """Leading tokens that both have, one by one."""
    count = 0
    for x, y in zip(np.frombuffer(a, np.uint32), np.frombuffer(b, np.uint32), strict=False):
        if x != y:
            break
        count += 1
    return count
