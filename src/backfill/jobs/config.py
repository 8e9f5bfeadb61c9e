"""Limits of the Batch API and where it keeps things."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from backfill.core.errors import ConfigError

DAY_S = 24 * 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsConfig:
    """Defaults are OpenAI's limits.

    Attributes:
        data_dir: folder of one server: files, the SQLite database, the lock.
        database_url: SQLAlchemy URL; None takes SQLite in ``data_dir``.
        max_lines: lines of one batch.
        max_batch_bytes: bytes of one batch's input file.
        max_file_bytes: bytes of any file.
        max_line_bytes: bytes of one line; the server allows as many as of an online body.
        max_stored_bytes: bytes of all files; uploads beyond are refused, results never are. None: no limit.
        max_owner_bytes: the same for one owner's files.
        min_free_bytes: of the disk; below, uploads and new batches are refused, results never are.
        max_uploads: open at once; a quarter of them may be one owner's.
        max_open_batches: of one owner; more are refused.
        max_queued_lines: unfinished lines of one owner's open batches; a batch with more fails.
        retention_s: life of a batch's input and result files, in seconds.
        max_in_flight: lines handed to the engine at once; None takes twice what runs in one step.
    """

    data_dir: Path
    database_url: str | None = None
    max_lines: int = 50_000
    max_batch_bytes: int = 200_000_000
    max_file_bytes: int = 512_000_000
    max_line_bytes: int = 4 << 20
    max_stored_bytes: int | None = None
    max_owner_bytes: int | None = None
    min_free_bytes: int = 1 << 30
    max_uploads: int = 64
    max_open_batches: int = 100
    max_queued_lines: int = 1_000_000
    retention_s: float = 30 * DAY_S
    max_in_flight: int | None = None

    def validate(self) -> None:
        """Raise ConfigError naming the first option out of range."""
        for option, value in (
            ("--batch-max-lines", self.max_lines),
            ("--batch-max-bytes", self.max_batch_bytes),
            ("--batch-max-uploads", self.max_uploads),
            ("--batch-max-open", self.max_open_batches),
            ("--batch-max-queued-lines", self.max_queued_lines),
            ("--batch-retention-hours", self.retention_s),
        ):
            if not value > 0:
                raise ConfigError(f"{option} must be above 0, got {value:g}.")
        for option, num_bytes in (
            ("--batch-max-storage-gib", self.max_stored_bytes),
            ("--batch-max-owner-gib", self.max_owner_bytes),
        ):
            if num_bytes is not None and num_bytes < 1:
                raise ConfigError(f"{option} must be above 0, got {num_bytes} bytes.")
        if self.min_free_bytes < 0:
            raise ConfigError(f"--batch-min-free-gib must not be negative, got {self.min_free_bytes} bytes.")
