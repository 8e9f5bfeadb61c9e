"""The first tables. A Backfill that knew no versions made the same, or fewer: they are kept."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

from backfill.core.errors import ConfigError

revision, down_revision = "0001", None

_LEASES_OF_WHOLE_BATCHES = {"batch_id", "holder", "token", "expires_at"}


def upgrade() -> None:
    database = sa.inspect(op.get_bind())
    for name, columns in _tables().items():
        existing = (
            {column["name"] for column in database.get_columns(name)} if database.has_table(name) else set()
        )
        if name == "leases" and existing == _LEASES_OF_WHOLE_BATCHES:  # they are made again at the start
            op.drop_table(name)
            existing.clear()
        missing = sorted({column.name for column in columns} - existing)
        if not existing:
            op.create_table(name, *columns)
        elif missing:
            raise ConfigError(
                f"`batch_database_url`: the table {name} lacks {', '.join(missing)}; "
                "another program made it, or a version of Backfill from which there is no upgrade."
            )
    database = sa.inspect(op.get_bind())  # anew: tables were made
    for index, table, names in (
        ("files_by_owner", "files", ["owner", "sequence"]),
        ("batches_by_owner", "batches", ["owner", "sequence"]),
        ("ix_batches_status", "batches", ["status"]),
        ("ix_leases_holder", "leases", ["holder"]),
    ):
        # ``IF NOT EXISTS`` waits for those who write, also where it exists: they may wait for us.
        if index not in {found["name"] for found in database.get_indexes(table)}:
            op.create_index(index, table, names)


def _tables() -> dict[str, list[sa.Column[Any]]]:
    return {
        "files": [
            *_keys(),
            _number("num_bytes"),
            _number("created_at"),
            _number("expires_at", nullable=True),
            _text("filename", 512),
            _text("purpose"),
        ],
        "batches": [
            *_keys(),
            _text("endpoint"),
            _text("input_file_id"),
            _text("completion_window", 32),
            _text("status", 16),
            _text("model", 512, nullable=True),
            sa.Column("errors", sa.JSON, nullable=False),
            *(_text(name) for name in ("output_blob", "error_blob")),
            *(_text(name, nullable=True) for name in ("output_file_id", "error_file_id")),
            *(_number(name) for name in ("output_retention_s", "created_at", "expires_at")),
            *(
                _number(f"{status}_at", nullable=True)
                for status in ("in_progress", "finalizing", "completed")
            ),
            *(
                _number(f"{status}_at", nullable=True)
                for status in ("failed", "expired", "cancelling", "cancelled")
            ),
            *(_number(name) for name in ("num_total", "num_completed", "num_failed")),
            *(_number(name) for name in ("input_tokens", "cached_tokens", "output_tokens")),
            sa.Column("metadata", sa.JSON),
        ],
        "data_folder": [_text("id", primary_key=True)],
        "leases": [
            _text("batch_id", primary_key=True),
            sa.Column("part", sa.Integer, primary_key=True),
            sa.Column("lines", sa.LargeBinary),
            _number("num_lines"),
            _text("holder", nullable=True),
            _number("token"),
            sa.Column("expires_at", sa.Float, nullable=False),
        ],
        "servers": [_text("holder", primary_key=True), sa.Column("expires_at", sa.Float, nullable=False)],
        "results": [
            _text("batch_id", primary_key=True),
            _number("number", primary_key=True),
            sa.Column("is_completed", sa.Boolean, nullable=False),
            *(_number(name) for name in ("input_tokens", "cached_tokens", "output_tokens")),
            sa.Column("line", sa.LargeBinary, nullable=False),
        ],
        "suspects": [
            _text("batch_id", primary_key=True),
            sa.Column("losses", sa.LargeBinary, nullable=False),
        ],
    }


def _keys() -> list[sa.Column[Any]]:
    sequence = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    return [sa.Column("sequence", sequence, primary_key=True), _text("id", unique=True), _text("owner")]


def _number(name: str, *, nullable: bool = False, **options: Any) -> sa.Column[Any]:
    return sa.Column(name, sa.BigInteger, nullable=nullable, **options)


def _text(name: str, length: int = 64, *, nullable: bool = False, **options: Any) -> sa.Column[Any]:
    return sa.Column(name, sa.String(length), nullable=nullable, **options)
