from __future__ import annotations

from collections.abc import Iterator

import pytest

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
    """An empty PostgreSQL database."""
    return postgres.new_database()
