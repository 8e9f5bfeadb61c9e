"""What the engine finds wrong with the options of ``backfill serve``."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from backfill.cli.serve import _sizes
from backfill.cli.serve_replicas import _server_of
from backfill.cli.startup import first_request, process_age_s
from backfill.core.config import EngineConfig
from backfill.core.errors import InsufficientMemory
from backfill.engine.client import EngineClient
from backfill.engine.options import ModelOptions, check_engine
from backfill.engine.process import load_engine
from backfill.execution.create import target_of
from backfill.http.config import ServerConfig
from backfill.jobs.config import JobsConfig
from backfill.jobs.private_files import DataFolderLock
from backfill.kernels.isa import ISA_VARIABLE
from tests.builders import make_info, make_profile
from tests.cli.running import assert_refused, run_cli_here

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123456789abcdef\nsize 13031648\n"
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
        (("--dtype", "float16"), "float16"),
        (("--device", "cuda"), "--device cuda"),
        (("--host-kv-gib", "1e-7"), "--host-kv-gib"),
        (
            ("--checkpointing", "no.module:Policy"),
            "--checkpointing no.module:Policy: no.module cannot be imp",
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
        (
            ("--tensor-parallel-size", "3", "--threads", "3"),
            "--tensor-parallel-size 3: the model has 4 attention heads",
        ),
        (("--shed-hopeless", "--policy", "fcfs"), "--shed-hopeless needs --policy slo"),
    ],
)
def test_options_that_the_engine_refuses_are_told_in_a_line(
    small_model: Path, tmp_path: Path, arguments: tuple[str, ...], part: str
) -> None:
    result = run_cli_here(
        *("serve", str(small_model), *MODEL_OPTIONS, "--port", "0", "--data-dir", str(tmp_path)), *arguments
    )
    assert_refused(result, part)


RefusedEarly = Callable[..., None]


@pytest.fixture
def refused_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RefusedEarly:
    """Asserts that an error contains a part, no engine is launched, and nothing says that a server starts."""
    monkeypatch.setattr(EngineClient, "launch", lambda _: pytest.fail("launched"))

    def check(model: Path, part: str, *options: str, data_dir: Path = tmp_path) -> None:
        result = run_cli_here("serve", str(model), "--port", "0", "--data-dir", str(data_dir), *options)
        assert_refused(result, part)
        assert "starting on" not in result.stderr

    return check


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--kv-gib", "100000"), "Not enough memory on cpu: the KV pool needs 100000.00 GiB"),
        (("--kv-gib", "1e-7"), "raise --kv-gib"),
        (("--threads", "100000"), "--threads must be at most"),
        (("--max-model-len", "33000"), "--max-model-len 33000 exceeds the model's context of 32768"),
        (("--kv-gib", "0.001", "--max-model-len", "8k"), "raise --kv-gib"),
        (("--kv-gib", "0.001", "--max-model-len", "1056"), "it holds 1040 tokens"),
        (("--kv-gib", "0.001", "--max-model-len", "2097", "--dtype", "bfloat16"), "it holds 2096 tokens"),
        (("--host-kv-gib", "100000"), "--host-kv-gib"),
        (
            ("--offload-interval", "5"),
            "--offload-interval must be none, auto or at most 4, the model's layers, got 5",
        ),
        (("--profile", "/no/such/profile"), "/no/such/profile cannot be read"),
        (("--profile", "{folder}/corrupt.json"), "corrupt.json is not JSON"),
        (("--profile", "{folder}/profile.json"), "is of another model"),
    ],
)
def test_sizes_and_files_that_cannot_be_are_refused_before_an_engine_is_launched(
    small_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refused_early: RefusedEarly,
    arguments: tuple[str, ...],
    part: str,
) -> None:
    monkeypatch.setattr("backfill.execution.machine._may_have_driver", lambda: False)
    make_profile().save(tmp_path / "profile.json")
    (tmp_path / "corrupt.json").write_text('{"format": 4, ')
    options = [argument.format(folder=tmp_path) for argument in arguments]
    refused_early(small_model, part, *options)


@pytest.mark.parametrize("command", ["serve", "run-batch"])
def test_an_unknown_variant_of_the_kernels_is_refused_before_an_engine_is_launched(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "z80")
    monkeypatch.setattr(EngineClient, "launch", lambda _: pytest.fail("launched"))
    (tmp_path / "in.jsonl").write_text("{}")
    files = (
        () if command == "serve" else ("-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"))
    )
    result = run_cli_here(command, "--model", str(small_model), "--device", "cpu", *files)
    assert_refused(result, f"{ISA_VARIABLE}: this machine has generic")


@pytest.mark.parametrize("asked", [1040, 1041])
def test_the_engine_and_the_check_before_it_count_the_same_tokens(
    small_model: Path, tmp_path: Path, asked: int
) -> None:
    config = EngineConfig(model_dir=str(small_model), kv_gib=0.001, max_model_len=asked, device="cpu")
    refusals = []
    for check in (check_engine, lambda config: target_of(config).plan_rank()):
        try:
            check(config)
        except InsufficientMemory as error:
            refusals.append(str(error))
    assert len(refusals) == (0 if asked == 1040 else 2)
    assert len(set(refusals)) <= 1


def copy_of(small_model: Path, folder: Path) -> Path:
    return Path(shutil.copytree(small_model, folder / "model"))


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"num_hidden_layers": 5}, "tensor model.layers.4.input_layernorm.weight [64] is missing from"),
        ({"intermediate_size": 96}, "layers.0.mlp.gate_proj.weight has shape [80, 64], expected [96, 64]"),
        ({"tie_word_embeddings": False}, "tensor lm_head.weight [49152, 64] is missing from"),
    ],
)
def test_weights_of_another_model_are_refused_before_an_engine_is_launched(
    small_model: Path, tmp_path: Path, refused_early: RefusedEarly, changed: dict[str, Any], part: str
) -> None:
    path = copy_of(small_model, tmp_path) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    refused_early(path.parent, part)


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("model.safetensors", None, "model.safetensors is damaged or truncated: its tensors take"),
        ("model.safetensors", b"", "model.safetensors is damaged or truncated: it has 0 bytes"),
        ("model.safetensors", LFS_POINTER, "model.safetensors is a pointer of Git LFS, and not the file"),
        ("tokenizer.json", LFS_POINTER, "tokenizer.json is a pointer of Git LFS, and not the file: run git"),
        ("tokenizer.json", None, "tokenizer.json is not valid JSON"),
        (
            "tokenizer.json",
            b"{}",
            "tokenizer.json is not a valid tokenizer: Object missing required field model",
        ),
        ("tokenizer.json", b'{"model": {"vocab": {}}}', "tokenizer.json has no added_tokens, which must be"),
        ("tokenizer_config.json", b"{", "tokenizer_config.json is not valid JSON"),
        ("generation_config.json", b"{", "generation_config.json is not valid JSON"),
        ("generation_config.json", b'{"top_p": 2}', "generation_config.json: top_p must be a number"),
    ],
)
def test_a_damaged_file_is_refused_by_name_before_an_engine_is_launched(
    small_model: Path,
    tmp_path: Path,
    refused_early: RefusedEarly,
    name: str,
    content: bytes | None,
    part: str,
) -> None:
    path = copy_of(small_model, tmp_path) / name
    path.write_bytes(path.read_bytes()[:-100] if content is None else content)
    refused_early(path.parent, part)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_link_to_a_file_that_is_gone_is_refused_with_where_it_leads(
    small_model: Path, tmp_path: Path, refused_early: RefusedEarly, name: str
) -> None:
    path = copy_of(small_model, tmp_path) / name
    path.unlink()
    path.symlink_to(tmp_path / "gone")
    part = f"{path} is a link to {tmp_path / 'gone'}, which is not there any more"
    refused_early(path.parent, part)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--load-format", "dummy"), "model has no tokenizer.json"),
        ((), "nor model.safetensors.index.json; and it has no tokenizer.json"),
    ],
)
def test_all_that_a_folder_lacks_is_told_at_once(
    small_model: Path, tmp_path: Path, refused_early: RefusedEarly, options: tuple[str, ...], part: str
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    shutil.copy(small_model / "config.json", model)
    refused_early(model, part, *options)


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
    small_model: Path, tmp_path: Path, refused_early: RefusedEarly, index: dict[str, str] | None, part: str
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(small_model / name, model)
    if index is not None:
        (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    refused_early(model, part)


@pytest.mark.parametrize(
    ("version", "part"),
    [("2.13.0+cpu", "torch that is installed, 2.13.0+cpu, has no CUDA"), ("2.13.0", "no driver of a GPU")],
)
def test_cuda_that_cannot_be_there_is_refused_before_an_engine_is_launched(
    small_model: Path, monkeypatch: pytest.MonkeyPatch, refused_early: RefusedEarly, version: str, part: str
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: version)
    monkeypatch.setattr("backfill.execution.machine._may_have_driver", lambda: False)
    refused_early(small_model, part, "--device", "cuda")


def test_the_engine_has_the_last_word_on_cuda(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "2.13.0")
    monkeypatch.setattr("backfill.execution.machine._GPU_DEVICES", ("/dev/null",))
    options = ("--device", "cuda", "--port", "0", "--data-dir", str(tmp_path))
    result = run_cli_here("serve", str(small_model), *options)
    assert_refused(result, "--device cuda: torch finds no CUDA device here")


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


def test_a_data_folder_that_is_taken_is_refused_before_an_engine_is_launched(
    small_model: Path, tmp_path: Path, refused_early: RefusedEarly
) -> None:
    lock = DataFolderLock(tmp_path, "http://127.0.0.1:1")
    lock.acquire()
    part = f"is in use by the server with process id {os.getpid()} at http://127.0.0.1:1"
    refused_early(small_model, part)
    lock.release()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--batch-database-url", "foo://host/x"), "--batch-database-url must be a URL of SQLite or Post"),
        (("--batch-database-url", "postgresql://127.0.0.1:1/x"), "127.0.0.1:1/x cannot be opened"),
        (("--batch-file-store", "s3:/bucket/x"), "--batch-file-store must be a folder or s3://BUCKET/PREFIX"),
        (
            ("--otlp-traces-endpoint", "localhost:4318"),
            "--otlp-traces-endpoint must be a URL such as http://",
        ),
        (("--chat-template", "{folder}/no"), "no cannot be read: No such file or directory."),
        (("--chat-template", "{folder}"), "cannot be read: Is a directory."),
        (("--threads", "100000"), "--threads must be at most"),
    ],
)
def test_what_is_wrong_whatever_the_model_is_refused_before_it_is_looked_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refused_early: RefusedEarly,
    arguments: tuple[str, ...],
    part: str,
) -> None:
    monkeypatch.setattr("backfill.cli.serve.find_folder", lambda _: pytest.fail("the model is looked for"))
    options = [argument.format(folder=tmp_path) for argument in arguments]
    refused_early(Path("org/model"), part, *options)


def test_a_revision_of_a_folder_is_refused_by_the_name_of_the_option(
    small_model: Path, refused_early: RefusedEarly
) -> None:
    part = f"--revision is only for models of the Hugging Face hub, and {small_model} is not one."
    refused_early(small_model, part, "--revision", "main")


@pytest.mark.parametrize("batch_api", ["--batch-api", "--no-batch-api"])
@pytest.mark.parametrize("below", ["", "/data", "/data/data"])
def test_a_data_folder_that_is_a_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused_early: RefusedEarly, below: str, batch_api: str
) -> None:
    monkeypatch.setattr("backfill.cli.serve.find_folder", lambda _: pytest.fail("the model is looked for"))
    file = tmp_path / "file"
    file.touch()
    data_dir = Path(f"{file}{below}")
    part = f"--data-dir {data_dir} cannot be written: {file} is no folder."
    refused_early(tmp_path, part, batch_api, data_dir=data_dir)


@pytest.mark.parametrize("batch_api", ["--batch-api", "--no-batch-api"])
def test_a_data_folder_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused_early: RefusedEarly, batch_api: str
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("filelock.FileLock.acquire", refuse)
    part = f"--data-dir {tmp_path} cannot be written: Permission denied."
    refused_early(tmp_path, part, batch_api)


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


AGE_AFTER_HALF_A_SECOND = """
import time
time.sleep(0.5)
from backfill.cli.startup import process_age_s
print(process_age_s())
"""


def test_the_age_of_a_process_counts_from_its_start() -> None:
    began_at_s = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-c", AGE_AFTER_HALF_A_SECOND], capture_output=True, text=True, check=True
    )
    assert 0.48 <= float(ran.stdout) <= time.monotonic() - began_at_s + 0.02  # in steps of 10 ms


def test_without_proc_the_age_counts_from_the_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backfill.cli.startup._IMPORTED_AT_S", time.monotonic() - 100.0)
    monkeypatch.setattr(Path, "read_text", Mock(side_effect=FileNotFoundError))
    assert process_age_s() == pytest.approx(100.0, abs=1.0)
