"""Tables of files and batches."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Engine,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    create_engine,
    event,
    insert,
    inspect,
    make_url,
    select,
)
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from backfill.core.errors import ConfigError
from backfill.jobs.private_files import FILE_MODE, write_durably

_BUSY_TIMEOUT_MS = 5000

metadata = MetaData()


def _key_columns() -> list[Column[Any]]:
    """``sequence`` orders records made within one second."""
    big_integer = BigInteger().with_variant(Integer, "sqlite")
    return [
        Column("sequence", big_integer, primary_key=True, autoincrement=True),
        Column("id", String(64), nullable=False, unique=True),
        Column("owner", String(64), nullable=False),
    ]


files = Table(
    "files",
    metadata,
    *_key_columns(),
    Column("num_bytes", BigInteger, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger),
    Column("filename", String(512), nullable=False),
    Column("purpose", String(64), nullable=False),
    Index("files_by_owner", "owner", "sequence"),
)

batches = Table(
    "batches",
    metadata,
    *_key_columns(),
    Column("endpoint", String(64), nullable=False),
    # No foreign keys: a batch that has ended still names its files, which may be deleted.
    Column("input_file_id", String(64), nullable=False),
    Column("completion_window", String(32), nullable=False),
    Column("status", String(16), nullable=False, index=True),
    Column("model", String(512)),
    Column("errors", JSON, nullable=False),
    Column("output_blob", String(64), nullable=False),
    Column("error_blob", String(64), nullable=False),
    Column("output_file_id", String(64)),
    Column("error_file_id", String(64)),
    Column("output_retention_s", BigInteger, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    Column("in_progress_at", BigInteger),
    Column("finalizing_at", BigInteger),
    Column("completed_at", BigInteger),
    Column("failed_at", BigInteger),
    Column("expired_at", BigInteger),
    Column("cancelling_at", BigInteger),
    Column("cancelled_at", BigInteger),
    Column("num_total", BigInteger, nullable=False),
    Column("num_completed", BigInteger, nullable=False),
    Column("num_failed", BigInteger, nullable=False),
    Column("input_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("metadata", JSON),
    Index("batches_by_owner", "owner", "sequence"),
)


# One row: the data folder that the records belong to.
folders = Table("data_folder", metadata, Column("id", String(64), primary_key=True))


def open_database(url: str | None, data_dir: Path) -> Engine:
    """Connect and create missing tables. Raises: ConfigError naming the option, never the URL's password."""
    try:
        if url is None:  # SQLite gives the files beside it the same mode
            os.close(os.open(data_dir / "jobs.db", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, FILE_MODE))
        engine = create_engine(url or f"sqlite:///{data_dir / 'jobs.db'}")
        if engine.dialect.name == "sqlite":
            event.listen(engine, "connect", _configure_sqlite)
        metadata.create_all(engine)
        _check_columns(engine)
    except (ArgumentError, NoSuchModuleError, ImportError, ValueError) as error:
        raise ConfigError(f"`batch_database_url` is no database URL that can be used: {error}.") from error
    except SQLAlchemyError as error:
        shown = make_url(url).render_as_string(hide_password=True) if url else data_dir / "jobs.db"
        reason = getattr(error, "orig", None) or error
        raise ConfigError(
            f"`batch_database_url`: the database {shown} cannot be opened: {reason}."
        ) from error
    return engine


def tie_to_folder(engine: Engine, data_dir: Path) -> None:
    """Bind the database to the folder for good. To another database the files would be garbage.

    Raises: ConfigError when either is bound to another already.
    """
    path = data_dir / "store.id"
    try:
        folder_id = path.read_text().strip()
    except FileNotFoundError:
        folder_id = ""
    with engine.begin() as connection:
        database_id = connection.execute(select(folders.c.id)).scalar()
        if database_id is None and folder_id and _holds_files(data_dir):
            raise ConfigError(
                f"`data_dir` {data_dir} holds files of another database than the one of `batch_database_url` "
                f"(by default {data_dir / 'jobs.db'}), which is new. Give this server the database the files "
                f"belong to; or, to give the files up, delete {data_dir / 'files'} and {path}."
            )
        if database_id is not None and database_id != folder_id:
            raise ConfigError(
                f"`batch_database_url`: the database belongs to another data folder than {data_dir}. "
                "Each server needs a database and a data folder of its own."
            )
        if database_id is None:
            database_id = folder_id or uuid.uuid4().hex
            connection.execute(insert(folders), {"id": database_id})
            # Before the commit: a later start accepts an id that only the folder has, not the reverse.
            write_durably(path, f"{database_id}\n".encode())


def _holds_files(data_dir: Path) -> bool:
    folder = data_dir / "files"
    return folder.is_dir() and any(entry.is_file() for entry in os.scandir(folder))


def _check_columns(engine: Engine) -> None:
    """Raise ConfigError where tables of these names were made by another version, or another program."""
    inspector = inspect(engine)
    for table in metadata.sorted_tables:
        found = {column["name"] for column in inspector.get_columns(table.name)}
        missing = sorted(column.name for column in table.columns if column.name not in found)
        if missing:
            raise ConfigError(
                f"`batch_database_url`: the table {table.name} lacks {', '.join(missing)}; "
                "another version of Backfill made it."
            )


def _configure_sqlite(connection: Any, _: object) -> None:
    cursor = connection.cursor()
    for setting in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {setting}")
    cursor.execute(f"PRAGMA busy_timeout={_BUSY_TIMEOUT_MS}")
    cursor.close()
