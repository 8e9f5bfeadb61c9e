from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.execution.tiny import Gate, model_fixture


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.let(1000)


model_dir = model_fixture("llama")
