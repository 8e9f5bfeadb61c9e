"""What the engine finds wrong with the options of ``backfill serve``."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from backfill.cli.serve import _sizes
from backfill.cli.serve_replicas import _server_of
from backfill.cli.startup import first_request
from backfill.core.config import EngineConfig
from backfill.engine.client import EngineClient
from backfill.engine.options import ModelOptions
from backfill.engine.process import load_engine
from backfill.http.config import ServerConfig
from backfill.jobs.config import JobsConfig
from backfill.jobs.private_files import DataFolderLock
from tests.builders import make_info, make_profile
from tests.cli.running import assert_refused, run_cli_here

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
    monkeypatch.setattr(EngineClient, "launch", lambda _: None)
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
        (
            ("--checkpointing", "no.module:Policy"),
            "--checkpointing no.module:Policy: no.module cannot be imp",
        ),
        (("--host-kv-gib", "100000"), "--host-kv-gib"),
        (
            ("--offload-interval", "5"),
            "--offload-interval must be none, auto or at most 4, the model's layers, got 5",
        ),
        (("--offload-interval", "2.5"), "a whole number of at least 1, got '2.5'"),
        (
            ("--offload-interval", "0"),
            "--offload-interval must be none, auto or a whole number of at least 1",
        ),
        (("--device-memory", "0"), "--device-memory must be above 0"),
        (
            ("--device-memory", "0.01"),
            "--device-memory 0.010 GiB is too small with --offload-interval none",
        ),
        (("--profile", "/no/such/profile"), "/no/such/profile cannot be read"),
        (("--profile", "{folder}/corrupt.json"), "corrupt.json is not JSON"),
        (("--profile", "{folder}/profile.json"), "is of another model"),
    ],
)
def test_options_that_the_engine_refuses_are_told_in_a_line(
    small_model: Path, tmp_path: Path, arguments: tuple[str, ...], part: str
) -> None:
    make_profile().save(tmp_path / "profile.json")
    (tmp_path / "corrupt.json").write_text('{"format": 4, ')
    options = [argument.format(folder=tmp_path) for argument in arguments]
    result = run_cli_here(
        *("serve", str(small_model), *MODEL_OPTIONS, "--port", "0", "--data-dir", str(tmp_path)), *options
    )
    assert_refused(result, part)


def test_a_folder_without_a_tokenizer_is_refused_before_an_engine_is_launched(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineClient, "launch", lambda _: pytest.fail("launched"))
    model = tmp_path / "model"
    model.mkdir()
    shutil.copy(small_model / "config.json", model)
    options = ("--load-format", "dummy", "--port", "0", "--data-dir", str(tmp_path))
    assert_refused(run_cli_here("serve", str(model), *options), "model has no tokenizer.json")


@pytest.mark.parametrize(
    ("index", "part"),
    [
        (None, "model holds no weights: neither model.safetensors nor model.safetensors.index.json"),
        (
            {"a": "model-1.safetensors"},
            "model-1.safetensors does not exist, but model.safetensors.index.json",
        ),
    ],
)
def test_a_folder_without_weights_is_refused_before_an_engine_is_launched(
    small_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    index: dict[str, str] | None,
    part: str,
) -> None:
    monkeypatch.setattr(EngineClient, "launch", lambda _: pytest.fail("launched"))
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(small_model / name, model)
    if index is not None:
        (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    options = ("--port", "0", "--data-dir", str(tmp_path))
    assert_refused(run_cli_here("serve", str(model), *options), part)


@pytest.mark.parametrize(
    ("version", "part"),
    [("2.13.0+cpu", "torch that is installed, 2.13.0+cpu, has no CUDA"), ("2.13.0", "no driver of a GPU")],
)
def test_cuda_that_cannot_be_there_is_refused_before_an_engine_is_launched(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, part: str
) -> None:
    monkeypatch.setattr(EngineClient, "launch", lambda _: pytest.fail("launched"))
    monkeypatch.setattr("importlib.metadata.version", lambda _: version)
    monkeypatch.setattr("backfill.execution.machine._may_have_driver", lambda: False)
    options = ("--device", "cuda", "--port", "0", "--data-dir", str(tmp_path))
    assert_refused(run_cli_here("serve", str(small_model), *options), part)


def test_the_engine_has_the_last_word_on_cuda(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "2.13.0")
    monkeypatch.setattr("backfill.execution.machine._GPU_DEVICES", ("/dev/null",))
    options = ("--device", "cuda", "--port", "0", "--data-dir", str(tmp_path))
    result = run_cli_here("serve", str(small_model), *options)
    assert_refused(result, "--device cuda: torch finds no CUDA device here")


def test_a_size_that_does_not_divide_the_model_is_refused_with_those_that_do(
    small_model: Path, tmp_path: Path
) -> None:
    options = ("--tensor-parallel-size", "3", "--port", "0", "--data-dir", str(tmp_path))
    result = run_cli_here("serve", str(small_model), *options)
    assert_refused(result, "--tensor-parallel-size 3: the model has 4 attention heads")


@pytest.mark.parametrize("asks_for_keys", [False, True])
@pytest.mark.parametrize("max_model_len", [2, 16, 2048])
def test_the_request_that_is_printed_can_be_sent(max_model_len: int, asks_for_keys: bool) -> None:
    words = shlex.split(
        first_request("http://127.0.0.1:8000", max_model_len, asks_for_keys=asks_for_keys).partition(":")[2]
    )
    body = json.loads(words[words.index("-d") + 1])
    assert ("Authorization: Bearer $KEY" in words) == asks_for_keys
    if max_model_len < 128:
        assert words[1].endswith("/v1/completions")
        assert 1 + body["max_tokens"] <= max_model_len
    else:
        assert words[1].endswith("/v1/chat/completions")


@pytest.mark.parametrize(("device", "num_ranks"), [("cpu", 3), ("cuda", 3), ("cpu", 1)])
def test_the_banner_says_how_ranks_share_processors(device: str, num_ranks: int) -> None:
    config = EngineConfig(tensor_parallel_size=num_ranks, threads=7)
    text = _sizes(dataclasses.replace(make_info(), device=device), config)
    is_said = device == "cpu" and num_ranks > 1
    assert ("3 ranks divide the threads: 2 threads each" in text) == is_said


def test_shedding_needs_the_policy_that_knows_costs(small_model: Path, tmp_path: Path) -> None:
    options = ("--shed-hopeless", "--policy", "fcfs", "--port", "0", "--data-dir", str(tmp_path))
    result = run_cli_here("serve", str(small_model), *options)
    assert result.returncode == 1
    assert "--shed-hopeless needs --policy slo" in result.stderr


def test_a_data_folder_that_is_taken_is_refused_before_an_engine_is_launched(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[EngineClient] = []
    monkeypatch.setattr(EngineClient, "launch", launched.append)
    lock = DataFolderLock(tmp_path, "http://127.0.0.1:1")
    lock.acquire()
    result = run_cli_here(
        "serve", str(small_model), *MODEL_OPTIONS, "--port", "0", "--data-dir", str(tmp_path)
    )
    lock.release()
    assert result.returncode == 1
    assert f"is in use by the server with process id {os.getpid()} at http://127.0.0.1:1" in result.stderr
    assert launched == []


@pytest.mark.parametrize("on_ray", [False, True])
def test_replicas_have_the_weights_of_owners_but_for_other_nodes(tmp_path: Path, on_ray: bool) -> None:
    file = tmp_path / "keys"
    run = _server_of(
        print,
        ModelOptions(),
        ServerConfig(api_key_file=file),
        JobsConfig(data_dir=tmp_path),
        on_ray,
        EngineConfig(),
        "key",
    )
    server = cast(partial[None], run).args[1]
    assert server.api_key == ("router=key",)
    assert server.api_key_file == (None if on_ray else file)
