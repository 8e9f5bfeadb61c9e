"""What ``/metrics`` exposes. Every metric is defined here, once."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from backfill.api.loop_lag import LoopLag
from backfill.core.request import FinishReason, ServiceClass
from backfill.core.slo import SLO
from backfill.costs.profile import CostProfile
from backfill.engine.messages import EngineStats, StepKind, StepReport
from backfill.execution.executor import ExecutorInfo
from backfill.generation.generator import RequestRecord
from backfill.jobs.manager import JobsSnapshot
from backfill.jobs.records import BatchStatus, LineOutcome, TokenUsage
from backfill.preparation.client import PreparationClient

# When a counter was made is a series of its own otherwise, for each of them.
disable_created_metrics()  # type: ignore[no-untyped-call]

# Bucket bounds in seconds. Those of vLLM, so that its dashboards read ours; ITL starts lower, since
# small models decode in less than 10 ms.
TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
ITL_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4,
    0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
LATENCY_BUCKETS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
STEP_TOKEN_BUCKETS = (1, 8, *(16 << i for i in range(11)))
# Observed over predicted: fine where a good profile lies.
STEP_RATIO_BUCKETS = (
    0.25, 0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 1, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5, 2, 4,
)  # fmt: skip
STOP_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1)
PREEMPTION_BUCKETS = (1, 2, 3, 4, 5, 10, 20)
CHOICE_BUCKETS = (1, 2, 5, 10, 20)
HTTP_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


def token_buckets(max_model_len: int) -> tuple[int, ...]:
    """1, 2, 5, 10, ... up to the longest request."""
    bounds, scale = [], 1
    while scale <= max_model_len:
        bounds += [scale * step for step in (1, 2, 5) if scale * step <= max_model_len]
        scale *= 10
    return tuple(bounds)


class ObjectiveCounts(NamedTuple):
    """How often an objective was met and missed: a request's first token, or a gap between two tokens."""

    num_met: int = 0
    num_missed: int = 0


class Metrics:
    """The server's registry, by group. Names begin with ``backfill:``; times are in seconds.

    Args:
        model_name: value of the ``model_name`` label.
        info: the engine's facts, for bucket bounds and ``cache_config_info``.
        slo: the server's own objectives, which become bucket bounds.
        jobs: exposed too; None where the Batch API is switched off.
        preparation: the process that prepares large bodies; its state is read when scraped.
        task_failures: by name, the tasks of the server that an exception has ended; read when scraped.
    """

    def __init__(
        self,
        model_name: str,
        info: ExecutorInfo,
        *,
        slo: SLO,
        loop_lag: LoopLag,
        jobs: JobMetrics | None = None,
        preparation: PreparationClient | None = None,
        task_failures: Mapping[str, int] | None = None,
        vllm_names: bool = False,
    ) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(loop_lag)
        if jobs is not None:
            self.registry.register(jobs)
        labels = {"model_name": model_name, "engine": "0"}
        self.engine = EngineMetrics(self.registry, labels, info, vllm_names=vllm_names)
        self.requests = RequestMetrics(self.registry, labels, info.max_model_len, slo)
        self.http = HttpMetrics(self.registry)
        if preparation is not None:
            self.registry.register(_PreparationState(preparation))
        self.registry.register(_TaskFailures(task_failures or {}))

    def expose(self) -> bytes:
        return generate_latest(self.registry)


class RequestMetrics:
    """Requests by service class, and what was refused at the door. A ``generation`` Observer."""

    def __init__(
        self, registry: CollectorRegistry, labels: dict[str, str], max_model_len: int, slo: SLO
    ) -> None:
        self._registry = registry
        self._labels = labels
        self._define_latencies(slo)
        self._define_sizes(token_buckets(max_model_len))
        self._success = self._counter("request_success", "Requests that ended", "finished_reason")
        self._rejections = Counter(
            "backfill:admission_rejections",
            "Requests refused at the door",
            ["model_name", "reason", "class"],
            registry=registry,
        )
        self._attained = self._count_by_objective(
            "slo_attained", "Objectives of online requests that were met"
        )
        self._missed = self._count_by_objective(
            "slo_missed", "Objectives of online requests that were missed"
        )

    def on_first_token(self, service_class: ServiceClass, since_arrival_s: float, slo: SLO | None) -> None:
        self._ttft[service_class].observe(since_arrival_s)
        self._generation_tokens[service_class].inc()
        if slo is not None:
            (self._attained if since_arrival_s <= slo.ttft_s else self._missed)["ttft"].inc()

    def on_next_token(self, service_class: ServiceClass, since_last_s: float, slo: SLO | None) -> None:
        self._itl[service_class].observe(since_last_s)
        self._generation_tokens[service_class].inc()
        if slo is not None:
            (self._attained if since_last_s <= slo.tpot_s else self._missed)["tpot"].inc()

    def on_finished(self, record: RequestRecord) -> None:
        which = record.service_class
        ending = {"class": which.value, "finished_reason": record.finish_reason.value}
        self._success.labels(**self._labels, **ending).inc()
        self._prompt_tokens[which].inc(record.num_prompt_tokens)
        self._num_prompt[which].observe(record.num_prompt_tokens)
        self._num_generated[which].observe(record.num_output_tokens)
        self._max_tokens[which].observe(record.max_tokens)
        self._preempted[which].observe(record.num_preemptions)
        self._e2e[which].observe(record.finished_at_s - record.arrived_at_s)
        first, last = record.first_token_at_s, record.last_token_at_s
        if first is None or last is None:
            self._count_tokenless(record)
            return
        self._decode[which].observe(last - first)
        if record.num_output_tokens > 1:
            self._tpot[which].observe((last - first) / (record.num_output_tokens - 1))
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
        """How often each objective was met and missed, by its name."""
        return {
            slo: ObjectiveCounts(_count_of(self._attained[slo]), _count_of(self._missed[slo]))
            for slo in self._attained
        }

    def _count_tokenless(self, record: RequestRecord) -> None:
        """It missed its TTFT objective if it failed, or if its client gave up after that had passed."""
        if record.slo is None:
            return
        waited_s = record.finished_at_s - record.arrived_at_s
        if record.finish_reason is FinishReason.ERROR or waited_s > record.slo.ttft_s:
            self._missed["ttft"].inc()

    def _define_latencies(self, slo: SLO) -> None:
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token", {*TTFT_BUCKETS, slo.ttft_s}
        )
        self._itl = self._histogram(
            "inter_token_latency_seconds", "Gap between two tokens", {*ITL_BUCKETS, slo.tpot_s}
        )
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds",
            "(last - first token) / (n - 1) of a request; requests of one token are left out",
            ITL_BUCKETS,
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to end", LATENCY_BUCKETS)
        self._queue = self._histogram(
            "request_queue_time_seconds", "Arrival to first scheduled", LATENCY_BUCKETS
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "First scheduled to first token", LATENCY_BUCKETS
        )
        self._decode = self._histogram("request_decode_time_seconds", "First to last token", LATENCY_BUCKETS)
        self._inference = self._histogram(
            "request_inference_time_seconds", "First scheduled to last token", LATENCY_BUCKETS
        )

    def _define_sizes(self, tokens: tuple[int, ...]) -> None:
        self._num_prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request", tokens)
        self._num_generated = self._histogram(
            "request_generation_tokens", "Output tokens of a request", tokens
        )
        self._max_tokens = self._histogram("request_params_max_tokens", "max_tokens of a request", tokens)
        self._preempted = self._histogram(
            "request_num_preemptions", "Preemptions of a request", PREEMPTION_BUCKETS
        )
        self._choices = self._histogram("request_params_n", "Choices of an API request", CHOICE_BUCKETS)
        self._prompt_tokens = self._count_by_class("prompt_tokens", "Prompt tokens of ended requests")
        self._generation_tokens = self._count_by_class("generation_tokens", "Output tokens")

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> dict[ServiceClass, Histogram]:
        family = Histogram(
            f"backfill:{name}",
            text,
            [*self._labels, "class"],
            buckets=sorted(buckets),
            registry=self._registry,
        )
        return {which: family.labels(**self._labels, **{"class": which.value}) for which in ServiceClass}

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"backfill:{name}", text, [*self._labels, "class", *labels], registry=self._registry)

    def _count_by_class(self, name: str, text: str) -> dict[ServiceClass, Counter]:
        family = self._counter(name, text)
        return {which: family.labels(**self._labels, **{"class": which.value}) for which in ServiceClass}

    def _count_by_objective(self, name: str, text: str) -> dict[str, Counter]:
        """Of the online class; an offline request has no objective."""
        family, which = self._counter(name, text, "slo"), {"class": ServiceClass.ONLINE.value}
        return {slo: family.labels(**self._labels, **which, slo=slo) for slo in ("ttft", "tpot")}


def _count_of(counter: Counter) -> int:
    return int(sum(sample.value for family in counter.collect() for sample in family.samples))


class EngineMetrics:
    """The engine's steps and state."""

    def __init__(
        self, registry: CollectorRegistry, labels: dict[str, str], info: ExecutorInfo, *, vllm_names: bool
    ) -> None:
        self._state = _EngineState(
            labels, token_bytes=info.block_bytes / info.block_size, vllm_names=vllm_names
        )
        registry.register(self._state)
        self._step_tokens = Histogram(
            "backfill:iteration_tokens_total",
            "Tokens computed in a step",
            list(labels),
            buckets=STEP_TOKEN_BUCKETS,
            registry=registry,
        ).labels(**labels)
        seconds = Histogram(
            "backfill:step_seconds",
            "Duration of a step",
            [*labels, "kind"],
            buckets=ITL_BUCKETS,
            registry=registry,
        )
        kinds: tuple[StepKind, ...] = ("online", "mixed", "offline")
        self._step_seconds = {kind: seconds.labels(**labels, kind=kind) for kind in kinds}
        self._step_ratio = Histogram(
            "backfill:step_predicted_ratio",
            "Duration of a step over what the cost model predicted",
            list(labels),
            buckets=STEP_RATIO_BUCKETS,
            registry=registry,
        ).labels(**labels)
        self._stop_latency = Histogram(
            "backfill:abort_latency_seconds",
            "From an arrival to the safepoint where it stopped the running step's offline part",
            list(labels),
            buckets=STOP_BUCKETS,
            registry=registry,
        ).labels(**labels)
        facts = {
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.num_blocks),
            "cache_dtype": info.dtype,
            "device": info.device,
        }
        self.offline_suspended = Gauge(
            "backfill:offline_suspended",
            "1 while no offline work is taken because the engine kept dying",
            list(labels),
            registry=registry,
        ).labels(**labels)
        Gauge(
            "backfill:cache_config_info", "The KV pool; always 1", [*labels, *facts], registry=registry
        ).labels(**labels, **facts).set(1)
        self._profile = _ProfileState(labels)
        registry.register(self._profile)

    def on_report(self, report: StepReport) -> None:
        self._state.stats = report.stats
        step = report.stats.step
        if step.stop_latency_s is not None:
            self._stop_latency.observe(step.stop_latency_s)
        if step.kind == "none" or step.stopped:
            return
        self._step_tokens.observe(step.num_tokens)
        self._step_seconds[step.kind].observe(step.seconds)
        if step.predicted_s > 0:
            self._step_ratio.observe(step.seconds / step.predicted_s)

    def on_profile(self, profile: CostProfile) -> None:
        """Steps are predicted with this profile from now on."""
        self._profile.profile = profile

    def on_death(self) -> None:
        """Nothing runs or waits any more; totals begin anew with the next engine."""
        self._state.stats = None


class _ProfileState(Collector):
    """The cost profile in use; nothing without one."""

    def __init__(self, constant: dict[str, str]) -> None:
        self.profile: CostProfile | None = None
        self._constant = constant

    def collect(self) -> Iterable[Metric]:
        if self.profile is None:
            return
        info = GaugeMetricFamily(
            "backfill:cost_profile_info",
            "The cost profile in use; always 1",
            labels=[*self._constant, "quality"],
        )
        info.add_metric([*self._constant.values(), self.profile.quality], 1)
        yield info
        error = GaugeMetricFamily(
            "backfill:cost_profile_error_ratio",
            "|predicted - measured| / measured of steps that the profile was not fitted on",
            labels=[*self._constant, "quantile"],
        )
        error.add_metric([*self._constant.values(), "0.5"], self.profile.error.median)
        error.add_metric([*self._constant.values(), "0.95"], self.profile.error.p95)
        yield error


class HttpMetrics:
    """HTTP requests by route, under the names of prometheus-fastapi-instrumentator."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "http_requests", "HTTP requests", ["method", "handler", "status"], registry=registry
        )
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "Duration of HTTP requests to the end of the response",
            ["method", "handler"],
            buckets=HTTP_BUCKETS,
            registry=registry,
        )

    def on_request(self, method: str, handler: str, status: int, duration_s: float) -> None:
        self._requests.labels(method, handler, str(status)).inc()
        self._seconds.labels(method, handler).observe(duration_s)


class _PreparationState(Collector):
    """The process that prepares large bodies and lines of batches."""

    def __init__(self, preparation: PreparationClient) -> None:
        self._preparation = preparation

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "backfill:preparation_up", "1 while the preparation process is ready", self._preparation.is_up
        )
        yield CounterMetricFamily(
            "backfill:preparation_deaths",
            "Preparation processes that ended unasked",
            self._preparation.num_deaths,
        )


class _TaskFailures(Collector):
    """Long-lived tasks of the server that ended unexpectedly."""

    def __init__(self, failures: Mapping[str, int]) -> None:
        self._failures = failures

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(
            "backfill:task_failures", "Tasks of the server that an exception ended", labels=["task"]
        )
        for name, count in self._failures.items():
            family.add_metric([name], count)
        yield family


# Totals by class, without "_total", each of that attribute of ClassCounters with "num_" before it.
_TOTALS = {
    "preemptions": "Preemptions",
    "recomputed_tokens": "Tokens computed again after a preemption had dropped their KV",
    "aborted_tokens": "Tokens computed for nothing in stopped steps",
    "checkpointed_tokens": "Tokens whose KV was copied to host memory",
    "reclaimed_tokens": "Tokens of preempted requests whose KV was kept in host memory",
    "restored_tokens": "Tokens whose KV was copied back to the device",
}


class _EngineState(Collector):
    """Gauges and totals the engine reports, read when scraped."""

    def __init__(self, constant: dict[str, str], *, token_bytes: float, vllm_names: bool) -> None:
        self.stats: EngineStats | None = None
        self._constant = constant
        self._token_bytes = token_bytes
        self._vllm_names = vllm_names

    def collect(self) -> Iterable[Metric]:
        stats = self.stats
        if stats is None:
            return
        by_class = {"online": stats.online, "offline": stats.offline}
        yield self._by_class("num_requests_running", "Requests in the batch", by_class, "num_running")
        yield self._by_class("num_requests_waiting", "Requests that wait", by_class, "num_waiting")
        totals = {which: stats.totals for which, stats in by_class.items()}
        for name, text in _TOTALS.items():
            exposed = "num_preemptions" if name == "preemptions" else name  # vLLM's name
            yield self._by_class(f"{exposed}_total", text, totals, f"num_{name}")
        for name, text, attribute in (
            ("checkpointed_bytes", "Bytes of KV copied to host memory", "num_checkpointed_tokens"),
            ("restored_bytes", "Bytes of KV copied back", "num_restored_tokens"),
        ):
            copied = sum(getattr(each, attribute) for each in totals.values())
            yield self._counter(name, text, copied * self._token_bytes)
        yield self._counter(
            "step_aborts", "Steps whose offline part was stopped for an arrival", stats.num_stopped_steps
        )
        for name, text, value in (
            ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", stats.kv_usage_frac),
            ("host_kv_cache_usage_perc", "Likewise of those in host memory", stats.host_kv_usage_frac),
            ("kv_blocks_checkpointed", "Blocks with a copy in host memory", stats.num_checkpointed_blocks),
        ):
            gauge = GaugeMetricFamily(f"backfill:{name}", text, labels=list(self._constant))
            gauge.add_metric(list(self._constant.values()), value)
            yield gauge
        if self._vllm_names:
            yield from self._under_vllm_names(stats)

    def _by_class(self, name: str, text: str, by_class: Mapping[str, object], attribute: str) -> Metric:
        kind = "counter" if name.endswith("_total") else "gauge"
        family = Metric(f"backfill:{name.removesuffix('_total')}", text, kind)
        for which, values in by_class.items():
            family.add_sample(
                f"backfill:{name}", {**self._constant, "class": which}, float(getattr(values, attribute))
            )
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"backfill:{name}", text, labels=list(self._constant))
        family.add_metric(list(self._constant.values()), value)
        return family

    def _under_vllm_names(self, stats: EngineStats) -> Iterable[Metric]:
        """The sums over classes that routers and autoscalers key on."""
        values = {
            "num_requests_running": stats.online.num_running + stats.offline.num_running,
            "num_requests_waiting": stats.online.num_waiting + stats.offline.num_waiting,
            "kv_cache_usage_perc": stats.kv_usage_frac,
        }
        for name, value in values.items():
            family = GaugeMetricFamily(
                f"vllm:{name}", "As backfill:, classes summed", labels=list(self._constant)
            )
            family.add_metric(list(self._constant.values()), value)
            yield family


class JobMetrics(Collector):
    """Batches and their lines. A ``jobs`` JobObserver; gauges are read when scraped.

    It exists before the engine is loaded, unlike the other groups: batches may end meanwhile.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._snapshot: Callable[[], JobsSnapshot] | None = None
        self._lines: Tally[LineOutcome] = Tally()
        self._tokens = {"input": 0, "cached": 0, "output": 0}

    def watch(self, snapshot: Callable[[], JobsSnapshot]) -> None:
        """Where the gauges come from."""
        self._snapshot = snapshot

    def on_lines(self, outcome: LineOutcome, num_lines: int, usage: TokenUsage) -> None:
        self._lines[outcome] += num_lines
        self._tokens["input"] += usage.input_tokens
        self._tokens["cached"] += usage.cached_tokens
        self._tokens["output"] += usage.output_tokens

    def collect(self) -> Iterable[Metric]:
        lines = CounterMetricFamily(
            "backfill:batch_lines", "Lines of batches that ended", labels=["model_name", "outcome"]
        )
        for outcome in LineOutcome:
            lines.add_metric([self._model_name, outcome.value], self._lines[outcome])
        yield lines
        tokens = CounterMetricFamily(
            "backfill:batch_tokens", "Tokens of completed lines", labels=["model_name", "kind"]
        )
        for kind, num_tokens in self._tokens.items():
            tokens.add_metric([self._model_name, kind], num_tokens)
        yield tokens
        if self._snapshot is not None:
            yield from self._gauges(self._snapshot())

    def _gauges(self, snapshot: JobsSnapshot) -> Iterable[Metric]:
        jobs = GaugeMetricFamily(
            "backfill:batch_jobs", "Batches that have not ended", labels=["model_name", "status"]
        )
        for status in BatchStatus:
            if not status.is_final:
                num_jobs = snapshot.jobs_by_status.get(status, 0)
                jobs.add_metric([self._model_name, status.value], num_jobs)
        yield jobs
        for name, text, value in (
            ("lines_queued", "Lines of open batches that have not ended", snapshot.num_lines_queued),
            ("oldest_line_seconds", "Age of the oldest batch with unfinished lines", snapshot.oldest_line_s),
            ("deadline_slack_seconds", "Time to the first deadline", snapshot.least_slack_s),
        ):
            gauge = GaugeMetricFamily(f"backfill:batch_{name}", text, labels=["model_name"])
            if value is not None:
                gauge.add_metric([self._model_name], value)
            yield gauge
