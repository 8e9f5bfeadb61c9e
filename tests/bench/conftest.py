from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.servers import RunningServer, running_server


@pytest.fixture(scope="package")
def server(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    options = ("--kv-gib", "0.25", "--max-model-len", "512")
    with running_server(*options, data_dir=tmp_path_factory.mktemp("data")) as server:
        yield server
