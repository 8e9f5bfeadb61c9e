"""Alembic runs this file for each of its commands."""

from __future__ import annotations

from alembic import context

from backfill.jobs.migrations import VERSION_TABLE
from backfill.jobs.records import Record

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Record.metadata,
    version_table=VERSION_TABLE,
)
context.run_migrations()
