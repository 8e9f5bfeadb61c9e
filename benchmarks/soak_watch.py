"""Watches the soak: the server's metrics, and the process of the probes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import aiohttp
from soak_checks import Histogram, Window, figures, gaps, gauge, overlaps

LAG = "backfill:event_loop_lag_seconds"
MAX_LAG = "backfill:event_loop_lag_max_seconds"  # of the last minute
_IDLE_GAUGES = (
    "backfill:num_requests_running",
    "backfill:num_requests_waiting",
    "backfill:kv_cache_usage_perc",
    "backfill:host_kv_cache_usage_perc",
)
_SCRAPE_S = 1.0


class MetricsWatch:
    """Reads ``/metrics`` every second, and sums the event-loop lag over restarts of the server."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._lives: list[Histogram] = []  # the last one read before each restart
        self._max_lags: list[tuple[float, float]] = []  # read_at_s, seconds

    async def run(self) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(30.0)) as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                    self._take(await self._read(session))
                await asyncio.sleep(_SCRAPE_S)

    async def lag(self) -> Histogram | None:
        """The current lag. Raises: aiohttp.ClientError, OSError."""
        text = await self._text()
        self._take(text)
        return Histogram.parse(text, LAG)

    def lag_of_all_lives(self) -> dict[str, float] | None:
        """Figures; None where the server exposes no such metric."""
        if not self._lives:
            return None
        total = self._lives[0]
        for life in self._lives[1:]:
            total += life
        return lag_figures(total, self.max_lag((-math.inf, math.inf)))

    def max_lag(self, during: Window) -> float:
        """An upper bound of the lag in a watched window: the metric covers the last minute."""
        return max((lag for at_s, lag in self._max_lags if during[0] <= at_s <= during[1]), default=math.inf)

    async def busy_when_idle(self, timeout_s: float) -> list[str]:
        """Gauges that are still not 0 after ``timeout_s`` without clients."""
        deadline_at_s = time.monotonic() + timeout_s
        while True:
            try:
                text = await self._text()
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                return [f"the metrics cannot be read: {error!r}"]
            busy = [f"{name} is {value:g}" for name in _IDLE_GAUGES if (value := gauge(text, name))]
            if not busy or time.monotonic() > deadline_at_s:
                return busy
            await asyncio.sleep(0.5)

    async def _text(self) -> str:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(30.0)) as session:
            return await self._read(session)

    async def _read(self, session: aiohttp.ClientSession) -> str:
        async with session.get(f"{self._url}/metrics") as response:
            return await response.text()

    def _take(self, text: str) -> None:
        lag = Histogram.parse(text, LAG)
        if lag is None:
            return
        self._max_lags.append((time.monotonic(), gauge(text, MAX_LAG)))
        if self._lives and self._lives[-1].total <= lag.total:
            self._lives.pop()
        self._lives.append(lag)


def lag_figures(lag: Histogram | None, most_s: float = math.inf) -> dict[str, float] | None:
    """Upper bounds of buckets in seconds; ``max_s`` is at most ``most_s``."""
    if lag is None:
        return None
    return {
        "count": lag.total,
        "p50_s": lag.quantile(0.5),
        "p99_s": lag.quantile(0.99),
        "max_s": min(most_s, lag.quantile(1.0)) if lag.total else math.nan,
    }


class ProbeRecords:
    """The records of ``soak_probe.py``."""

    def __init__(self, path: Path) -> None:
        self.health: list[tuple[float, float, int]] = []  # sent_at_s, took_s, status
        self.late: list[tuple[float, float]] = []
        self.tokens: list[tuple[int, float]] = []
        self.streams: list[tuple[int, float, float, str]] = []
        lists = {"health": self.health, "late": self.late, "token": self.tokens, "stream": self.streams}
        for line in path.read_text().splitlines():
            kind, *fields = json.loads(line)
            lists[kind].append(tuple(fields))

    def summary(
        self, during: Window, server_outages: Sequence[Window], stream_outages: Sequence[Window]
    ) -> dict[str, dict[str, float]]:
        """Figures of requests and gaps that began within ``during`` and met no outage."""
        start_s, end_s = during
        health = [
            (took_s, status)
            for sent_at_s, took_s, status in self.health
            if start_s <= sent_at_s < end_s and not overlaps(sent_at_s, sent_at_s + took_s, server_outages)
        ]
        tokens = [token for token in self.tokens if start_s <= token[1] < end_s]
        return {
            "health": {
                **figures([took_s for took_s, _ in health]),
                "unanswered": sum(status == 0 for _, status in health),
            },
            "stream_gap": figures(gaps(tokens, stream_outages)),
            "prober_late": figures([late_s for at_s, late_s in self.late if start_s <= at_s < end_s]),
        }


@contextmanager
def probing(port: int, path: Path) -> Iterator[None]:
    """Run the probes until the context ends; ``path`` then holds their records."""
    command = [sys.executable, str(Path(__file__).with_name("soak_probe.py")), str(port), str(path)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        if process.wait(30.0) != 0:
            print(f"the probes ended with status {process.returncode}", file=sys.stderr)


def table(rows: dict[str, dict[str, float] | None]) -> str:
    """Times in milliseconds, a row each."""
    lines = [f"{'':34s}{'count':>9s}{'P50 ms':>11s}{'P99 ms':>11s}{'max ms':>11s}"]
    for name, row in rows.items():
        if row is None:
            lines.append(f"{name:34s}  not exposed by this server")
            continue
        values = "".join(f"{_ms(row[key]):>11s}" for key in ("p50_s", "p99_s", "max_s"))
        lines.append(f"{name:34s}{row['count']:9.0f}{values}")
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if math.isfinite(seconds) else "-" if math.isnan(seconds) else "over"


def finite(value: object) -> object:
    """``value`` for JSON; null for a figure without samples or beyond a histogram's last bucket."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
