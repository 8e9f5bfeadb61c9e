"""Offloading saves memory as the operating system counts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from backfill.models.config import ModelConfig
from backfill.offloading.interval import num_device_layers
from tests.models.tiny import save_tiny_llama_config

NUM_LAYERS = 24
# Prints the anonymous memory that a loaded model takes, in bytes.
SCRIPT = """
import json, sys
from pathlib import Path
from backfill.core.config import EngineConfig
from backfill.execution.create import create_torch_executor

def anonymous():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) * 1024

folder, interval = sys.argv[1:]
before = anonymous()
executor = create_torch_executor(EngineConfig(
    model_dir=folder, device="cpu", dtype="float32", load_format="dummy", kv_gib=0.01, threads=1,
    offload_interval=interval,
))
print(json.dumps(anonymous() - before))
"""


def anonymous_bytes(folder: Path, interval: str, cache: Path) -> int:
    command = [sys.executable, "-c", SCRIPT, str(folder), interval]
    environment = {**os.environ, "BACKFILL_CACHE_ROOT": str(cache)}
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    found: int = json.loads(output)
    return found


@pytest.mark.slow  # three processes; what is planned and streamed is in test_memory.py and test_offloading.py
def test_what_is_offloaded_takes_no_memory(tmp_path: Path) -> None:
    """Also at the first start, which writes the file."""
    save_tiny_llama_config(
        tmp_path, num_hidden_layers=NUM_LAYERS, hidden_size=512, intermediate_size=1024,
        num_attention_heads=8, num_key_value_heads=8,
    )  # fmt: skip
    layer_bytes = ModelConfig.from_folder(tmp_path).layer_parameters * 4
    cache = tmp_path / "cache"
    taken = {interval: anonymous_bytes(tmp_path, interval, cache) for interval in ("none", "1")}
    again = anonymous_bytes(tmp_path, "1", cache)
    num_saved = NUM_LAYERS - num_device_layers(NUM_LAYERS, 1)
    # Loading allocates and keeps some memory of its own, and large pages are rounded up: tens of MB.
    least_saved = num_saved * layer_bytes * 2 / 3
    assert taken["none"] - taken["1"] >= least_saved
    assert taken["none"] - again >= least_saved
