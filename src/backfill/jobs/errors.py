"""What the keeper of files and batches refuses, beside RequestError for a bad argument."""

from __future__ import annotations

from backfill.core.errors import BackfillError


class NotFound(BackfillError):
    """No file or batch of this id belongs to the caller."""


class Conflict(BackfillError):
    """The file or batch is in a state that does not allow it; a retry would not help."""


class TooLarge(BackfillError):
    """The file is over a limit, or the store is full."""


class StorageFull(TooLarge):
    """The server's disk has less space left than is kept for results."""


class TooMany(BackfillError):
    """The owner has as many open batches, or lines in them, as allowed; some must end first."""


class TooManyUploads(BackfillError):
    """As many uploads are open as may be; a retry may help."""


class Busy(BackfillError):
    """The database does not answer in time; a retry may help."""
