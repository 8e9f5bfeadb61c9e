"""What the engine finds wrong with the options of ``backfill serve``."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from backfill.core.config import EngineConfig
from backfill.engine.process import load_engine
from tests.api.servers import quick_profile
from tests.builders import make_profile
from tests.cli.running import run_cli_here

MODEL_OPTIONS = ("--dtype", "float32", "--threads", "1")


class ServerInThisProcess:
    """Loads its engine here; all that these options lead to is a refusal."""

    def __init__(self, server_config: object, engine_config: EngineConfig, served: object, **_: Any) -> None:
        self._engine_config = engine_config

    async def run(self, listener: socket.socket) -> None:
        with listener:
            load_engine(self._engine_config)
        raise AssertionError("the engine was loaded")


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("backfill.api.server.Server", ServerInThisProcess)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--kv-gib", "100000"), "Not enough memory"),
        (("--kv-gib", "1e-7"), "raise --kv-gib"),
        (("--threads", "100000"), "--threads must be at most"),
        (("--max-model-len", "33000"), "--max-model-len 33000 exceeds the model's context of 32768"),
        (("--kv-gib", "0.001", "--max-model-len", "8k"), "raise --kv-gib"),
        (("--dtype", "float16"), "float16"),
        (("--device", "cuda"), "--device cuda"),
        (("--host-kv-gib", "1e-7"), "--host-kv-gib"),
        (("--host-kv-gib", "100000"), "--host-kv-gib"),
        (("--profile", "/no/such/profile"), "/no/such/profile cannot be read"),
        (("--profile", "{folder}/corrupt.json"), "corrupt.json is not JSON"),
        (("--profile", "{folder}/profile.json"), "is of another model"),
        (("--profile", "{quick}", "--ttft-slo", "1e-9"), "--ttft-slo 1e-09: one request alone"),
        (("--profile", "{quick}", "--tpot-slo", "1e-9"), "--tpot-slo 1e-09: one request alone"),
    ],
)
def test_options_that_the_engine_refuses_are_told_in_a_line(
    small_model: Path, tmp_path: Path, arguments: tuple[str, ...], part: str
) -> None:
    make_profile().save(tmp_path / "profile.json")
    (tmp_path / "corrupt.json").write_text('{"format": 2, ')
    quick = quick_profile(str(small_model), *MODEL_OPTIONS) if "{quick}" in arguments else ""
    options = [argument.format(folder=tmp_path, quick=quick) for argument in arguments]
    result = run_cli_here(
        *("serve", str(small_model), *MODEL_OPTIONS, "--port", "0", "--data-dir", str(tmp_path)), *options
    )
    assert result.returncode == 1
    assert part in result.stderr
    assert "Traceback" not in result.stderr
    assert len([line for line in result.stderr.splitlines() if line.startswith("backfill: ")]) == 1
