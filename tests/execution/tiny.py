"""Configurations of tiny models, and block copies held at a gate."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backfill.core.config import GIB, EngineConfig, SchedulerConfig
from backfill.kernels import cpu_copies
from tests.models.tiny import save_tiny_llama_config

BLOCK_BYTES = 3 * 2 * 2 * 8 * 8 * 4  # 3 layers, K and V of 2 heads of 8 float32, 8 tokens


def dummy_config(folder: Path, **model: Any) -> EngineConfig:
    """A model of a few thousand random weights, on one thread.

    Args:
        model: fields of its config.json.
    """
    save_tiny_llama_config(folder, **model)
    return EngineConfig(
        model_dir=str(folder),
        device="cpu",
        dtype="float32",
        load_format="dummy",
        kv_gib=1 / 1024,
        threads=1,
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=256),
    )


def two_tier_config(model_dir: Path, host_kv_gib: float | None = 12 * BLOCK_BYTES / GIB) -> EngineConfig:
    """A device pool of 24 blocks beside a host pool."""
    return EngineConfig(
        model_dir=str(model_dir),
        dtype="float32",
        block_size=8,
        device="cpu",
        kv_gib=24 * BLOCK_BYTES / GIB,
        host_kv_gib=host_kv_gib,
        scheduler=SchedulerConfig(checkpointing="adaptive"),
    )


class Gate:
    """Holds the copy thread before each of its chunks until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._may_go = threading.Semaphore(0)
        for name in ("copy_blocks", "copy_slots"):
            monkeypatch.setattr(cpu_copies, name, self._held(getattr(cpu_copies, name)))

    def _held(self, copy: Callable[..., None]) -> Callable[..., None]:
        def held(*arguments: object) -> None:
            assert self._may_go.acquire(timeout=30.0)
            copy(*arguments)

        return held

    def let(self, num_chunks: int) -> None:
        self._may_go.release(num_chunks)
