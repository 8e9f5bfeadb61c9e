"""Ranges of the engine's options, and which need each other. ``LLM`` names them without backticks."""

from __future__ import annotations

from typing import Any

import pytest

from backfill.core.config import EngineConfig
from backfill.core.errors import ConfigError
from backfill.core.options import with_options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 12}, "^`block_size` must be 8, 16, 32 or 64"),
        ({"kv_gib": -1.0}, "^`kv_gib` must be above 0, got -1"),
        ({"kv_gib": "1"}, "^`kv_gib` must be a number or None, got '1'"),
        ({"gpu_memory_utilization": 0.0}, "^`gpu_memory_utilization` must be above 0 and at most 1"),
        ({"max_model_len": 0}, "^`max_model_len` must be at least 1"),
        ({"max_model_len": "long"}, "^`max_model_len` must be a number such as 4096 or 4k"),
        ({"threads": 0}, "^`threads` must be at least 1"),
        ({"engine_hang_timeout": -1}, "^`engine_hang_timeout` must be at least 0"),
        ({"dtype": "int8"}, "^`dtype` must be"),
        ({"policy": "best"}, "^`policy` must be slo"),
        ({"ttft_slo": 0.0}, "^`ttft_slo` must be above 0"),
        ({"tpot_slo": float("nan")}, "^`tpot_slo` must be finite and above 0"),
        ({"promote_before": -1.0}, "^`promote_before` must be at least 0"),
        ({"max_stop_s": float("inf")}, "^`max_stop_s` must be finite and above 0, got inf"),
        ({"safepoints": 1}, "^`safepoints` must be true or false"),
        ({"max_num_seqs": True}, "^`max_num_seqs` must be a whole number"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, r"^`max_num_batched_tokens` \(4\).* \(8\)"),
        ({"max_prefill_chunk_tokens": 0}, "^`max_prefill_chunk_tokens` must be at least 1"),
        ({"host_kv_gib": 0, "checkpointing": "eager"}, "^`checkpointing` eager needs a pool"),
        ({"host_kv_gib": 0, "checkpointing": "a:B"}, "^`checkpointing` a:B needs a pool"),
        (
            {"checkpointing": "late"},
            "^`checkpointing` must be adaptive, eager, swap, lazy, none or module:Class",
        ),
        ({"checkpointing": "../a:B"}, "^`checkpointing` must be"),
        ({"checkpointing": "a:B()"}, "^`checkpointing` must be"),
        ({"checkpoint_from": -0.1}, "^`checkpoint_from` must be at least 0 and below 1, got -0.1"),
        ({"checkpoint_all_from": 1.1}, "^`checkpoint_all_from` must be above 0 and at most 1, got 1.1"),
        ({"checkpoint_from": 0.9}, r"^`checkpoint_from` \(0.9\) must be below `checkpoint_all_from` \(0.9\)"),
        ({"checkpoint_from": 0.4, "checkpointing": "eager"}, "^`checkpoint_from` 0.4 is of no use"),
        ({"checkpoint_all_from": 1, "host_kv_gib": 0}, "^`checkpoint_all_from` 1 is of no use"),
    ],
)
def test_an_option_that_cannot_be_is_named_with_what_it_may_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_options(EngineConfig, options).validate()


def test_an_engine_without_online_requests_needs_no_profile_and_keeps_what_it_preempts() -> None:
    offline = EngineConfig(max_model_len=64).for_offline_work()
    assert (offline.scheduler.policy, offline.scheduler.checkpointing) == ("priority", "adaptive")
    assert offline.max_model_len == 64
    assert EngineConfig(host_kv_gib=0).for_offline_work().scheduler.checkpointing == "none"
