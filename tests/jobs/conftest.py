from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.doubles import DEFAULT_LIMITS
from tests.postgres import PostgresServer


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


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
