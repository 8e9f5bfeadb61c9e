from __future__ import annotations

from pathlib import Path

import ipc
import pytest
import step_profile

from backfill.core.config import EngineConfig
from backfill.core.counters import ClassCounters
from backfill.core.request import RequestId
from backfill.engine.messages import ClassStats, EngineStats, StepReport, StepStats, TokenOutput
from backfill.execution.create import create_torch_executor
from backfill.models.config import ModelConfig
from tests.models.tiny import save_tiny_model


def test_floors_are_the_longer_of_bytes_and_products(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    lm_head = config.hidden_size * config.vocab_size
    even = {
        "read_gb_s": 1e-3,
        "matrix_gflop_s": 1e-2,
    }  # a weight is read in 2 us and takes 0.2 us of products
    floors = step_profile.floors_ms(tmp_path, 5, 10.0, even)
    assert floors["lm_head"] == pytest.approx(2e-3 * lm_head)
    assert step_profile.floors_ms(tmp_path, 40, 10.0, even)["lm_head"] == pytest.approx(40 * 0.2e-3 * lm_head)
    assert floors["attention"] == pytest.approx(5 * 10 * config.kv_bytes_per_token(2) / 1e6 * 1e3)
    decoder = sum(value for name, value in floors.items() if name.startswith("linear "))
    norms = config.hidden_size * (2 * config.num_layers + 1)
    tables = lm_head * (1 if config.tie_word_embeddings else 2)
    assert decoder == pytest.approx(2e-3 * (config.num_parameters - tables - norms))


def test_a_report_goes_to_another_process_and_back() -> None:
    state = ClassStats(0, 0, ClassCounters())
    step = StepStats("online", 2, 0.01, 0.0)
    stats = EngineStats(state, state, 0.5, 0, 0.0, 0, step)
    report = StepReport([TokenOutput(RequestId(str(index)), 1000 + index) for index in range(64)], stats)
    figures = ipc.measure_ipc(report, repeats=20)
    assert figures["num_bytes"] > 64 * 4
    assert all(0 < figures[name] < 1 for name in ("encode_s", "decode_s", "round_trip_s"))


def test_a_step_is_timed_whole_and_by_part(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    executor = create_torch_executor(EngineConfig(model_dir=str(tmp_path), kv_gib=1 / 1024))
    whole = step_profile.profile_whole(executor, num_seqs=2, context=8, num_steps=2)
    assert 0 < whole["model_s"] < whole["step_s"]
    parts, step_s = step_profile.profile_parts(executor, num_seqs=2, context=8, num_steps=2)
    assert {"attention", "linear qkv", "lm_head", "sample", "plan", "commit"} <= parts.keys()
    assert 0 < sum(parts.values()) < step_s
