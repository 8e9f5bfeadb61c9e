"""Limits of the Batch API, and where it stores files and batches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from backfill.blending.requests import OrderName
from backfill.core.config import GIB
from backfill.core.errors import ConfigError
from backfill.core.options import bounded, check_types, internal, secret

HOUR_S = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderOptions:
    """How the lines of batches are ordered.

    Attributes:
        order: in which lines of one owner's batches run. fcfs: in that of their files; dfs: lines whose
            prompts begin alike together; batchllm: so, groups that are long in output first; blend: so, and
            lines with long prompts beside lines with long outputs, to use compute and memory evenly; random:
            at random.
    """

    order: OrderName = "blend"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsConfig(OrderOptions):
    """Defaults are OpenAI's limits. Below the limit of free disk space results are still stored.

    Attributes:
        data_dir: folder of one server: configuration, files, batches, the lock.
        batch_api: serve /v1/files and /v1/batches.
        batch_database_url: SQLAlchemy URL of the job store, SQLite or PostgreSQL. Several servers may share
            one; those on SQLite are of one machine, and name ``batch_file_store`` too. Default: SQLite in the
            data folder.
        batch_file_store: where files are kept: a folder, or s3://BUCKET/PREFIX. Servers that share a
            database share it. Default: the data folder.
        batch_lease_timeout: seconds after which another server takes over the batches of one that is silent.
        batch_max_lines: lines in one batch; a file with more fails validation.
        batch_max_bytes: bytes of one batch's input file; larger ones get HTTP 413.
        batch_max_storage_gib: GiB of all stored files together. Default: no limit.
        batch_max_owner_gib: GiB of one API key's files together. Default: no limit.
        batch_min_free_gib: GiB of the disk kept for results; below, uploads and batches are refused.
        batch_max_uploads: uploads open at once, a quarter of them one API key's; more get HTTP 429.
        batch_max_open: open batches of one API key; more get HTTP 429.
        batch_max_queued_lines: unfinished lines of one API key's open batches together.
        batch_retention_hours: hours after which input and result files are deleted.
        max_file_bytes: bytes of any file.
        max_line_bytes: bytes of one line; the server allows as many as of an online body.
        max_in_flight: lines handed to the engine at once; None takes twice what runs in one step.
    """

    data_dir: Path = Path("~/.local/share/backfill")
    batch_api: bool = True
    batch_database_url: str | None = secret(None)
    batch_file_store: str | None = None
    batch_lease_timeout: float = bounded(30.0, least=1, most=HOUR_S)
    batch_max_lines: int = bounded(50_000, least=1)
    batch_max_bytes: int = bounded(200_000_000, least=1)
    batch_max_storage_gib: float | None = bounded(None, above=0)
    batch_max_owner_gib: float | None = bounded(None, above=0)
    batch_min_free_gib: float = bounded(1.0, least=0)
    batch_max_uploads: int = bounded(64, least=1)
    batch_max_open: int = bounded(100, least=1)
    batch_max_queued_lines: int = bounded(1_000_000, least=1)
    batch_retention_hours: float = bounded(30 * 24, above=0)
    max_file_bytes: int = internal(512_000_000)
    max_line_bytes: int = internal(4 << 20)
    max_in_flight: int | None = internal(None)

    @property
    def is_shared(self) -> bool:
        """Several servers may have the same database and files; on SQLite those of one machine."""
        url = self.batch_database_url
        return url is not None and (not url.startswith("sqlite") or self.batch_file_store is not None)

    def for_several_servers(self) -> JobsConfig:
        """With the store in the data folder, where none is named, as one that they share."""
        folder = self.data_dir.absolute()
        url = self.batch_database_url or f"sqlite:///{folder / 'jobs.db'}"
        return replace(self, batch_database_url=url, batch_file_store=self.batch_file_store or str(folder))

    @property
    def max_stored_bytes(self) -> int | None:
        """Of all files; None is no limit."""
        return None if self.batch_max_storage_gib is None else int(self.batch_max_storage_gib * GIB)

    @property
    def max_owner_bytes(self) -> int | None:
        """Of one owner's files; None is no limit."""
        return None if self.batch_max_owner_gib is None else int(self.batch_max_owner_gib * GIB)

    @property
    def min_free_bytes(self) -> int:
        return int(self.batch_min_free_gib * GIB)

    @property
    def retention_s(self) -> float:
        return self.batch_retention_hours * HOUR_S

    def validate(self) -> None:
        """Raises: ConfigError for the first field out of range."""
        check_types(self)
        if self.batch_file_store is not None and not self.batch_file_store.strip():
            raise ConfigError("must be a folder or s3://BUCKET/PREFIX.", field="batch_file_store")
