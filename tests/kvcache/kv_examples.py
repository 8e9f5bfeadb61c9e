"""Builders of examples of the KV cache. Each of them checks the model's memory after what it does."""

from __future__ import annotations

import random
from collections.abc import Sequence

from backfill.core.config import CheckpointingName
from backfill.core.plan import CopyDirections
from backfill.core.request import ServiceClass
from backfill.kvcache.content import BlockKey, BlockState, Evictable
from tests.builders import make_request
from tests.kvcache.kv_model import CacheModel, Running, Setup

SIZE = 4
ONLINE, OFFLINE = ServiceClass.ONLINE, ServiceClass.OFFLINE
A, B, C = list(range(100, 116)), list(range(200, 216)), list(range(300, 316))


def make_cache(
    num_blocks: int = 8,
    num_host_blocks: int = 0,
    policy: CheckpointingName = "none",
    blocking: CopyDirections = CopyDirections.NONE,
    *,
    prefix_caching: bool = True,
    bidirectional: bool = False,
) -> CacheModel:
    setup = Setup(
        num_blocks, SIZE, num_host_blocks, 1000, policy, blocking, prefix_caching, "owner", bidirectional
    )
    model = CacheModel(setup, random.Random(0))
    model.advance(0.0, 100)
    return model


def expect_reuse(model: CacheModel) -> None:
    """Online requests have found all of their prompts so far, so what they leave is protected."""
    for _ in range(50):
        model.cache.protection.observe([BlockKey(b"key")], 1, None, 0.0)


def submit(model: CacheModel, tokens: Sequence[int], service_class: ServiceClass = OFFLINE) -> Running:
    return model.submit(make_request(prompt_token_ids=tokens, service_class=service_class, max_tokens=9))


def admit(model: CacheModel, each: Running, limit: Evictable = Evictable.ALL) -> int:
    """Admit a request; returns the tokens that it found."""
    assert model.admit(each, limit, 0, may_preempt=False)
    model.check()
    return each.request.num_computed_tokens


def compute(model: CacheModel, each: Running, end: int | None = None) -> None:
    end = end or each.request.num_tokens
    assert model.grow(each, end, Evictable.ALL)
    if CopyDirections.RESTORE in model.setup.blocking:
        model.take_copies()
    model.compute(each, each.request.num_computed_tokens, end)
    model.commit(each, end)
    model.check()


def run(model: CacheModel, tokens: Sequence[int], service_class: ServiceClass = OFFLINE) -> Running:
    """A request whose tokens are all computed, and one more sampled."""
    each = submit(model, tokens, service_class)
    admit(model, each)
    compute(model, each)
    each.request.append(7)
    return each


def leave(model: CacheModel, tokens: Sequence[int], service_class: ServiceClass = OFFLINE) -> None:
    """A request is served, and its content stays."""
    model.free(run(model, tokens, service_class))
    model.check()


def found(model: CacheModel, tokens: Sequence[int]) -> int:
    """Tokens that a request with these and one more would find."""
    each = submit(model, [*tokens, 7])
    num_tokens = model.cache.match(each.request).num_tokens
    model.free(each)
    return num_tokens


def take(model: CacheModel, num_blocks: int, limit: Evictable = Evictable.ALL) -> None:
    """Evict content for so many blocks, which are empty afterwards."""
    each = submit(model, [num_blocks])
    admit(model, each, limit)
    assert model.grow(each, num_blocks * SIZE, limit)
    model.free(each)
    model.check()


def copy_all(model: CacheModel) -> int:
    """Begin and complete copies; returns how many."""
    copies = model.take_copies()
    num_copies = sum(
        map(len, (copies.checkpoint, copies.restore, copies.slot_checkpoint, copies.slot_restore))
    )
    model.complete(list(model.in_flight))
    model.end_restores()
    model.check()
    return num_copies


def swap_out(model: CacheModel, *requests: Running) -> None:
    """Preempt the requests, copy what they want, and evict all that nobody uses from the device."""
    for each in requests:
        model.preempt(each)
    copy_all(model)
    take(model, model.cache.counts.available(Evictable.ALL))


def checkpointed(model: CacheModel, tokens: Sequence[int]) -> Running:
    """A request whose tokens are all computed and copied."""
    each = run(model, tokens)
    copy_all(model)
    return each


def num_copied(model: CacheModel, each: Running) -> int:
    """Blocks of a running request with a host copy, complete or in flight."""
    num_blocks = len(model.cache.table(each.request.request_id))
    states = [model.block_of(each, index * SIZE).state for index in range(num_blocks)]
    return sum(state in (BlockState.REFERENCED_COPIED, BlockState.ONLINE_COPIED) for state in states)
