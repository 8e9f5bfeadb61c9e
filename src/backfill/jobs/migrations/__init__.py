"""Makes the tables of a database, or upgrades those of an earlier Backfill, with Alembic.

Each file of ``versions`` takes the tables from one version to the next, and is never changed once released.
``Record.metadata`` has the newest, which a test compares with what the migrations make.
"""

from __future__ import annotations

import threading

from sqlalchemy import Connection, column, inspect, select, table

from backfill.core.errors import ConfigError

NEWEST = "0001"
# Not Alembic's usual name: another program may have its own version beside ours.
VERSION_TABLE = "backfill_version"

SCRIPTS = "backfill.jobs:migrations"
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


def load() -> None:
    """Import what ``upgrade`` needs, which takes long. Most starts need none of it."""
    import alembic.command  # noqa: F401


def upgrade(connection: Connection) -> None:
    """Bring the tables to this version, in the connection's transaction.

    Raises: ConfigError where a newer version, or another program, made them.
    """
    if is_newest(connection):  # another server was faster
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
    return connection.execute(select(column("version_num")).select_from(table(VERSION_TABLE))).scalar()
