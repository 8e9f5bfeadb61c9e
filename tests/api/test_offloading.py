"""A server whose weights do not fit its device memory answers as one that has them all.

What it refuses: tests/cli/test_serve.py.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from backfill.offloading.record import PerformanceRecord
from tests.api.servers import small_server, wait_until

PROMPTS = [list(range(100 + 7 * index, 160 + 9 * index)) for index in range(6)]


def serve(model: Path, data_dir: Path, *options: str) -> tuple[list[list[int]], dict[str, float]]:
    """Tokens of online and offline requests at the same time, and the metrics of offloading."""
    with small_server(model, "--policy", "slo", *options, data_dir=data_dir) as server:
        with ThreadPoolExecutor(6) as pool:
            asked = zip(PROMPTS, ["flex", "default"] * 3, strict=True)
            tokens = list(
                pool.map(lambda each: server.tokens(each[0], max_tokens=24, service_tier=each[1]), asked)
            )
        names = ("offload_interval", "offload_transferred_bytes_total", "offload_stall_seconds_total")
        wait_until(lambda: server.metric("backfill:generation_tokens_total") == 144, "all tokens are counted")
        return tokens, {name: server.metric(f"backfill:{name}") for name in names}


@pytest.mark.slow  # without HTTP: tests/execution/test_offloading.py
def test_tokens_and_metrics_of_a_server_with_offloaded_layers(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 4 layers all are offloaded; the device has memory for two staging buffers."""
    expected, metrics = serve(small_model, tmp_path / "resident")
    assert set(metrics.values()) == {0.0}
    monkeypatch.setenv("BACKFILL_CACHE_ROOT", str(tmp_path / "cache"))
    objectives = ("--ttft-slo", "1000", "--tpot-slo", "1000")  # every interval holds them
    few_loads = ("--max-num-seqs", "8", "--max-num-batched-tokens", "256")  # a short measurement
    options = ("--device-memory", "0.35", "--offload-interval", "auto", *objectives, *few_loads)
    found, metrics = serve(small_model, tmp_path / "offloaded", *options)
    assert found == expected
    assert metrics["offload_interval"] == 1
    (record,) = (tmp_path / "cache" / "profiles").glob("*.offload.json")
    assert PerformanceRecord.load(record).num_layers == 4
    (packed,) = (tmp_path / "cache" / "packed").glob("*.layers")
    layer_bytes = (packed.stat().st_size - 4096) // 4
    num_transfers, rest = divmod(metrics["offload_transferred_bytes_total"], layer_bytes)
    assert rest == 0
    assert num_transfers >= 4 * 24
    assert metrics["offload_stall_seconds_total"] > 0.0
