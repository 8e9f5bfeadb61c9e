from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import peers
import pytest
from machine_limits import floor_of

from backfill.models.config import ModelConfig
from tests.api.servers import TIMEOUT_S
from tests.models.tiny import save_tiny_model

WORK = {"num_prompts": 4, "input_len": 32, "output_len": 8, "stream_len": 16}
# So much arithmetic that only bytes take time, and the reverse.
BYTES_BIND = {"matrix_gflop_s": 1e15, "read_gb_s": 1.0}
PRODUCTS_BIND = {"matrix_gflop_s": 1.0, "read_gb_s": 1e15}
FIGURES = {"batch_tok_s": 100.0, "stream_tok_s": 10.0, "first_token_s": 0.5}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model("llama", folder)
    return replace(ModelConfig.from_folder(folder), tie_word_embeddings=True)


def prints(text: str, *, then: str = "") -> peers.EngineCommand:
    return peers.EngineCommand([sys.executable, "-c", f"print({text!r}); {then}"], (), None)


def test_bytes_are_read_once_for_each_step_and_the_prefill_is_one(config: ModelConfig) -> None:
    floor = floor_of(config, BYTES_BIND, **WORK)
    weights_s = config.num_parameters * 2 / 1e9
    kv_s = config.kv_bytes_per_token(2) / 1e9
    # Token 2 is computed with 33 tokens of context, the last, token n, with 32 + n - 1.
    assert floor["first_token_s"] == pytest.approx(weights_s)
    stream_s = 16 * weights_s + kv_s * sum(range(33, 32 + 16))
    assert floor["stream_tok_s"] == pytest.approx(16 / stream_s)
    batch_s = 8 * weights_s + 4 * kv_s * sum(range(33, 32 + 8))
    assert floor["batch_tok_s"] == pytest.approx(4 * (32 + 8) / batch_s)
    half = floor_of(config, BYTES_BIND, **WORK, bytes_per_weight=1)
    assert half["first_token_s"] == pytest.approx(weights_s / 2)


def test_products_count_each_token_once_and_logits_once_for_each_output(config: ModelConfig) -> None:
    floor = floor_of(config, PRODUCTS_BIND, **WORK, bytes_per_weight=0.7)
    embedding = config.vocab_size * config.hidden_size
    layers = config.num_parameters - embedding
    flops = 2 * 4 * ((32 + 7) * layers + 8 * embedding)
    assert floor["batch_tok_s"] == pytest.approx(4 * (32 + 8) / (flops / 1e9))
    assert floor["first_token_s"] == pytest.approx(2 * (32 * layers + embedding) / 1e9)


def test_a_failure_costs_its_engine_its_round_and_nothing_else(
    config: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    marker = tmp_path / "ran"
    once = f"import pathlib; p = pathlib.Path({str(marker)!r}); p.exists() and exit('worn out'); p.touch()"
    engines = {
        "backfill": prints(json.dumps({**FIGURES, "first_token_samples_s": [0.5] * 5})),
        "fragile": prints(json.dumps({**FIGURES, "batch_tok_s": 50}), then=once),
        "absent": peers.EngineCommand(["/no/such/python"], (), None),
    }
    # The limits are measured by running this very file; let it answer at once.
    limits = tmp_path / "limits.py"
    limits.write_text(f"print('''{json.dumps({**BYTES_BIND, 'copy_gb_s': 1.0})}''')")
    monkeypatch.setattr(peers, "__file__", str(limits))
    result: dict[str, Any] = {
        "processor": "p",
        "cores": 2,
        "rounds": 2,
        "work": WORK,
        "bytes_per_weight": 0.7,
        "versions": {},
        "orders": [],
        "limits_of_rounds": [],
        "runs": {name: [] for name in engines},
        "failures": [],
    }
    for round_number in (1, 2):
        peers.run_round(round_number, engines, result, TIMEOUT_S)
    result |= peers.summary_of(result, config)
    assert [entry["round"] for entry in result["runs"]["fragile"]] == [1]
    assert [entry["round"] for entry in result["runs"]["backfill"]] == [1, 2]
    assert [(f["round"], f["engine"]) for f in result["failures"]] == [
        (1, "absent"),
        (2, "fragile"),
        (2, "absent"),
    ]
    assert result["orders"][1] == ["fragile", "absent", "backfill"]
    assert result["engines"].keys() == result["ranges"].keys() == {"backfill", "fragile"}
    assert result["is_complete"] is False
    capsys.readouterr()
    peers.print_report(result)
    report = capsys.readouterr().out
    assert "| fragile | 50 (50 to 50; ours 2.00 x)" in report
    assert "| absent | failed | failed | failed |" in report
    assert "first token of fragile: 1 a round, of ours 5" in report
    assert "FAILED in round 2: fragile: ended with 1: worn out" in report
