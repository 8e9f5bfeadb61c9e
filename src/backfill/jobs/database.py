"""Tables of files and batches. Servers on several machines share PostgreSQL, those on one also SQLite."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import (
    JSON,
    URL,
    BigInteger,
    Boolean,
    Column,
    Connection,
    Engine,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    create_engine,
    event,
    func,
    insert,
    inspect,
    make_url,
    select,
)
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from backfill.core.errors import ConfigError
from backfill.jobs.blobs import FileStore
from backfill.jobs.private_files import FILE_MODE

_BUSY_TIMEOUT_MS = 5000
# A server whose host has vanished answers nothing at all.
_CONNECT_TIMEOUT_S = 5
_SILENCE_TIMEOUT_MS = 20_000
# Numbers of PostgreSQL's advisory locks; any that no other program on the database uses.
_SCHEMA_LOCK, _INPUTS_LOCK = 0x6261636B01, 0x6261636B02

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


# One row: the id of the stores of files that the records belong to.
folders = Table("data_folder", metadata, Column("id", String(64), primary_key=True))

# Which server runs what (leases.py), where several share the database. Times are the database's. Part 0 is
# the batch itself, the others are its lines while they run: ``lines`` has a bit for each.
leases = Table(
    "leases",
    metadata,
    Column("batch_id", String(64), primary_key=True),
    Column("part", Integer, primary_key=True, autoincrement=False),
    Column("lines", LargeBinary),
    Column("num_lines", BigInteger, nullable=False),
    Column("holder", String(64), index=True),
    Column("token", BigInteger, nullable=False),
    Column("expires_at", Float, nullable=False),
)

# Servers whose engine is ready, among which lines are divided.
servers = Table(
    "servers",
    metadata,
    Column("holder", String(64), primary_key=True),
    Column("expires_at", Float, nullable=False),
)

# Lines that are done, of open batches (database_results.py); where files can be appended to they are in them.
results = Table(
    "results",
    metadata,
    Column("batch_id", String(64), primary_key=True),
    Column("number", BigInteger, primary_key=True),
    Column("is_completed", Boolean, nullable=False),
    Column("input_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("line", LargeBinary, nullable=False),
)

# Lines of open batches that an engine was lost over (suspects.py), one row a batch. Where one server has all
# batches and its files can be appended to, they are in a folder.
suspects = Table(
    "suspects",
    metadata,
    Column("batch_id", String(64), primary_key=True),
    Column("losses", LargeBinary, nullable=False),
)


def is_postgresql(engine: Engine) -> bool:
    return engine.dialect.name == "postgresql"


def open_database(url: str | None, data_dir: Path) -> Engine:
    """Connect and create missing tables. Raises: ConfigError naming the option, never the URL's password."""
    try:
        if url is None:  # SQLite gives the files beside it the same mode
            os.close(os.open(data_dir / "jobs.db", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, FILE_MODE))
        engine = _engine_of(url, data_dir)
        with exclusive_schema(engine) as connection:
            _drop_earlier_leases(connection)
            metadata.create_all(connection)
            _check_columns(connection)
    except ImportError as error:
        raise ConfigError(
            "`batch_database_url`: the driver of the database is not installed "
            f"({error}). For PostgreSQL: pip install 'backfill[postgres]'."
        ) from error
    except (ArgumentError, NoSuchModuleError, ValueError) as error:
        raise ConfigError(f"`batch_database_url` is no database URL that can be used: {error}.") from error
    except SQLAlchemyError as error:
        reason = " ".join(str(getattr(error, "orig", None) or error).split()).rstrip(".")
        raise ConfigError(
            f"`batch_database_url`: the database {shown_url(url, data_dir)} cannot be opened: {reason}."
        ) from error
    return engine


def shown_url(url: str | None, data_dir: Path) -> str:
    """For messages: without the password, wherever in the URL it is."""
    if url is None:
        return str(data_dir / "jobs.db")
    parsed = make_url(url)
    query = {name: value for name, value in parsed.query.items() if "password" not in name.lower()}
    return parsed.set(query=query).render_as_string(hide_password=True)


def _engine_of(url: str | None, data_dir: Path) -> Engine:
    parsed = URL.create("sqlite", database=str(data_dir / "jobs.db")) if url is None else _parsed(url)
    match parsed.get_backend_name():
        case "sqlite":
            engine = create_engine(parsed)
            event.listen(engine, "connect", _configure_sqlite)
        case "postgresql":
            if "+" not in parsed.drivername:
                parsed = parsed.set(drivername="postgresql+psycopg")
            options = {
                "connect_timeout": _CONNECT_TIMEOUT_S,
                "tcp_user_timeout": _SILENCE_TIMEOUT_MS,
                "keepalives_idle": _CONNECT_TIMEOUT_S,
                "application_name": "backfill",
            }
            # The user's own go first.
            options = {name: value for name, value in options.items() if name not in parsed.query}
            engine = create_engine(parsed, connect_args=options, pool_pre_ping=True)
        case name:
            raise ConfigError(
                f"must be a URL of SQLite or PostgreSQL, got one of {name}.", field="batch_database_url"
            )
    return engine


def _parsed(url: str) -> URL:
    """Raises: ArgumentError, which does not show the URL; ConfigError likewise."""
    try:
        parsed = make_url(url)
    except ValueError:
        raise ConfigError(
            "is no database URL that can be used: its port is no number, or its password has characters that "
            "must be escaped (%40 is @).",
            field="batch_database_url",
        ) from None
    if "@" in (parsed.host or ""):  # the end of a password: what a driver says of the host would show it
        raise ConfigError(
            "is no database URL that can be used: it has more than one @; write %40 for one in a password.",
            field="batch_database_url",
        )
    return parsed


@contextmanager
def exclusive_schema(engine: Engine) -> Iterator[Connection]:
    """A transaction during which no other server creates tables, or ties the database to its files."""
    with engine.begin() as connection:
        _lock(connection, _SCHEMA_LOCK)
        yield connection


def lock_inputs(connection: Connection) -> None:
    """Let no other server delete files, or create batches with them, until the transaction has ended."""
    _lock(connection, _INPUTS_LOCK)


def lock_writes(connection: Connection) -> None:
    """On SQLite, let no other process write until the transaction has ended. PostgreSQL locks rows."""
    if not is_postgresql(connection.engine):
        connection.exec_driver_sql("BEGIN IMMEDIATE")


def _lock(connection: Connection, number: int) -> None:
    if is_postgresql(connection.engine):
        connection.execute(select(func.pg_advisory_xact_lock(number)))
    else:
        lock_writes(connection)


def tie_to(engine: Engine, places: Sequence[FileStore]) -> str:
    """Bind the database to its places of files for good. To another database the files would be garbage.

    Returns: the id that they have from now on.
    Raises: ConfigError when one of them is bound to another already. OSError.
    """
    with exclusive_schema(engine) as connection:
        database_id = connection.execute(select(folders.c.id)).scalar()
        ids = [place.read_id() for place in places]
        if database_id is None:
            for place, place_id in zip(places, ids, strict=True):
                if (place_id or place.is_given) and place.holds_files():
                    raise ConfigError(
                        f"{place.shown} holds files of another database than the one of `batch_database_url` "
                        "(by default jobs.db in `data_dir`), which is new. Give this server the database the "
                        f"files belong to; or, to give the files up, delete {place.to_give_up}."
                    )
            database_id = next(filter(None, ids), "") or uuid.uuid4().hex
            connection.execute(insert(folders), {"id": database_id})
            # Before the commit: a later start accepts an id that only a place has, not the reverse.
            for place in places:
                place.write_id(database_id)
            return str(database_id)
        for place, place_id in zip(places, ids, strict=True):
            if place_id != database_id:
                raise ConfigError(
                    f"`batch_database_url`: the database belongs to another data folder than {place.shown}. "
                    "Each database has one place of files; servers that share one also share "
                    "`batch_file_store`."
                )
        return str(database_id)


def _drop_earlier_leases(connection: Connection) -> None:
    """Leases were of whole batches. They are made again (``leases.add_missing_leases``)."""
    inspector = inspect(connection)
    if not inspector.has_table(leases.name):
        return
    if not any(column["name"] == "part" for column in inspector.get_columns(leases.name)):
        leases.drop(connection)


def _check_columns(connection: Connection) -> None:
    """Raise ConfigError where tables of these names were made by another version, or another program."""
    inspector = inspect(connection)
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
