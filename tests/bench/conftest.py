from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.servers import RunningServer, small_server


@pytest.fixture(scope="package")
def server(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    data_dir = tmp_path_factory.mktemp("data")
    with small_server(small_model, "--max-model-len", "512", data_dir=data_dir) as server:
        yield server
