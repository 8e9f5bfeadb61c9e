from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from backfill.bench.throughput import ThroughputOptions, measure
from backfill.core.clock import VirtualClock
from backfill.core.config import EngineConfig
from backfill.core.counters import ClassCounters
from backfill.core.errors import BackfillError, ConfigError
from backfill.costs.behaviour import DeviceBehaviour
from backfill.execution.simulated_pipeline import SimulatedPipeline
from tests.builders import linear_cost, make_info
from tests.models.tiny import save_tiny_model


def test_figures_of_cached_prompts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model("llama", tmp_path)
    config = EngineConfig(model_dir=str(tmp_path), device="cpu", dtype="float32", kv_gib=1 / 256)
    load = ThroughputOptions(num_prompts=2, input_len=8, output_len=3, stream_len=4, first_token_samples=1)
    hits = ClassCounters(num_prefix_hit_tokens=8, num_host_prefix_hit_tokens=4)
    monkeypatch.setattr("backfill.kvcache.manager.ClassCounters", hits.copy)
    with pytest.raises(BackfillError, match="24 prompt tokens came from the prefix cache"):
        measure(config, load)


def test_first_tokens_are_sampled_and_their_median_given(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    config = EngineConfig(model_dir=str(tmp_path), device="cpu", dtype="float32", kv_gib=1 / 256)
    load = ThroughputOptions(num_prompts=2, input_len=8, output_len=3, stream_len=4, first_token_samples=4)
    figures = measure(config, load)
    samples = figures["first_token_samples_s"]
    assert isinstance(samples, list) and len(samples) == 4 and min(samples) > 0
    assert figures["first_token_s"] == statistics.median(samples)
    with pytest.raises(ConfigError, match="`input_len` and output tokens together"):
        measure(config, replace(load, input_len=1 << 20))


def test_no_step_is_in_flight_between_two_measurements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its outcome would be that of the next measurement's first step."""
    save_tiny_model("llama", tmp_path)
    info = replace(
        make_info(64, 16, max_model_len=64, num_layers=2), max_steps_in_flight=2, stage_layers=(1, 1)
    )
    created = SimulatedPipeline(info, DeviceBehaviour(linear_cost(1e-3)), VirtualClock())
    monkeypatch.setattr("backfill.parallel.create.create_executor", lambda config: created)
    load = ThroughputOptions(num_prompts=3, input_len=8, output_len=3, stream_len=4, first_token_samples=2)
    measure(EngineConfig(model_dir=str(tmp_path)), load)
    assert not created._steps and not created._num_tokens
