from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from backfill.bench.throughput import ThroughputOptions, measure
from backfill.core.config import EngineConfig
from backfill.core.errors import ConfigError
from tests.models.tiny import save_tiny_model


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
