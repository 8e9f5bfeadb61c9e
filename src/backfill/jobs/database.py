"""The database. Servers on several machines share PostgreSQL, those on one machine also SQLite."""

from __future__ import annotations

import os
import sqlite3
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import (
    URL,
    ColumnElement,
    Connection,
    Engine,
    Float,
    cast,
    create_engine,
    event,
    extract,
    func,
    insert,
    make_url,
    select,
)
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import QueuePool

from backfill.core.errors import ConfigError
from backfill.jobs import migrations
from backfill.jobs.blobs import FileStore
from backfill.jobs.private_files import FILE_MODE
from backfill.jobs.records import DataFolder, Record

_BUSY_TIMEOUT_MS = 5000
_WAL_RETRY_S = 0.005
# A server whose host has vanished answers nothing at all.
_CONNECT_TIMEOUT_S = 5
_SILENCE_TIMEOUT_MS = 20_000
# A server that hangs in a transaction holds rows for which others wait with all their threads. So the
# database ends transactions and waits; those of a renewal sooner, see ``limit_waits``.
_SESSION_TIMEOUTS_MS = {
    "idle_in_transaction_session_timeout": 10_000,
    "lock_timeout": 10_000,
    "statement_timeout": 60_000,
}
_EPOCH_JULIAN_DAY = 2440587.5
_DAY_S = 86400.0
_SQLITE_CLOCK: ColumnElement[Any] = (func.julianday("now") - _EPOCH_JULIAN_DAY) * _DAY_S
_POSTGRESQL_CLOCK: ColumnElement[Any] = cast(extract("epoch", func.clock_timestamp()), Float)
# Numbers of PostgreSQL's advisory locks; any that no other program on the database uses.
_SCHEMA_LOCK, _INPUTS_LOCK = 0x6261636B01, 0x6261636B02


def is_postgresql(engine: Engine) -> bool:
    return engine.dialect.name == "postgresql"


def database_clock(engine: Engine) -> ColumnElement[Any]:
    """Seconds since 1970 on the database's clock.

    Not the time at which the transaction began: a statement may have waited for a lock.
    """
    return _POSTGRESQL_CLOCK if is_postgresql(engine) else _SQLITE_CLOCK


def open_database(url: str | None, data_dir: Path) -> Engine:
    """Connect, and make or upgrade the tables.

    Raises: ConfigError naming the option, never the URL's password.
    """
    try:
        if url is None:  # SQLite gives the files beside it the same mode
            os.close(os.open(data_dir / "jobs.db", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, FILE_MODE))
        engine = _engine_of(url, data_dir)
        with engine.connect() as connection:
            is_newest = migrations.is_newest(connection)
            needs_upgrade = not is_newest and migrations.has_tables(connection)
        if not is_newest:
            if needs_upgrade:
                migrations.load()  # not under the lock: on SQLite it stops all who write
            with exclusive_schema(engine) as connection:
                migrations.upgrade(connection)
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
            f"{shown_option(url)}: the database {shown_url(url, data_dir)} cannot be opened: {reason}."
        ) from error
    return engine


def open_in_memory() -> Engine:
    """A new database of this process, with the newest tables."""
    engine = create_engine(
        "sqlite://",
        # Each connection would have a database of its own, so threads take turns with one.
        poolclass=QueuePool,
        pool_size=1,
        max_overflow=0,
        connect_args={"check_same_thread": False},
    )
    event.listen(engine, "connect", _configure_sqlite)
    Record.metadata.create_all(engine)
    return engine


def shown_option(url: str | None) -> str:
    """The option that names the database, for messages."""
    return "`data_dir`" if url is None else "`batch_database_url`"


def shown_url(url: str | None, data_dir: Path) -> str:
    """For messages: without the password, wherever in the URL it is. Empty for what is no URL."""
    if url is None:
        return str(data_dir / "jobs.db")
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        return ""
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
            event.listen(engine, "connect", _configure_postgresql)
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
    """A transaction during which no other server changes tables, or ties the database to its files."""
    with engine.begin() as connection:
        if is_postgresql(engine):  # another server's migration, or this one's, may take long
            for name in _SESSION_TIMEOUTS_MS:
                connection.execute(select(func.set_config(name, "0", True)))
        _lock(connection, _SCHEMA_LOCK)
        yield connection


def lock_inputs(connection: Connection) -> None:
    """Let no other server delete files, or create batches with them, until the transaction has ended."""
    _lock(connection, _INPUTS_LOCK)


def lock_writes(connection: Connection) -> None:
    """On SQLite, let no other process write until the transaction has ended. PostgreSQL locks rows."""
    if not is_postgresql(connection.engine):
        connection.exec_driver_sql("BEGIN IMMEDIATE")


def limit_waits(connection: Connection, seconds: float) -> None:
    """PostgreSQL ends each statement of the transaction after so long. SQLite waits five seconds."""
    if is_postgresql(connection.engine):
        most_ms = str(max(1, int(1000 * seconds)))
        names = ("lock_timeout", "statement_timeout")
        connection.execute(select(*(func.set_config(name, most_ms, True) for name in names)))


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
        database_id = connection.execute(select(DataFolder.id)).scalar()
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
            connection.execute(insert(DataFolder), {"id": database_id})
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


def _configure_sqlite(connection: Any, _: object) -> None:
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={_BUSY_TIMEOUT_MS}")
    _use_wal(cursor)
    for setting in ("synchronous=FULL", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {setting}")
    cursor.close()


def _configure_postgresql(connection: Any, _: object) -> None:
    """What the URL or the database sets goes first."""
    with connection.cursor() as cursor:
        for name, value_ms in _SESSION_TIMEOUTS_MS.items():
            cursor.execute(
                "SELECT set_config(name, %s, false) FROM pg_settings WHERE name = %s AND setting = '0'",
                (str(value_ms), name),
            )
    connection.commit()


def _use_wal(cursor: sqlite3.Cursor) -> None:
    """SQLite does not wait, as it does elsewhere, when servers switch a new database at once."""
    give_up_at = time.monotonic() + _BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            is_busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
            if not is_busy or time.monotonic() > give_up_at:
                raise
        time.sleep(_WAL_RETRY_S)
