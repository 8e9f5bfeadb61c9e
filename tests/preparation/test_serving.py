from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from backfill.core.errors import ModelError
from backfill.preparation.messages import PreparationSetup
from backfill.preparation.serving import ServingProcesses
from backfill.protocol.preparer import ServedModel

pytestmark = pytest.mark.anyio


class Client:
    """An engine's client whose engine never loads."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def start(self) -> None:
        await asyncio.Event().wait()

    def kill(self) -> None:
        self.calls.append("kill")

    async def stop(self) -> None:
        self.calls.append("stop")


async def never(_: object) -> None:
    raise AssertionError("the engine is ready")


@pytest.mark.parametrize(("at_once", "calls"), [(False, ["stop"]), (True, ["kill", "stop"])])
async def test_an_engine_that_is_ended_at_once_is_not_asked_and_not_started_again(
    small_model: Path, at_once: bool, calls: list[str]
) -> None:
    client: Any = Client()
    model = ServedModel(names=("m",), root="m", folder=small_model, created=0)
    processes = ServingProcesses(client, PreparationSetup(model=model, order="fcfs"))
    supervising = processes.start(on_ready=never, on_lost=lambda: client.calls.append("lost"))
    await asyncio.sleep(0)
    await processes.stop_engine(at_once=at_once)
    assert supervising.cancelled()
    assert client.calls == calls


async def test_a_tokenizer_that_cannot_be_loaded_ends_the_start_at_once(tmp_path: Path) -> None:
    client: Any = Client()
    model = ServedModel(names=("m",), root="m", folder=tmp_path, created=0)
    processes = ServingProcesses(client, PreparationSetup(model=model, order="fcfs"))
    supervising = processes.start(on_ready=never, on_lost=lambda: client.calls.append("lost"))
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        await asyncio.wait_for(supervising, 30)
    await processes.stop_engine()
    assert client.calls == ["stop"]


async def test_a_chat_template_that_does_not_parse_is_warned_of(
    small_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(small_model, folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}\n{% if %}")
    client: Any = Client()
    model = ServedModel(names=("m",), root="m", folder=folder, created=0)
    processes = ServingProcesses(client, PreparationSetup(model=model, order="fcfs"))
    processes.start(on_ready=never, on_lost=lambda: client.calls.append("lost"))
    await processes.loaded()
    await processes.stop_engine()
    assert "chat_template of the model, line 2: Expected an expression" in caplog.text
