from __future__ import annotations

import resource

from backfill.http.server import default_max_connections, raise_open_files_limit


def test_the_soft_limit_becomes_the_hard_one() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard, 300), hard))
        raised = raise_open_files_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == raised
        assert hard in (raised, resource.RLIM_INFINITY)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_connections_leave_descriptors_for_the_rest() -> None:
    assert default_max_connections(1024) == 768
    assert default_max_connections(1 << 20) == 8192
    assert default_max_connections(1) == 1
