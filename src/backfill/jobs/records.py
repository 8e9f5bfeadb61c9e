"""Files and batches as data. Times are integer Unix seconds; None: it has not happened."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

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


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A stored file.

    ``owner`` is the name of the API key it belongs to, the digest of one without a name, "" without keys.
    """

    id: str
    owner: str
    num_bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """A batch.

    Attributes:
        output_file_id, error_file_id: readable results, once the batch has ended.
        output_blob, error_blob: ids under which results are written meanwhile; they become the file ids.
        output_retention_s: life of the result files.
    """

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: BatchStatus
    created_at: int
    expires_at: int
    output_blob: str
    error_blob: str
    output_retention_s: int
    model: str | None = None
    errors: list[LineError] = field(default_factory=list)
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    usage: TokenUsage = TokenUsage()
    metadata: dict[str, str] | None = None

    @property
    def last_timestamp(self) -> int:
        """The latest of the times at which it changed."""
        names = ("created_at", *(f"{status.value}_at" for status in BatchStatus))
        return max(getattr(self, name, None) or 0 for name in names)


@dataclass(frozen=True, slots=True)
class Page(Generic[Item]):
    """One page of a listing."""

    items: list[Item]
    has_more: bool


def new_file_id() -> str:
    return f"file-{uuid.uuid4().hex}"


def new_batch_id() -> str:
    return f"batch_{uuid.uuid4().hex}"
