from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from tests.api.servers import RunningServer, running_server, small_server


@pytest.fixture(scope="package")
def server(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One server of the small model, shared by tests that do not change its state."""
    options = ("--max-model-len", "2048", "--max-body-bytes", "200000", "--vllm-metrics")
    options += ("--batch-max-bytes", "1000000", "--batch-max-lines", "100")
    with small_server(small_model, *options, data_dir=tmp_path_factory.mktemp("data")) as server:
        yield server


@pytest.fixture(scope="package")
def default_server(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One server of the default model: it takes many times as long, so only slow tests ask it."""
    options = ("--kv-gib", "0.25", "--max-model-len", "2048")
    with running_server(*options, data_dir=tmp_path_factory.mktemp("data")) as server:
        yield server


@pytest.fixture(scope="package")
def keyed_server(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One server of the small model whose owners are alice with two keys, bob, carol and dave."""
    owned = ("alice=one", "alice=two", "bob=three", "carol=key-of-carol", "dave=key-of-dave")
    options = [part for each in owned for part in ("--api-key", each)]
    options += ["--block-size", "16", "--max-model-len", "2048", "--vllm-metrics"]
    with small_server(small_model, *options, data_dir=tmp_path_factory.mktemp("data")) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> OpenAI:
    return server.client()
