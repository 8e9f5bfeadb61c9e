"""Makes the tables of a database, or upgrades those of an earlier Backfill, with Alembic.

Each file of ``versions`` takes the tables from one version to the next, and is never changed once released.
``Record.metadata`` has the newest, which an empty database gets without Alembic: importing it takes a tenth
of a second. A test compares them with what the migrations make.
"""

from __future__ import annotations

import threading

from sqlalchemy import Column, Connection, MetaData, PrimaryKeyConstraint, String, Table, inspect, select

from backfill.core.errors import ConfigError
from backfill.jobs.records import Record

NEWEST = "0001"
# Not Alembic's usual name: another program may have its own version beside ours.
VERSION_TABLE = "backfill_version"

SCRIPTS = "backfill.jobs:migrations"
_VERSION = Table(  # as Alembic makes it
    VERSION_TABLE,
    MetaData(),
    Column("version_num", String(32)),
    PrimaryKeyConstraint("version_num", name=f"{VERSION_TABLE}_pkc"),
)
_one_at_a_time = threading.Lock()  # Alembic keeps what it migrates in module variables


def is_newest(connection: Connection) -> bool:
    """Whether the tables are of this version. Raises: ConfigError where a newer version made them."""
    found = version_of(connection)
    if found is not None and found > NEWEST:
        from backfill import __version__

        raise ConfigError(
            f"`batch_database_url`: the tables are of version {found}, which a newer Backfill made; this one "
            f"({__version__}) knows them up to version {NEWEST}. Start the newer one."
        )
    return found == NEWEST


def has_tables(connection: Connection) -> bool:
    """Whether there are any, of whatever program."""
    return bool(inspect(connection).get_table_names())


def load() -> None:
    """Import what ``upgrade`` needs where there are tables, which takes long."""
    import alembic.command  # noqa: F401


def upgrade(connection: Connection) -> None:
    """Bring the tables to this version, or make them, in the connection's transaction.

    Raises: ConfigError where a newer version, or another program, made them.
    """
    if is_newest(connection):  # another server was faster
        return
    if not has_tables(connection):
        Record.metadata.create_all(connection)
        _VERSION.create(connection)
        connection.execute(_VERSION.insert().values(version_num=NEWEST))
        return
    from alembic import command
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", SCRIPTS)
    with _one_at_a_time:
        command.upgrade(config, "head")


def version_of(connection: Connection) -> str | None:
    """None where there are no tables yet, and where a Backfill made them that knew no versions."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    return connection.execute(select(_VERSION.c.version_num)).scalar()
