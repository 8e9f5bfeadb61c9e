"""What a torch executor makes of a model's files."""

from __future__ import annotations

from pathlib import Path

from backfill.core.clock import VirtualClock
from backfill.core.config import EngineConfig, SchedulerConfig
from backfill.core.request import FinishReason
from backfill.engine.engine import Engine
from backfill.execution.create import create_torch_executor
from tests.builders import make_request
from tests.models.tiny import save_tiny_llama_config


def test_end_tokens_outside_the_vocabulary_fail_no_step(tmp_path: Path) -> None:
    save_tiny_llama_config(tmp_path, eos_token_id=[2, 5000])
    config = EngineConfig(
        model_dir=str(tmp_path),
        device="cpu",
        dtype="float32",
        load_format="dummy",
        kv_gib=1 / 1024,
        threads=1,
    )
    engine = Engine(SchedulerConfig(), create_torch_executor(config), VirtualClock())
    engine.add(make_request(max_tokens=2, min_tokens=1))
    outputs = [output for _ in range(2) for output in engine.step()]
    assert [output.finish_reason for output in outputs] in (
        [None, FinishReason.LENGTH],
        [None, FinishReason.STOP],
    )
