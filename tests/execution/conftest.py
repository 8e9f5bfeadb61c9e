from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.execution.tiny import Gate
from tests.models.tiny import save_tiny_model


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.let(1000)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny llama."""
    folder: Path = tmp_path_factory.mktemp("model")
    save_tiny_model("llama", folder)
    return folder
