"""The limit of open files, and the default limit of connections that follows from it."""

from __future__ import annotations

import resource

MAX_CONNECTIONS = 8192
_MAX_OPEN_FILES = 1 << 20  # where the system sets no limit


def raise_open_files_limit() -> int:
    """Raise the soft limit of open files to the hard limit; returns the limit in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    asked = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < asked:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (asked, hard))
        except (OSError, ValueError):  # some systems allow less than the hard limit
            return soft
    return asked


def default_max_connections(num_open_files: int) -> int:
    """Three quarters of the descriptors, at most 8192; files, uploads and the engine need the rest."""
    return max(1, min(MAX_CONNECTIONS, num_open_files * 3 // 4))
