from __future__ import annotations

import in_process
import pytest
import served

from backfill.core.counters import ClassCounters


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ('backfill:prefix_cache_queries_total{class="online"} 9\n', "no counter of prefix hits"),
        ('backfill:prefix_cache_hits_total{class="online"} 0\n'
         'backfill:prefix_cache_hits_total{class="offline"} 16\n', "16 prompt tokens came from"),
        ('backfill:prefix_cache_hits_total{class="online",tier="host"} 32\n', "32 prompt tokens came from"),
    ],
)  # fmt: skip
def test_figures_of_a_server_that_hit_its_cache_are_refused(
    monkeypatch: pytest.MonkeyPatch, metrics: str, message: str
) -> None:
    monkeypatch.setattr(served, "get", lambda port, path: metrics)
    with pytest.raises(SystemExit, match=message):
        served.check_no_prefix_hits(1)


def test_hits_of_an_engine_in_this_process_are_refused() -> None:
    in_process.check_no_prefix_hits([ClassCounters(num_prefix_queried_tokens=90), ClassCounters()])
    hit = ClassCounters(num_host_prefix_hit_tokens=16)
    with pytest.raises(SystemExit, match="16 prompt tokens came from the prefix cache"):
        in_process.check_no_prefix_hits([ClassCounters(), hit])
