from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from backfill.jobs.manager import JobManager
from tests.jobs.doubles import DEFAULT_LIMITS, Start, make_storage_quick, started
from tests.postgres import PostgresServer


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _quick_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    make_storage_quick(monkeypatch)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    yield server
    server.close()


@pytest.fixture
def database_url(postgres: PostgresServer) -> str:
    """Of a PostgreSQL database without tables."""
    return postgres.new_schema()


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def each_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of a SQLite database without tables, and in another run of the test of a PostgreSQL one."""
    if request.param == "postgresql":
        return str(request.getfixturevalue("database_url"))
    return f"sqlite:///{tmp_path / 'empty.db'}"


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def each_database(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Managers have SQLite, and in another run of the test an empty PostgreSQL database."""
    if request.param == "postgresql":
        url = request.getfixturevalue("database_url")
        monkeypatch.setitem(DEFAULT_LIMITS, "batch_database_url", url)


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts managers on one folder. They are stopped at the end of the test at the latest."""
    managers = []

    async def begin(runner: Any = None, *, folder: Path = tmp_path, **options: Any) -> JobManager:
        managers.append(await started(folder, runner, **options))
        return managers[-1]

    yield begin
    for manager in managers:
        await manager.stop()


@pytest.fixture
async def manager(start: Start) -> JobManager:
    """It answers every line once an engine is ready."""
    return await start()
