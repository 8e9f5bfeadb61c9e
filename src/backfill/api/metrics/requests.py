"""Metrics of requests, by service class."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram

from backfill.core.request import FinishReason, ServiceClass
from backfill.core.slo import SLO
from backfill.generation.timeline import Observer, RequestRecord
from backfill.http.metrics import Instruments

# Upper bounds of histograms' buckets.
# vLLM's bounds, so that its dashboards can show our metrics. ITL starts lower: small models decode a token
# in less than 10 ms.
TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
ITL_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4,
    0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
LATENCY_S = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
CHOICES = (1, 2, 5, 10, 20)


class ObjectiveCounts(NamedTuple):
    """How often an objective was met and missed: by first tokens (TTFT), or by gaps between tokens (TPOT)."""

    num_met: int = 0
    num_missed: int = 0


class RequestMetrics(Observer):
    """Requests that ran and requests that were refused.

    Args:
        slo: the server's own objectives; they become bucket bounds.
        trace: is called with each request that has ended.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        labels: dict[str, str],
        max_model_len: int,
        slo: SLO,
        trace: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        self._trace = trace
        self._instruments = Instruments(registry, labels)
        self._labels = labels
        self._define_latencies(slo)
        self._define_sizes(_up_to(max_model_len))
        self._success = self._instruments.counter(
            "request_success", "Requests that ended", "class", "finished_reason"
        )
        self._rejections = Instruments(registry, {"model_name": labels["model_name"]}).counter(
            "admission_rejections", "Requests refused before they were queued", "reason", "class"
        )
        self._client_stalled = self._count_by_class(
            "client_stalled_seconds", "Time in which clients of streams kept the server from writing"
        )
        self._attained = self._count_by_objective("slo_attained", "Objectives met by online requests")
        self._missed = self._count_by_objective("slo_missed", "Objectives missed by online requests")

    def on_token(self, service_class: ServiceClass) -> None:
        self._generation_tokens[service_class].inc()

    def on_first_token(self, service_class: ServiceClass, since_arrival_s: float, slo: SLO | None) -> None:
        self._ttft[service_class].observe(since_arrival_s)
        if slo is not None:
            (self._attained if since_arrival_s <= slo.ttft_s else self._missed)["ttft"].inc()

    def on_next_token(self, service_class: ServiceClass, since_last_s: float, slo: SLO | None) -> None:
        self._itl[service_class].observe(since_last_s)
        if slo is not None:
            (self._attained if since_last_s <= slo.tpot_s else self._missed)["tpot"].inc()

    def on_client_stalled(self, service_class: ServiceClass, seconds: float) -> None:
        self._client_stalled[service_class].inc(seconds)

    def on_finished(self, record: RequestRecord) -> None:
        if self._trace is not None:
            self._trace(record)
        which = record.service_class
        self._success.labels(
            **self._labels, **{"class": which.value, "finished_reason": record.finish_reason.value}
        ).inc()
        self._prompt_tokens[which].inc(record.num_prompt_tokens)
        self._cached_tokens[which].inc(record.num_cached_tokens)
        self._num_prompt[which].observe(record.num_prompt_tokens)
        self._num_generated[which].observe(record.num_output_tokens)
        self._max_tokens[which].observe(record.max_tokens)
        self._preempted[which].observe(record.num_preemptions)
        self._e2e[which].observe(record.finished_at_s - record.arrived_at_s)
        first, last = record.first_token_at_s, record.last_token_at_s
        if first is None or last is None:
            self._count_missed_ttft(record)
            return
        self._decode[which].observe(last - first)
        if record.num_output_tokens > 1:
            by_server_s = last - first - record.client_stalled_s
            self._tpot[which].observe(by_server_s / (record.num_output_tokens - 1))
        scheduled = record.first_scheduled_at_s
        if scheduled is not None:
            self._queue[which].observe(scheduled - record.arrived_at_s)
            self._prefill[which].observe(first - scheduled)
            self._inference[which].observe(last - scheduled)

    def on_accepted(self, service_class: ServiceClass, num_choices: int) -> None:
        self._choices[service_class].observe(num_choices)

    def on_rejected(self, service_class: ServiceClass, reason: str) -> None:
        self._rejections.labels(self._labels["model_name"], reason, service_class.value).inc()

    def objective_counts(self) -> dict[str, ObjectiveCounts]:
        """How often each objective, ``ttft`` and ``tpot``, was met and missed."""
        return {
            name: ObjectiveCounts(_value_of(self._attained[name]), _value_of(self._missed[name]))
            for name in self._attained
        }

    def _count_missed_ttft(self, record: RequestRecord) -> None:
        """Of a request without a token: it failed, or its client left after the objective had passed."""
        if record.slo is None:
            return
        waited_s = record.finished_at_s - record.arrived_at_s
        if record.finish_reason is FinishReason.ERROR or waited_s > record.slo.ttft_s:
            self._missed["ttft"].inc()

    def _define_latencies(self, slo: SLO) -> None:
        ttft_s, itl_s = {*TTFT_S, slo.ttft_s}, {*ITL_S, slo.tpot_s}
        self._ttft = self._by_class("time_to_first_token_seconds", "Arrival to first token", ttft_s)
        self._itl = self._by_class("inter_token_latency_seconds", "Gap between tokens", itl_s)
        self._tpot = self._by_class(
            "request_time_per_output_token_seconds",
            "(last - first token) / (n - 1) of a request; requests of one token are left out",
            ITL_S,
        )
        self._e2e = self._latency("e2e_request_latency_seconds", "Arrival to end")
        self._queue = self._latency("request_queue_time_seconds", "Arrival to first scheduled")
        self._prefill = self._latency("request_prefill_time_seconds", "First scheduled to first token")
        self._decode = self._latency("request_decode_time_seconds", "First to last token")
        self._inference = self._latency("request_inference_time_seconds", "First scheduled to last token")

    def _define_sizes(self, tokens: tuple[int, ...]) -> None:
        self._num_prompt = self._by_class("request_prompt_tokens", "Prompt tokens of a request", tokens)
        self._num_generated = self._by_class(
            "request_generation_tokens", "Output tokens of a request", tokens
        )
        self._max_tokens = self._by_class("request_params_max_tokens", "max_tokens of a request", tokens)
        self._preempted = self._by_class("request_num_preemptions", "Preemptions of a request", PREEMPTIONS)
        self._choices = self._by_class("request_params_n", "Choices of an API request", CHOICES)
        self._prompt_tokens = self._count_by_class("prompt_tokens", "Prompt tokens of ended requests")
        self._cached_tokens = self._count_by_class(
            "prompt_tokens_cached", "Prompt tokens of ended requests that were found in the prefix cache"
        )
        self._generation_tokens = self._count_by_class("generation_tokens", "Output tokens")

    def _latency(self, name: str, text: str) -> dict[ServiceClass, Histogram]:
        return self._by_class(name, text, LATENCY_S)

    def _by_class(self, name: str, text: str, bounds: Iterable[float]) -> dict[ServiceClass, Histogram]:
        family = self._instruments.histogram(name, text, bounds, "class")
        return {which: family.labels(**self._labels, **{"class": which.value}) for which in ServiceClass}

    def _count_by_class(self, name: str, text: str) -> dict[ServiceClass, Counter]:
        family = self._instruments.counter(name, text, "class")
        return {which: family.labels(**self._labels, **{"class": which.value}) for which in ServiceClass}

    def _count_by_objective(self, name: str, text: str) -> dict[str, Counter]:
        """Only of the online class: offline requests have no objectives."""
        family = self._instruments.counter(name, text, "class", "slo")
        online = {"class": ServiceClass.ONLINE.value}
        return {slo: family.labels(**self._labels, **online, slo=slo) for slo in ("ttft", "tpot")}


def _value_of(counter: Counter) -> int:
    return int(sum(sample.value for family in counter.collect() for sample in family.samples))


def _up_to(max_model_len: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, ... up to ``max_model_len``, the most tokens of a request."""
    bounds, scale = [], 1
    while scale <= max_model_len:
        bounds += [scale * step for step in (1, 2, 5) if scale * step <= max_model_len]
        scale *= 10
    return tuple(bounds)
