"""Metrics of the engine: its steps, its KV pool, its cost profile."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from backfill.api.metrics.requests import ITL_S
from backfill.core.slo import SLO
from backfill.costs.profile import CostProfile
from backfill.engine.messages import EngineStats, StepKind, StepReport
from backfill.execution.executor import ExecutorInfo
from backfill.http.metrics import Families, Instruments

# Upper bounds of histograms' buckets.
STEP_TOKENS = (1, 8, *(16 << i for i in range(11)))
# Observed over predicted: narrow buckets near 1, where a good profile lies.
STEP_RATIO = (
    0.25, 0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 1, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5, 2, 4,
)  # fmt: skip
STOP_LATENCY_S = (0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1)


class EngineMetrics:
    """What the engine reports after each step.

    Args:
        slo: the server's objectives.
        vllm_names: expose the metrics that routers and autoscalers read under vLLM's names too; the load is
            then that of online requests alone.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        labels: dict[str, str],
        info: ExecutorInfo,
        slo: SLO,
        *,
        vllm_names: bool,
    ) -> None:
        self._state = _EngineState(labels, info, vllm_names=vllm_names)
        registry.register(self._state)
        instruments = Instruments(registry, labels)
        self._step_tokens = instruments.histogram(
            "iteration_tokens_total", "Tokens computed in a step", STEP_TOKENS
        )
        step_seconds = instruments.histogram("step_seconds", "Duration of a step", ITL_S, "kind")
        kinds: tuple[StepKind, ...] = ("online", "mixed", "offline")
        self._step_seconds = {kind: step_seconds.labels(**labels, kind=kind) for kind in kinds}
        self._step_ratio = instruments.histogram(
            "step_predicted_ratio", "Duration of a step over its predicted duration", STEP_RATIO
        )
        self._stop_latency = instruments.histogram(
            "stop_latency_seconds",
            "From the request to stop a step, made at an arrival, to the safepoint where it stopped",
            STOP_LATENCY_S,
        )
        self.offline_suspended = instruments.gauge(
            "offline_suspended", "1 while no offline work is accepted because the engine kept dying"
        )
        self._slo = instruments.gauge(
            "slo_seconds", "The server's objectives for online requests that bring none", "slo"
        )
        self._labels = labels
        self.on_objectives(slo)

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

    def on_objectives(self, slo: SLO) -> None:
        """The server's own objectives from now on."""
        self._slo.labels(**self._labels, slo="ttft").set(slo.ttft_s)
        self._slo.labels(**self._labels, slo="tpot").set(slo.tpot_s)

    def on_profile(self, profile: CostProfile) -> None:
        """The engine predicts steps with ``profile`` from now on."""
        self._state.profile = profile

    def on_death(self) -> None:
        """Expose no state until the next engine reports; its totals start at 0."""
        self._state.stats = None


# Counters kept for each service class, each an attribute of ClassCounters that begins with "num_".
_CLASS_TOTALS = {
    "num_preemptions": "Preemptions",
    "recomputed_tokens": "Tokens computed again after a preemption",
    "discarded_tokens": "Tokens computed in slices that were stopped and discarded",
    "checkpointed_tokens": "Tokens whose KV was copied to host memory",
    "reclaimed_tokens": "Tokens of preempted requests whose KV was kept in host memory",
    "restored_tokens": "Tokens whose KV was copied back to the device",
}
# The prefix cache's counters kept for each service class and tier, each as attributes of ClassCounters.
_TIER_TOTALS = {
    "prefix_cache_hits": (
        "Tokens that were found in the prefix cache",
        {"device": "num_prefix_hit_tokens", "host": "num_host_prefix_hit_tokens"},
    ),
    "prefix_cache_evictions": (
        "Cached blocks whose memory was taken for other KV",
        {"device": "num_evicted_blocks", "host": "num_evicted_host_blocks"},
    ),
}


class _EngineState(Collector):
    """The engine's last report and the cost profile in use; no metrics of what is missing."""

    def __init__(self, labels: dict[str, str], info: ExecutorInfo, *, vllm_names: bool) -> None:
        self.stats: EngineStats | None = None
        self.profile: CostProfile | None = None
        self._families = Families(labels)
        self._vllm_families = Families(labels, prefix="vllm:") if vllm_names else None
        self._token_bytes = info.block_bytes / info.block_size
        self._pool = {
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.num_blocks),
            "cache_dtype": info.kv_dtype or info.dtype,
            "device": info.device,
        }

    def collect(self) -> Iterable[Metric]:
        for families in filter(None, (self._families, self._vllm_families)):
            yield families.gauge(
                "cache_config_info", "The KV pool; always 1", {tuple(self._pool.values()): 1}, *self._pool
            )
        if self.stats is not None:
            yield from self._of_classes(self.stats)
            yield from self._of_prefix_cache(self.stats)
            yield from self._of_engine(self.stats)
            if self._vllm_families is not None:
                yield from _under_vllm_names(self._vllm_families, self.stats)
        if self.profile is not None:
            yield from self._of_profile(self.profile)

    def _of_classes(self, stats: EngineStats) -> Iterable[Metric]:
        classes = {"online": stats.online, "offline": stats.offline}
        running = {which: each.num_running for which, each in classes.items()}
        waiting = {which: each.num_waiting for which, each in classes.items()}
        yield self._families.gauge(
            "num_requests_running", "Requests that hold device blocks", running, "class"
        )
        yield self._families.gauge("num_requests_waiting", "Requests that wait", waiting, "class")
        for name, text in _CLASS_TOTALS.items():
            attribute = "num_" + name.removeprefix("num_")
            totals = {which: getattr(each.totals, attribute) for which, each in classes.items()}
            yield self._families.counter(name, text, totals, "class")

    def _of_prefix_cache(self, stats: EngineStats) -> Iterable[Metric]:
        totals = {"online": stats.online.totals, "offline": stats.offline.totals}
        queries = {which: each.num_prefix_queried_tokens for which, each in totals.items()}
        yield self._families.counter(
            "prefix_cache_queries", "Tokens that were looked up in the prefix cache", queries, "class"
        )
        for name, (text, attributes) in _TIER_TOTALS.items():
            values: dict[tuple[str, ...], float] = {
                (which, tier): float(getattr(each, attribute))
                for which, each in totals.items()
                for tier, attribute in attributes.items()
            }
            yield self._families.counter(name, text, values, "class", "tier")
        blocks = {
            "empty": stats.num_empty_blocks,
            "cached": stats.num_cached_blocks,
            "cached_with_copy": stats.num_cached_copied_blocks,
            "protected": stats.num_protected_blocks,
            "referenced": stats.num_referenced_blocks,
        }
        yield self._families.gauge("kv_blocks", "Device blocks by state", blocks, "state")
        by_use: dict[tuple[str, ...], float] = {
            (tier, use): getattr(each, use)
            for tier, each in (("device", stats.device_blocks), ("host", stats.host_blocks))
            for use in ("online", "offline", "cached", "empty")
        }
        yield self._families.gauge("kv_tier_blocks", "Blocks of each tier by use", by_use, "tier", "use")

    def _of_engine(self, stats: EngineStats) -> Iterable[Metric]:
        online, offline = stats.online.totals, stats.offline.totals
        checkpointed = online.num_checkpointed_tokens + offline.num_checkpointed_tokens
        restored = online.num_restored_tokens + offline.num_restored_tokens
        for name, text, total in (
            ("checkpointed_bytes", "Bytes of KV copied to host memory", checkpointed * self._token_bytes),
            ("restored_bytes", "Bytes of KV copied back to the device", restored * self._token_bytes),
            (
                "offload_transferred_bytes",
                "Bytes of weights of offloaded layers transferred to the device",
                stats.num_transferred_weight_bytes,
            ),
            (
                "offload_stall_seconds",
                "Time for which steps waited for the weights of offloaded layers",
                stats.weight_stall_s,
            ),
            (
                "offload_bus_wait_seconds",
                "Time for which transfers waited for the bus that engines share",
                stats.bus_wait_s,
            ),
            ("step_stops", "Steps whose offline slices an arrival stopped", stats.num_stopped_steps),
            ("kv_blocks_entered", "Blocks that were entered from their other end", stats.num_entered_blocks),
            ("kv_slots_overwritten", "Slots overwritten in shared blocks", stats.num_overwritten_slots),
            ("kv_slots_copied", "Slots of shared blocks copied to host memory", stats.num_copied_slots),
        ):
            yield self._families.counter(name, text, total)
        for name, text, value in (
            ("kv_cache_usage_perc", "Share of device blocks in use, 0 to 1", stats.kv_usage_frac),
            ("host_kv_cache_usage_perc", "Share of host blocks in use, 0 to 1", stats.host_kv_usage_frac),
            ("offload_interval", "One layer in so many is offloaded; 0 for none", stats.offload_interval),
            ("kv_blocks_usable", "Blocks of the device's pool, which may change", stats.num_blocks),
            ("kv_blocks_draining", "Blocks in use that the pool is to lose", stats.num_draining_blocks),
            ("offload_bus_share", "Share of the bus that this engine may use, 0 to 1", stats.bus_share),
            (
                "offload_bus_load",
                "What the objectives of all engines on the bus need over its bandwidth",
                stats.bus_load,
            ),
            ("kv_blocks_checkpointed", "Blocks in use with a host copy", stats.num_checkpointed_blocks),
            ("kv_blocks_shared", "Blocks that two requests share", stats.num_shared_blocks),
            ("kv_blocks_paired", "Blocks that two running requests share", stats.num_paired_blocks),
        ):
            yield self._families.gauge(name, text, value)

    def _of_profile(self, profile: CostProfile) -> Iterable[Metric]:
        yield self._families.gauge(
            "cost_profile_info", "The cost profile in use; always 1", {profile.quality: 1}, "quality"
        )
        yield self._families.gauge(
            "cost_profile_error_ratio",
            "|predicted - measured| / measured of steps that the profile was not fitted on",
            {"0.5": profile.error.median, "0.95": profile.error.p95},
            "quantile",
        )


_ONLINE = "As backfill:, of online requests alone: offline work gives way to them"
_SUMMED = "As backfill:, summed over classes and tiers"


def _under_vllm_names(families: Families, stats: EngineStats) -> Iterable[Metric]:
    for name, value in (
        ("num_requests_running", stats.online.num_running),
        ("num_requests_waiting", stats.online.num_waiting),
        ("kv_cache_usage_perc", min(1.0, stats.device_blocks.online / max(1, stats.num_blocks))),
    ):
        yield families.gauge(name, _ONLINE, value)
    totals = (stats.online.totals, stats.offline.totals)
    for name, total in (
        ("prefix_cache_queries", sum(each.num_prefix_queried_tokens for each in totals)),
        ("prefix_cache_hits", sum(each.num_all_prefix_hit_tokens for each in totals)),
    ):
        yield families.counter(name, _SUMMED, total)
