"""Sections of ``--help`` that several commands have, and environment variables with names of their own."""

from __future__ import annotations

MODEL = "model revision served_model_name dtype load_format max_model_len chat_template generation_config"
LIMITS = "max_num_seqs max_num_batched_tokens max_prefill_chunk_tokens"

VARIABLES = {
    "kv_gib": "BACKFILL_CPU_KVCACHE_SPACE",
    "log_level": "BACKFILL_LOGGING_LEVEL",
    "download_dir": "BACKFILL_CACHE_ROOT",
}
