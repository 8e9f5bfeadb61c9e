"""Tables of a database: made, adopted from a Backfill that knew no versions, upgraded, or refused."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, MetaData, create_engine, inspect, text

from backfill.core.errors import ConfigError
from backfill.jobs import migrations
from backfill.jobs.database import open_database, open_in_memory
from backfill.jobs.migrations import NEWEST, VERSION_TABLE, version_of
from backfill.jobs.records import Record
from backfill.jobs.store import JobStore
from tests.api.servers import TIMEOUT_S
from tests.jobs.doubles import (
    DEFAULT_LIMITS,
    InstantRunner,
    Start,
    check_completed,
    ended,
    hold_after,
    input_of,
    ready,
    submit,
)
from tests.jobs.test_leases import file_of

# The tables as the last Backfill made them that knew no versions.
_OF_OWNERS = "sequence {sequence}, id VARCHAR(64) NOT NULL, owner VARCHAR(64) NOT NULL"
_KEYS = "PRIMARY KEY (sequence), UNIQUE (id)"
_TOKENS = "input_tokens BIGINT NOT NULL, cached_tokens BIGINT NOT NULL, output_tokens BIGINT NOT NULL"
LEASES = """CREATE TABLE leases (
    batch_id VARCHAR(64) NOT NULL, part INTEGER NOT NULL, lines {bytes}, num_lines BIGINT NOT NULL,
    holder VARCHAR(64), token BIGINT NOT NULL, expires_at FLOAT NOT NULL, PRIMARY KEY (batch_id, part))"""
SUSPECTS = "CREATE TABLE suspects (batch_id VARCHAR(64) NOT NULL PRIMARY KEY, losses {bytes} NOT NULL)"
TABLES = [
    f"""CREATE TABLE files ({_OF_OWNERS}, num_bytes BIGINT NOT NULL, created_at BIGINT NOT NULL,
        expires_at BIGINT, filename VARCHAR(512) NOT NULL, purpose VARCHAR(64) NOT NULL, {_KEYS})""",
    "CREATE INDEX files_by_owner ON files (owner, sequence)",
    f"""CREATE TABLE batches ({_OF_OWNERS}, endpoint VARCHAR(64) NOT NULL, input_file_id VARCHAR(64) NOT NULL,
        completion_window VARCHAR(32) NOT NULL, status VARCHAR(16) NOT NULL, model VARCHAR(512),
        errors JSON NOT NULL, output_blob VARCHAR(64) NOT NULL, error_blob VARCHAR(64) NOT NULL,
        output_file_id VARCHAR(64), error_file_id VARCHAR(64), output_retention_s BIGINT NOT NULL,
        created_at BIGINT NOT NULL, expires_at BIGINT NOT NULL, in_progress_at BIGINT, finalizing_at BIGINT,
        completed_at BIGINT, failed_at BIGINT, expired_at BIGINT, cancelling_at BIGINT, cancelled_at BIGINT,
        num_total BIGINT NOT NULL, num_completed BIGINT NOT NULL, num_failed BIGINT NOT NULL, {_TOKENS},
        metadata JSON, {_KEYS})""",
    "CREATE INDEX ix_batches_status ON batches (status)",
    "CREATE INDEX batches_by_owner ON batches (owner, sequence)",
    "CREATE TABLE data_folder (id VARCHAR(64) NOT NULL PRIMARY KEY)",
    LEASES,
    "CREATE INDEX ix_leases_holder ON leases (holder)",
    "CREATE TABLE servers (holder VARCHAR(64) NOT NULL PRIMARY KEY, expires_at FLOAT NOT NULL)",
    f"""CREATE TABLE results (batch_id VARCHAR(64) NOT NULL, number BIGINT NOT NULL,
        is_completed BOOLEAN NOT NULL, {_TOKENS}, line {{bytes}} NOT NULL, PRIMARY KEY (batch_id, number))""",
    SUSPECTS,
]
LEASES_OF_WHOLE_BATCHES = """CREATE TABLE leases (
    batch_id VARCHAR(64) NOT NULL PRIMARY KEY, holder VARCHAR(64), token BIGINT NOT NULL,
    expires_at FLOAT NOT NULL)"""


def run(url: str, statements: list[str]) -> None:
    engine = create_engine(url)
    is_sqlite = engine.dialect.name == "sqlite"
    types = {"sequence": "INTEGER NOT NULL", "bytes": "BLOB"}
    if not is_sqlite:
        types = {"sequence": "BIGSERIAL NOT NULL", "bytes": "BYTEA"}
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement.format_map(types)))
    engine.dispose()


def check_tables(engine: Engine) -> None:
    """They are the models', and of the newest version."""
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
        assert compare_metadata(context, Record.metadata) == []
        assert version_of(connection) == NEWEST


def all_of(engine: Engine) -> dict[tuple[str, str], list[str]]:
    """Columns, in any order, keys and indexes of every table."""
    found = inspect(engine)
    parts: dict[str, Mapping[Any, Any]] = {
        "columns": found.get_multi_columns(),
        "primary keys": found.get_multi_pk_constraint(),
        "unique": found.get_multi_unique_constraints(),
        "indexes": found.get_multi_indexes(),
    }
    return {
        (what, table): sorted(map(str, [value] if isinstance(value, dict) else value))
        for what, tables in parts.items()
        for (_, table), value in tables.items()
    }


def test_the_models_are_what_the_migrations_make(
    each_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_database(each_url, tmp_path)
    check_tables(engine)
    made_at_once = all_of(engine)
    everything = MetaData()
    everything.reflect(engine)
    everything.drop_all(engine)
    engine.dispose()
    monkeypatch.setattr(migrations, "has_tables", lambda connection: True)
    engine = open_database(each_url, tmp_path)
    check_tables(engine)
    assert all_of(engine) == made_at_once
    engine.dispose()
    config = Config()
    config.set_main_option("script_location", migrations.SCRIPTS)
    assert ScriptDirectory.from_config(config).get_heads() == [NEWEST]


def test_threads_share_a_database_in_memory() -> None:
    engine = open_in_memory()
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Record.metadata) == []
    store = JobStore(engine)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda number: store.add_file(file_of(str(number))), range(20)))
        assert list(threads.map(lambda _: len(store.blob_ids()), range(8))) == [20] * 8
    store.close()


def test_one_of_several_servers_that_start_at_once_makes_the_tables(each_url: str, tmp_path: Path) -> None:
    with ThreadPoolExecutor(5) as threads:
        engines = list(threads.map(lambda _: open_database(each_url, tmp_path), range(5)))
    check_tables(engines[0])
    for engine in engines:
        engine.dispose()


def test_a_database_that_another_writes_waits_to_be_switched_to_wal(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    with ThreadPoolExecutor(1) as threads:
        opening = threads.submit(open_database, f"sqlite:///{path}", tmp_path)
        with pytest.raises(TimeoutError):
            opening.result(0.1)
        writer.execute("COMMIT")
        engine = opening.result(TIMEOUT_S)
    with engine.connect() as connection:
        assert version_of(connection) == NEWEST
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
    engine.dispose()
    writer.close()


_OPENS = """
import sys
from pathlib import Path
from backfill.jobs import database

exclusive_schema = database.exclusive_schema

def locked(engine):
    assert upgrades == ("alembic.command" in sys.modules)
    return exclusive_schema(engine)

database.exclusive_schema = locked
for folder in sys.argv[1:]:
    upgrades = folder == sys.argv[-1]
    database.open_database(None, Path(folder)).dispose()
    assert upgrades == ("alembic" in sys.modules)
"""


@pytest.mark.slow
def test_alembic_is_imported_for_an_upgrade_alone_and_before_other_servers_wait(tmp_path: Path) -> None:
    new, upgraded, old = (tmp_path / name for name in ("new", "upgraded", "old"))
    for folder in (new, upgraded, old):
        folder.mkdir()
    for folder in (upgraded, old):
        run(f"sqlite:///{folder / 'jobs.db'}", TABLES)
    open_database(None, upgraded).dispose()
    folders = map(str, (new, new, upgraded, old))  # the last one is upgraded
    subprocess.run([sys.executable, "-c", _OPENS, *folders], check=True, timeout=TIMEOUT_S)


@pytest.mark.parametrize("is_earlier", [False, True])
def test_tables_without_a_version_are_adopted(each_url: str, tmp_path: Path, is_earlier: bool) -> None:
    statements = [text for text in TABLES if not (is_earlier and text == SUSPECTS)]
    if is_earlier:
        statements[statements.index(LEASES)] = LEASES_OF_WHOLE_BATCHES
    run(each_url, statements)
    engine = open_database(each_url, tmp_path)
    check_tables(engine)
    engine.dispose()


def test_tables_are_adopted_while_a_server_writes(database_url: str, tmp_path: Path) -> None:
    run(database_url, TABLES)
    writer = create_engine(database_url)
    with writer.begin() as connection:
        connection.execute(text("LOCK TABLE files, batches, leases IN ROW EXCLUSIVE MODE"))  # as a write does
        open_database(f"{database_url}%20-clock_timeout%3D1000", tmp_path).dispose()
    check_tables(writer)
    writer.dispose()


@pytest.mark.anyio
@pytest.mark.usefixtures("each_database")
async def test_a_batch_goes_on_in_a_database_that_had_no_version(tmp_path: Path, start: Start) -> None:
    runner = InstantRunner()
    manager = await start(runner)
    ready(manager)
    batch = await submit(manager, input_of(60))
    await hold_after(manager, runner, batch, 6)
    await manager.stop()
    num_before = runner.runs.total()
    runner.release()
    without_a_version(DEFAULT_LIMITS.get("batch_database_url") or f"sqlite:///{tmp_path / 'jobs.db'}")
    manager = await start(runner)
    ready(manager)
    await check_completed(manager, await ended(manager, batch.id), 60)
    assert 6 <= num_before <= runner.runs.total() <= 60 + 4, "at most what was in flight runs again"


def without_a_version(url: str) -> None:
    """The same rows in the tables of a Backfill that knew no versions, and had made no leases."""
    engine = create_engine(url)
    before = MetaData()
    before.reflect(engine)
    with engine.connect() as connection:
        rows = {
            name: connection.execute(table.select()).mappings().all() for name, table in before.tables.items()
        }
    before.drop_all(engine)
    run(url, TABLES)
    with engine.begin() as connection:
        for name, table in before.tables.items():
            if rows[name] and name not in (VERSION_TABLE, "leases"):
                connection.execute(table.insert(), [dict(row) for row in rows[name]])
    engine.dispose()


def test_a_newer_version_is_upgraded_to_and_then_refused_to_an_older_one(
    each_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(each_url, [*TABLES, "INSERT INTO data_folder VALUES ('kept')"])
    open_database(each_url, tmp_path).dispose()
    newer = tmp_path / "migrations"
    shutil.copytree(Path(migrations.__file__).parent, newer)
    (newer / "versions" / "0009_colour.py").write_text(
        "from alembic import op\n"
        "import sqlalchemy as sa\n"
        f"revision, down_revision = '0009', '{NEWEST}'\n"
        "def upgrade():\n"
        "    op.add_column('files', sa.Column('colour', sa.Integer))\n"
    )
    with monkeypatch.context() as patch:
        patch.setattr(migrations, "NEWEST", "0009")
        patch.setattr(migrations, "SCRIPTS", str(newer))
        for _ in range(2):
            engine = open_database(each_url, tmp_path)
            assert "colour" in {column["name"] for column in inspect(engine).get_columns("files")}
            with engine.connect() as connection:
                assert connection.execute(text("SELECT id FROM data_folder")).scalar() == "kept"
            engine.dispose()
    with pytest.raises(ConfigError, match=rf"0009.*{NEWEST}"):
        open_database(each_url, tmp_path)


@pytest.mark.parametrize("table", ["files", "leases"])
def test_tables_of_another_program_are_refused_and_kept(each_url: str, tmp_path: Path, table: str) -> None:
    run(each_url, [f"CREATE TABLE {table} (title VARCHAR(9))"])
    with pytest.raises(ConfigError, match=f"table {table} lacks .*batch_id|table {table} lacks .*num_bytes"):
        open_database(each_url, tmp_path)
    engine = create_engine(each_url)
    assert inspect(engine).get_table_names() == [table]
    engine.dispose()
