"""A KV pool too small for its load: preempted and restored offline requests give the same tokens."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.api.servers import RunningServer, small_server, wait_until

# 60 blocks of 16 KiB hold 960 tokens; the offline requests below need 1,500.
POOL = ("--kv-gib", "0.00092", "--host-kv-gib", "0.01")
OFFLINE = [list(range(100 + 7 * index, 200 + 9 * index)) for index in range(6)]
ONLINE = [list(range(5000 + 11 * index, 5060 + 11 * index)) for index in range(6)]
NUM_OFFLINE_TOKENS = 150
_salts = itertools.count()


def complete(server: RunningServer, prompt: list[int], max_tokens: int, **fields: Any) -> list[int]:
    """The output. Each call has a salt of its own, so it finds no KV of earlier calls in the cache."""
    return server.tokens(prompt, max_tokens, cache_salt=f"call {next(_salts)}", **fields)


@pytest.mark.slow  # without HTTP: tests/engine/test_restored_tokens.py
def test_preemption_does_not_change_tokens(small_model: Path, tmp_path: Path) -> None:
    options = (*POOL, "--max-model-len", "400")
    with small_server(small_model, *options, data_dir=tmp_path) as server:
        wait_until(lambda: "backfill:host_kv_cache" in server.http.get("/metrics").text, "its gauges")
        alone = [complete(server, prompt, NUM_OFFLINE_TOKENS) for prompt in OFFLINE]
        alone += [complete(server, prompt, 12) for prompt in ONLINE]
        assert len({tuple(tokens) for tokens in alone}) == len(alone), "tokens depend on the prompt"
        assert server.metric("backfill:num_preemptions_total") == 0

        with ThreadPoolExecutor(16) as pool:
            offline = [
                pool.submit(complete, server, prompt, NUM_OFFLINE_TOKENS, service_tier="flex")
                for prompt in OFFLINE
            ]
            # One after another, so that there is always one to preempt for.
            while not all(each.done() for each in offline):
                online = [complete(server, prompt, 12) for prompt in ONLINE]
                assert online == alone[len(OFFLINE) :]

        assert [each.result() for each in offline] == alone[: len(OFFLINE)]
        num_preempted = server.metric("backfill:num_preemptions_total", **{"class": "offline"})
        assert num_preempted > 0
        checkpointed = server.metric("backfill:checkpointed_tokens_total")
        restored = server.metric("backfill:restored_tokens_total", **{"class": "offline"})
        taken = server.metric("backfill:reclaimed_tokens_total")
        overwritten = server.metric("backfill:kv_slots_overwritten_total")  # in shared blocks
        # A last block comes back whole, also if only a part of it was overwritten.
        assert 0 < restored <= taken + overwritten + 15 * num_preempted
        assert server.metric("backfill:checkpointed_bytes_total") == checkpointed * 1024
        computed = server.metric("backfill:iteration_tokens_total_sum")
        assert server.metric("backfill:recomputed_tokens_total") < 0.05 * computed
        assert server.metric("backfill:prefix_cache_hits_total") == 0, "every token was computed"
        for name in ("kv_cache_usage_perc", "host_kv_cache_usage_perc", "kv_blocks_checkpointed"):
            # Copies may end after the last request.
            wait_until(lambda gauge=f"backfill:{name}": server.metric(gauge) == 0, f"free blocks: {name}")
