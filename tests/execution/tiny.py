"""Tiny models and their configurations, and block copies held at a gate."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from backfill.core.block import KVLayout
from backfill.core.config import GIB, EngineConfig, SchedulerConfig
from backfill.kernels import cpu_copies
from backfill.models.config import ModelConfig
from tests.models.tiny import save_tiny_llama_config, save_tiny_model

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


def model_fixture(*kinds: str, **changed: Any) -> Any:
    """``model_dir`` of a module: the folder of a tiny model, of one kind after another."""

    @pytest.fixture(scope="module", params=kinds)
    def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder: Path = tmp_path_factory.mktemp("model")
        save_tiny_model(request.param, folder, **changed)
        return folder

    return model_dir


def cache_fixture(scope: Literal["function", "module"] = "function") -> Any:
    """``cache`` of a module: packed layers and measurements are kept there. At first it does not exist."""

    @pytest.fixture(scope=scope, autouse=True)
    def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
        folder: Path = tmp_path_factory.mktemp("kept") / "cache"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("BACKFILL_CACHE_ROOT", str(folder))
            yield folder

    return cache


def tiny_config(
    model_dir: Path, num_blocks: int = 256, num_host_blocks: int | None = None, **changes: Any
) -> EngineConfig:
    """A float32 model on one thread.

    Args:
        num_blocks, num_host_blocks: of 8 tokens, of the KV pools; None for a host pool of the default size.
        changes: of the configuration.
    """
    model, is_int8 = ModelConfig.from_folder(model_dir), changes.get("kv_dtype") == "int8"
    layout = KVLayout(model.num_layers, model.num_kv_heads, model.head_dim, 8, 1 if is_int8 else 4)
    options: dict[str, Any] = {
        "model_dir": str(model_dir),
        "device": "cpu",
        "dtype": "float32",
        "block_size": 8,
        "threads": 1,
        "kv_gib": num_blocks * layout.block_bytes / GIB,
        "host_kv_gib": None if num_host_blocks is None else num_host_blocks * layout.block_bytes / GIB,
    }
    return EngineConfig(**options | changes)


def two_tier_config(model_dir: Path, host_kv_gib: float | None = 12 * BLOCK_BYTES / GIB) -> EngineConfig:
    """A device pool of 24 blocks beside a host pool."""
    scheduler = SchedulerConfig(checkpointing="adaptive")
    return tiny_config(model_dir, 24, host_kv_gib=host_kv_gib, scheduler=scheduler)


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
