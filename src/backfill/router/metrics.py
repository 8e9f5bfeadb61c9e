"""Metrics of the router."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from backfill.core.clock import Clock
from backfill.http.metrics import Families
from backfill.router.engines import Engines

_PROMPT_TOKENS = 256  # of the prompt whose TTFT is shown: a question with its instructions


class RouterMetrics(Collector):
    """Counts what was sent where; gauges are read when scraped.

    Attributes:
        retries: attempts that were followed by another, by reason.
        num_broken: answers that were cut off after they had begun.
    """

    def __init__(self, engines: Engines, clock: Clock) -> None:
        self.retries: Counter[str] = Counter({"lost": 0, "unreachable": 0, "refused": 0})
        self.num_broken = 0
        self._clock = clock
        self._sent: Counter[tuple[str, ...]] = Counter()
        self._engines = engines
        self.registry = CollectorRegistry(support_collectors_without_names=True)
        self.registry.register(self)

    def on_sent(self, engine: str, *, is_offline: bool) -> None:
        self._sent[engine, "offline" if is_offline else "online"] += 1

    def collect(self) -> Iterable[Metric]:
        families = Families()
        yield families.counter(
            "router_requests", "Requests and lines sent to an engine", self._sent, "engine", "class"
        )
        yield families.counter("router_retries", "Attempts that failed", self.retries, "reason")
        yield families.counter(
            "router_broken_responses", "Answers cut off after they had begun", self.num_broken
        )
        engines, now_s = self._engines, self._clock.now_s()
        ups = {engine.url: float(engine.is_up) for engine in engines.all}
        in_flight = {engine.url: float(engine.num_in_flight) for engine in engines.all}
        replicas = engines.replicas.replicas
        ttfts = {replica.name: replica.ttft_s(_PROMPT_TOKENS, now_s) for replica in replicas}
        lines = {replica.name: float(replica.state.num_lines) for replica in replicas}
        corrections = {replica.name: replica.correction for replica in replicas}
        yield families.gauge("router_engine_up", "1 if the engine accepts requests", ups, "engine")
        yield families.counter("router_engine_losses", "How often it was lost", engines.num_lost, "engine")
        yield families.gauge("router_in_flight", "Requests and lines that it has", in_flight, "engine")
        yield families.gauge("router_lines", "Lines of batches that it has", lines, "engine")
        yield families.gauge(
            "router_predicted_ttft_seconds",
            f"Predicted TTFT of {_PROMPT_TOKENS} new prompt tokens that come now",
            ttfts,
            "engine",
        )
        yield families.gauge(
            "router_ttft_correction_ratio", "Measured over predicted TTFT", corrections, "engine"
        )
