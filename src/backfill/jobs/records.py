"""Files and batches as mapped records, and what the database keeps beside them.

Times are integer Unix seconds; None: it has not happened.
"""

from __future__ import annotations

import uuid
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

from sqlalchemy import JSON, BigInteger, Dialect, Float, Index, Integer, String, TypeDecorator
from sqlalchemy import Enum as EnumColumn
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, composite, mapped_column

from backfill.preparation.lines import LineError

Item = TypeVar("Item")


class BatchStatus(Enum):
    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self.value in {"failed", "completed", "expired", "cancelled"}


OPEN_STATUSES = [status for status in BatchStatus if not status.is_final]
WHOLE = 0  # the part of a lease that stands for the batch itself


class LineOutcome(Enum):
    """How a line ended. All but COMPLETED are in the error file and count as failed."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class RequestCounts:
    total: int = 0
    completed: int = 0
    failed: int = 0

    @property
    def unfinished(self) -> int:
        return self.total - self.completed - self.failed


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens of completed lines; cached ones are among the input's."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: TokenUsage) -> TokenUsage:
        return TokenUsage(
            self.input_tokens + other.input_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
        )


@dataclass(frozen=True, slots=True)
class Page(Generic[Item]):
    """One page of a listing."""

    items: list[Item]
    has_more: bool


class _LineErrors(TypeDecorator[list[LineError]]):
    impl = JSON
    cache_ok = True

    def process_bind_param(self, value: list[LineError] | None, dialect: Dialect) -> Any:
        return value and [asdict(error) for error in value]

    def process_result_value(self, value: Any, dialect: Dialect) -> list[LineError]:
        return [LineError(**error) for error in value]


class Record(MappedAsDataclass, DeclarativeBase, kw_only=True):
    """A row of one of the tables. A change of these needs a migration (``migrations/versions``)."""

    type_annotation_map = {  # noqa: RUF012
        int: BigInteger,
        str: String(64),
        float: Float,
        BatchStatus: EnumColumn(
            BatchStatus,
            native_enum=False,
            length=16,
            values_callable=lambda kind: [each.value for each in kind],
        ),
        list[LineError]: _LineErrors,
        dict[str, str]: JSON(none_as_null=True),
    }


class OwnedRecord(MappedAsDataclass, kw_only=True):
    """A file or a batch.

    Attributes:
        sequence: orders records made within one second.
        owner: the name of the API key it belongs to, the digest of one without a name, "" without keys.
    """

    sequence: Mapped[int] = mapped_column(
        BigInteger().with_variant(Integer, "sqlite"), primary_key=True, init=False, compare=False
    )
    id: Mapped[str] = mapped_column(unique=True)
    owner: Mapped[str]


class FileRecord(OwnedRecord, Record):
    """A stored file."""

    __tablename__ = "files"
    __table_args__ = (Index("files_by_owner", "owner", "sequence"),)

    num_bytes: Mapped[int]
    created_at: Mapped[int]
    expires_at: Mapped[int | None]
    filename: Mapped[str] = mapped_column(String(512))
    purpose: Mapped[str]


class BatchRecord(OwnedRecord, Record):
    """A batch. It has no foreign keys: one that has ended still names its files, which may be deleted.

    Attributes:
        output_file_id, error_file_id: readable results, once the batch has ended.
        output_blob, error_blob: ids under which results are written meanwhile; they become the file ids.
        output_retention_s: life of the result files.
        errors: what the check of its file warned of, and why it has failed.
        user_metadata: ``metadata`` of the API, which in a mapped class is something else.
    """

    __tablename__ = "batches"
    __table_args__ = (Index("batches_by_owner", "owner", "sequence"),)

    endpoint: Mapped[str]
    input_file_id: Mapped[str]
    completion_window: Mapped[str] = mapped_column(String(32))
    status: Mapped[BatchStatus] = mapped_column(index=True)
    output_blob: Mapped[str]
    error_blob: Mapped[str]
    output_retention_s: Mapped[int]
    created_at: Mapped[int]
    expires_at: Mapped[int]
    model: Mapped[str | None] = mapped_column(String(512), default=None)
    errors: Mapped[list[LineError]] = mapped_column(default_factory=list)
    output_file_id: Mapped[str | None] = mapped_column(default=None)
    error_file_id: Mapped[str | None] = mapped_column(default=None)
    in_progress_at: Mapped[int | None] = mapped_column(default=None)
    finalizing_at: Mapped[int | None] = mapped_column(default=None)
    completed_at: Mapped[int | None] = mapped_column(default=None)
    failed_at: Mapped[int | None] = mapped_column(default=None)
    expired_at: Mapped[int | None] = mapped_column(default=None)
    cancelling_at: Mapped[int | None] = mapped_column(default=None)
    cancelled_at: Mapped[int | None] = mapped_column(default=None)
    num_total: Mapped[int] = mapped_column(init=False)
    num_completed: Mapped[int] = mapped_column(init=False)
    num_failed: Mapped[int] = mapped_column(init=False)
    input_tokens: Mapped[int] = mapped_column(init=False)
    cached_tokens: Mapped[int] = mapped_column(init=False)
    output_tokens: Mapped[int] = mapped_column(init=False)
    request_counts: Mapped[RequestCounts] = composite(
        "num_total", "num_completed", "num_failed", default=RequestCounts()
    )
    usage: Mapped[TokenUsage] = composite(
        "input_tokens", "cached_tokens", "output_tokens", default=TokenUsage()
    )
    user_metadata: Mapped[dict[str, str] | None] = mapped_column("metadata", default=None)

    @property
    def last_timestamp(self) -> int:
        """The latest of the times at which it changed."""
        names = ("created_at", *(f"{status.value}_at" for status in BatchStatus))
        return max(getattr(self, name, None) or 0 for name in names)


class DataFolder(Record):
    """One row: the id of the stores of files that the records belong to."""

    __tablename__ = "data_folder"

    id: Mapped[str] = mapped_column(primary_key=True)


class LeasedPart(Record):
    """Which server runs what, where several share the database (leases.py). Times are the database's.

    Attributes:
        part: 0 is the batch itself, the others are its lines while they run.
        lines: a bit for each line of the part.
    """

    __tablename__ = "leases"

    batch_id: Mapped[str] = mapped_column(primary_key=True)
    part: Mapped[int] = mapped_column(Integer, primary_key=True)
    lines: Mapped[bytes | None]
    num_lines: Mapped[int]
    holder: Mapped[str | None] = mapped_column(index=True)
    token: Mapped[int]
    expires_at: Mapped[float]


class ReadyServer(Record):
    """A server whose engine is ready, among which lines are divided."""

    __tablename__ = "servers"

    holder: Mapped[str] = mapped_column(primary_key=True)
    expires_at: Mapped[float]


class RecordedResult(Record):
    """A line that is done, of an open batch (database_results.py), where results are in no files."""

    __tablename__ = "results"

    batch_id: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    is_completed: Mapped[bool]
    input_tokens: Mapped[int]
    cached_tokens: Mapped[int]
    output_tokens: Mapped[int]
    line: Mapped[bytes]


class SavedLosses(Record):
    """Lines of an open batch that an engine was lost over (suspects.py)."""

    __tablename__ = "suspects"

    batch_id: Mapped[str] = mapped_column(primary_key=True)
    losses: Mapped[bytes]


def new_file_id() -> str:
    return f"file-{uuid.uuid4().hex}"


def new_batch_id() -> str:
    return f"batch_{uuid.uuid4().hex}"
