"""How many descriptors this process may have, and so how many connections."""

from __future__ import annotations

import resource

MOST_CONNECTIONS = 8192
_MOST_OPEN_FILES = 1 << 20  # where the system sets no limit


def raise_open_files_limit() -> int:
    """Raise the soft limit of open files to the hard one; returns what holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    asked = _MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < asked:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (asked, hard))
        except (OSError, ValueError):  # some systems allow less than they say
            return soft
    return asked


def default_max_connections(num_open_files: int) -> int:
    """Three quarters of the descriptors, at most 8192: files, sockets of the engine and uploads need some."""
    return max(1, min(MOST_CONNECTIONS, num_open_files * 3 // 4))
