"""Errors of the Files and Batches API. A bad argument is a RequestError."""

from __future__ import annotations

from backfill.core.errors import BackfillError


class NotFound(BackfillError):
    """No file or batch of this id belongs to the caller."""


class Conflict(BackfillError):
    """The state of the file or batch does not allow the request; a retry would not help."""


class TooLarge(BackfillError):
    """The file is over a limit, or the store is full."""


class StorageFull(TooLarge):
    """The free space of the server's disk is kept for results."""


class TooMany(BackfillError):
    """The owner has as many open batches, or lines in them, as allowed; some must end first."""


class TooManyUploads(BackfillError):
    """The limit of open uploads is reached; a retry may help."""


class Busy(BackfillError):
    """The database does not answer in time; a retry may help."""
